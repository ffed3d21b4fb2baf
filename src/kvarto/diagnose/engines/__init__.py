"""One file per engine: its metric names over versions, its settings, its KV formats. `registry` finds them; vllm.py is the file to copy."""

from __future__ import annotations

from kvarto.diagnose.signals import Engine
from kvarto.registry import Registry

__all__ = ["registry"]

registry: Registry[Engine] = Registry(
    "engine", package="kvarto.diagnose.engines", attribute="ENGINES", group="kvarto.engines"
)
"""All engines by name."""
