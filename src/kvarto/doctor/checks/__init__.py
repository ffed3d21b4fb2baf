"""One file per check, or a few that are alike; `registry` finds them. monitoring.py is the file to copy."""

from __future__ import annotations

from kvarto.doctor.check import Check
from kvarto.registry import Registry

__all__ = ["ORDER", "registry"]

registry: Registry[Check] = Registry("check", package="kvarto.doctor.checks", attribute="CHECKS", group="kvarto.checks")
"""All checks by name."""

ORDER = (
    "monitoring", "format", "support", "calibration", "prefix caching", "chunked prefill", "continuous batching", "paged KV",
    "NaN", "generation", "baseline", "control", "evaluation", "fallback", "off switch",
)  # fmt: skip
"""As reports show them; others come after."""
