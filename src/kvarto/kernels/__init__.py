"""Attention over packed pages: one file per device or purpose, all behind `base.Kernel`."""
