"""Writes the golden page of each codec that has none. A page that exists is never overwritten: a codec whose bytes change raises its version
and explains itself in an ADR; then its old page is removed by hand.
"""

from __future__ import annotations

from pathlib import Path

from kvarto.attention import LayerKV, LayerSpec, OpenPages
from kvarto.codecs import registry
from kvarto.formats import Format
from kvarto.jit import torch
from kvarto.layout import Geometry
from kvarto.page import Page
from kvarto.testing import key_like

PAGES = Path(__file__).parent / "pages"
GEOMETRY = Geometry(heads=1, k_dim=64, v_dim=64)


def path(name: str) -> Path:
    """Where the golden page of a codec lies."""
    return PAGES / f"{name}.v{registry[name].version}.page"


def seal(name: str) -> Page:
    """The golden input, sealed by the codec called `name` through the whole cache."""
    device = torch.device("cpu")
    layer = LayerKV(
        LayerSpec(GEOMETRY),
        Format(registry[name], registry[name]),
        OpenPages(torch.float32, device),
        device=device,
        kernel="reference",
    )
    layer.append(key_like((1, 1, 64, 64), seed=42), key_like((1, 1, 64, 64), seed=43) / 50)
    return layer.sealed_page(0, 0)


if __name__ == "__main__":
    PAGES.mkdir(exist_ok=True)
    for name in registry:
        if not path(name).exists():
            path(name).write_bytes(seal(name).to_bytes())
            print(f"wrote {path(name).name}")
