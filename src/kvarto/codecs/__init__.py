"""One file per codec family; `registry` finds them. See base.py for what a codec is and bf16.py for the file to copy."""

from __future__ import annotations

from kvarto.codecs.base import Codec
from kvarto.registry import Registry

__all__ = ["Codec", "registry"]

registry: Registry[Codec] = Registry("codec", package="kvarto.codecs", attribute="CODECS", group="kvarto.codecs")
"""All codecs by name."""
