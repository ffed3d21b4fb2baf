"""Writes the golden page of each codec that has none, and beside it what the codec reads from it.

A file that exists is never overwritten: a codec whose bytes change raises its version and explains itself in an ADR; then its old files are
removed by hand.
"""

from __future__ import annotations

from pathlib import Path

import numpy as np

from kvarto.attention import LayerKV, LayerSpec, OpenPages
from kvarto.binding import BoundCodec
from kvarto.codecs import registry
from kvarto.formats import Format
from kvarto.jit import torch
from kvarto.layout import Geometry, Side
from kvarto.page import Page
from kvarto.testing import key_like

PAGES = Path(__file__).parent / "pages"
GEOMETRY = Geometry(heads=1, k_dim=64, v_dim=64)


def path(name: str) -> Path:
    """Where the golden page of a codec lies."""
    return PAGES / f"{name}.v{registry[name].version}.page"


def decoded_path(name: str) -> Path:
    """Where the numbers that the codec read from its golden page lie: `k` and `v`, float32 [S, D]."""
    return path(name).with_suffix(".npz")


def inputs() -> tuple[torch.Tensor, torch.Tensor]:
    """K and V of the golden page, float32 [1, 1, S, D]."""
    return key_like((1, 1, 64, 64), seed=42), key_like((1, 1, 64, 64), seed=43) / 50


def chosen(name: str) -> Format:
    """The codec called `name` on both sides, if it needs constants with those of the golden input."""
    k, v = (registry[name].fitted(x, side) for x, side in zip(inputs(), Side, strict=True))
    return Format(k, v)


def seal(name: str) -> Page:
    """The golden input, sealed by the codec called `name` through the whole cache."""
    device = torch.device("cpu")
    layer = LayerKV(
        LayerSpec(GEOMETRY),
        chosen(name),
        OpenPages(torch.float32, device),
        device=device,
        kernel="reference",
    )
    layer.append(*inputs())
    return layer.sealed_page(0, 0)


def decode(name: str, page: Page) -> dict[str, np.ndarray]:
    """The numbers that the codec called `name` reads from a golden page: `k` and `v`, float32 [S, D]."""
    codecs = chosen(name)
    layout = codecs.layout(GEOMETRY)
    payload = torch.frombuffer(bytearray(page.payload), dtype=torch.uint8)
    numbers = {}
    for side, codec in zip(Side, (codecs.k, codecs.v), strict=True):
        first, end = layout.slab_range(side)
        numbers[side.value] = BoundCodec(codec, layout.slab(side)).decode(payload[first:end]).numpy()
    return numbers


if __name__ == "__main__":
    PAGES.mkdir(exist_ok=True)
    for name in registry:
        if not path(name).exists():
            path(name).write_bytes(seal(name).to_bytes())
            print(f"wrote {path(name).name}")
        if not decoded_path(name).exists():
            np.savez_compressed(decoded_path(name), **decode(name, Page.from_bytes(path(name).read_bytes())))
            print(f"wrote {decoded_path(name).name}")
