"""kvarto: the quantized KV cache for long-context LLM inference that people can trust.

The names below are imported at first use, so that `import kvarto` costs nothing and needs no torch.
"""

from __future__ import annotations

import importlib
from typing import TYPE_CHECKING, Any

if TYPE_CHECKING:
    from kvarto.attention import LayerSpec, PagedKV
    from kvarto.formats import parse_format, parse_policy
    from kvarto.integrations.transformers import Cache
    from kvarto.page import Page

__version__ = "0.1.0"
__all__ = ["Cache", "LayerSpec", "Page", "PagedKV", "__version__", "parse_format", "parse_policy"]

_HOMES = {
    "Cache": "kvarto.integrations.transformers",
    "LayerSpec": "kvarto.attention",
    "Page": "kvarto.page",
    "PagedKV": "kvarto.attention",
    "parse_format": "kvarto.formats",
    "parse_policy": "kvarto.formats",
}


def __getattr__(name: str) -> Any:
    if name not in _HOMES:
        raise AttributeError(f"module 'kvarto' has no attribute {name!r}")
    if name == "Cache":
        from kvarto.jit import require

        require("torch")
        require("transformers")
    return getattr(importlib.import_module(_HOMES[name]), name)


def __dir__() -> list[str]:
    return sorted({*globals(), *__all__})
