"""kvarto: the quantized KV cache for long-context LLM inference that people can trust.

The names below are imported at first use, so that `import kvarto` costs nothing and needs no torch.
"""

from __future__ import annotations

import importlib
from typing import TYPE_CHECKING, Any

if TYPE_CHECKING:
    from kvarto.attention import LayerSpec, PagedKV
    from kvarto.engine.engine import Ask, Engine
    from kvarto.engine.request import Sampling
    from kvarto.formats import parse_format, parse_policy
    from kvarto.integrations.transformers import Cache
    from kvarto.page import Page

__version__ = "0.1.0"
__all__ = [
    "Ask", "Cache", "Engine", "LayerSpec", "Page", "PagedKV", "Sampling", "__version__", "parse_format", "parse_policy",
]  # fmt: skip

_HOMES = {
    "Ask": "kvarto.engine.engine",
    "Cache": "kvarto.integrations.transformers",
    "Engine": "kvarto.engine.engine",
    "LayerSpec": "kvarto.attention",
    "Page": "kvarto.page",
    "PagedKV": "kvarto.attention",
    "Sampling": "kvarto.engine.request",
    "parse_format": "kvarto.formats",
    "parse_policy": "kvarto.formats",
}


def __getattr__(name: str) -> Any:
    if name not in _HOMES:
        raise AttributeError(f"module 'kvarto' has no attribute {name!r}")
    if name in ("Ask", "Cache", "Engine"):
        from kvarto.jit import require

        require("torch")
        require("transformers")
    return getattr(importlib.import_module(_HOMES[name]), name)


def __dir__() -> list[str]:
    return sorted({*globals(), *__all__})
