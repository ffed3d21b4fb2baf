"""What tile readers are made of, against torch and numpy, over every bit pattern and over columns that fill no whole vector."""

from __future__ import annotations

from typing import Any

import pytest

pytest.importorskip("torch")
pytest.importorskip("numba")

import numpy as np
import torch

from kvarto.codecs import registry
from kvarto.codecs.packing import code_fields, pack, unpack_tile
from kvarto.jit import compile_reader
from kvarto.layout import Side, SlabLayout, slab_layout


def read(function: Any, layout: SlabLayout, slab: np.ndarray[Any, Any]) -> np.ndarray[Any, Any]:
    """The tile that a reader makes of a slab."""
    tile = np.full(layout.tile_shape, np.nan, np.float32)
    terms = [np.zeros(count, np.float32) for count in (layout.page_tokens, layout.page_tokens, layout.dim, layout.dim)]
    compile_reader(function, layout)(slab, np.zeros(0, np.float32), tile, *terms)
    return tile


@pytest.mark.parametrize("bits", [8, 4, 3, 2])
@pytest.mark.parametrize("dim", [8, 24, 72, 80, 128])
def test_codes(bits: int, dim: int) -> None:
    layout = slab_layout(Side.K, 32, dim, [("before", "uint8", (5,)), *code_fields(bits, 32, dim)])
    codes = torch.randint(0, 1 << bits, (32, dim), dtype=torch.uint8, generator=torch.Generator().manual_seed(bits))
    slab = np.full(layout.nbytes, 0xFF, np.uint8)
    for name, plane in pack(codes, bits).items():
        slab[layout[name].offset : layout[name].end] = plane.flatten().numpy()
    low, high = layout.fields[1].offset, layout.fields[-1].offset

    def function(slab, constants, tile, row_scale, row_zero, channel_scale, channel_zero):  # type: ignore[no-untyped-def]
        unpack_tile(slab, low, high, bits, tile)

    np.testing.assert_array_equal(read(function, layout, slab), codes.numpy())


@pytest.mark.parametrize(("name", "numpy_type"), [("fp16", np.uint16), ("bf16", np.uint16)])
def test_every_half_is_read_exactly(name: str, numpy_type: type) -> None:
    layout = registry[name].layout(Side.K, 512, 128)
    patterns = np.arange(65536, dtype=numpy_type)
    reader = registry[name].numba_reader(layout)
    dtype = torch.float16 if name == "fp16" else torch.bfloat16
    expected = torch.from_numpy(patterns.view(np.int16)).view(dtype).float().view(512, 128).numpy()
    np.testing.assert_array_equal(read(reader, layout, patterns.view(np.uint8)), expected)


@pytest.mark.parametrize("name", ["fp8", "fp8_e5m2"])
def test_every_finite_float8_is_read_exactly(name: str) -> None:
    codec = registry[name]
    layout = codec.layout(Side.K, 32, 8)
    slab = torch.zeros(layout.nbytes, dtype=torch.uint8)
    slab[layout["codes"].offset : layout["codes"].end] = torch.arange(256)
    slab[layout["scale"].offset : layout["scale"].end] = torch.tensor([1.0]).view(torch.uint8)
    expected = codec.decode(slab[None], layout)[0].numpy()
    got = read(codec.numba_reader(layout), layout, slab.numpy())
    np.testing.assert_array_equal(got[np.isfinite(expected)], expected[np.isfinite(expected)])
