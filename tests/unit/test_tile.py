"""A codec's Tile tells the truth: read as kvarto/tile.py says, byte by byte, it gives what the codec decodes, in the tile's domain."""

from __future__ import annotations

from dataclasses import replace
from itertools import pairwise

import numpy as np
import pytest

pytest.importorskip("torch")

import torch

from kvarto.codecs import Codec, registry
from kvarto.codecs.fp8 import Fp8
from kvarto.codecs.kvquant import KvQuant
from kvarto.layout import ITEM_BYTES, Side, SlabLayout
from kvarto.testing import specimen_heads
from kvarto.tile import BITS, Plane, Term, Tile

# A product with a matrix of signs, two scales for a token are none, and constants that are not there.
WITHOUT_TILE = {"turbo4-qjl", "turbo3-qjl", "turbo3.5", "turbo2.5", "kvquant4", "kvquant3", "kvquant2"}
WITH_TABLE = ("kvquant4", "kvquant3", "kvquant2")
NAMES = [name for name in registry if name not in WITHOUT_TILE]
DIMS = (24, 64, 80, 96, 128, 256)
FLOATS = {
    "e4m3": torch.float8_e4m3fn, "e5m2": torch.float8_e5m2, "bfloat16": torch.bfloat16, "float16": torch.float16,
    "float32": torch.float32,
}  # fmt: skip


def read(slab: np.ndarray, tile: Tile, shape: tuple[int, int], told: np.ndarray | None = None) -> np.ndarray:
    """float64 [rows, columns] of one slab, uint8 [slab_nbytes]; told: the constants of its head, if it has a table."""
    total = np.zeros(shape)
    for plane in tile.planes:
        codes = read_codes(slab, plane, shape[0])
        at = 0
        for first, count in plane.columns:
            total[:, first : first + count] += 2.0**plane.shift * codes[:, at : at + count]
            at += count
        assert at == codes.shape[1], "the runs are not all columns of a row"
    if tile.curve is not None:
        bits, (a, b) = sum(plane.bits for plane in tile.planes), tile.curve
        u = (2.0 * total + 1.0) / 2.0 ** (bits - 1) - 2.0
        total = u * (a + b * u**4)
    if tile.table is not None:
        assert told is not None
        return read_table(slab, tile, shape, total.astype(int), told.astype(np.float64))
    scale = 1.0 if tile.scale is None else read_term(slab, tile.scale, shape)
    zero = 0.0 if tile.zero is None else read_term(slab, tile.zero, shape)
    if tile.zero is not None and tile.zero.dtype == "low":
        highest = sum((1 << plane.bits) - 1 << plane.shift for plane in tile.planes)
        zero = scale * ((zero - 8) / 4 - highest / 2)
    return total * scale + zero


def read_table(slab: np.ndarray, tile: Tile, shape: tuple[int, int], codes: np.ndarray, told: np.ndarray) -> np.ndarray:
    """`read` of a slab whose levels stand in a table."""
    table, levels, columns = tile.table, 1 << sum(plane.bits for plane in tile.planes), shape[1]
    assert table is not None
    if table.ranged:
        zero, scale = told[levels : levels + columns], told[levels + columns : levels + 2 * columns]
    else:
        assert tile.scale is not None
        assert tile.zero is not None
        zero, scale = read_term(slab, tile.zero, shape), read_term(slab, tile.scale, shape)
    tokens_first = told[codes] * scale + zero
    tokens_first = tokens_first if table.ranged else tokens_first.T  # a view: K has tokens as rows, V as columns
    tokens = len(tokens_first)
    for j in range(0 if table.slots is None else table.slots.count):
        assert table.slots is not None
        added = numbers(slab[table.slots.offset + 2 * tokens * j :][: 2 * tokens], "float16")
        channels = slab[table.slots.channels + tokens * j :][:tokens]
        tokens_first[np.arange(tokens), channels] += added
    if table.pairs:
        place = int(slab[table.first : table.first + 4].view(np.int32)[0])
        turn = (place + np.arange(tokens))[:, None] * told[-table.pairs :]
        a, b = tokens_first[:, : table.pairs].copy(), tokens_first[:, table.pairs : 2 * table.pairs].copy()
        tokens_first[:, : table.pairs] = a * np.cos(turn) - b * np.sin(turn)
        tokens_first[:, table.pairs : 2 * table.pairs] = b * np.cos(turn) + a * np.sin(turn)
    return tokens_first if table.ranged else tokens_first.T


def read_codes(slab: np.ndarray, plane: Plane, rows: int) -> np.ndarray:
    """float64 [rows, codes of a row]."""
    packed = slab[plane.offset :][: rows * plane.row_nbytes].reshape(rows, plane.row_nbytes)
    if plane.kind != "uint":
        assert plane.bits == BITS[plane.kind]
        return numbers(packed, plane.kind)
    fields = 8 // plane.bits
    codes = np.full((rows, fields * plane.row_nbytes), np.nan)
    for field in range(fields):
        for byte in range(plane.row_nbytes):
            codes[:, byte + field * plane.row_nbytes] = packed[:, byte] >> (plane.bits * field) & (
                (1 << plane.bits) - 1
            )
    return codes


def read_term(slab: np.ndarray, term: Term, shape: tuple[int, int]) -> np.ndarray:
    """float64, broadcast to [rows, columns]."""
    rows, columns = shape
    assert term.offset % term_nbytes(term) == 0
    count = {"row": rows, "column": term.groups * columns, "slab": 1}[term.per]
    values = numbers(slab[term.offset :][: count * term_nbytes(term)], term.dtype)
    assert len(values) == count
    if term.per == "row":
        return values[:, None]
    if term.per == "slab":
        return values[None, :]
    if term.groups == 1:
        return values[None, :]
    groups = values.reshape(term.groups, columns)
    assert (term.groups - 1) * term.group_rows < rows <= term.groups * term.group_rows
    return groups[np.arange(rows) // term.group_rows]


def term_nbytes(term: Term) -> int:
    """Bytes of one number."""
    return {"short": 1, "low": 2}.get(term.dtype) or ITEM_BYTES[term.dtype]


def numbers(raw: np.ndarray, kind: str) -> np.ndarray:
    """Bytes as floats of a kind, float64; of "low" the bits."""
    if kind == "short":
        return (raw.astype(np.uint16) << 7).view(np.float16).astype(np.float64)
    if kind == "low":
        return (np.ascontiguousarray(raw).view(np.uint16) & 15).astype(np.float64)
    return torch.from_numpy(np.ascontiguousarray(raw)).view(FLOATS[kind]).double().numpy()


def check(codec: Codec, layout: SlabLayout) -> None:
    """Two slabs, one of them of keys with a bias, against the codec's own reading."""
    tile = codec.tile(layout)
    assert tile is not None, f"{codec.name} has no tile"
    generator = torch.Generator().manual_seed(layout.dim)
    x = torch.randn(2, layout.page_tokens, layout.dim, generator=generator)
    x[1, :, 3] += 50.0
    slabs = codec.encode(x, layout)
    truth = codec.rotate(codec.decode(slabs, layout).double(), layout.side)
    for slab, y in zip(slabs, truth, strict=True):
        got = torch.from_numpy(read(slab.numpy(), tile, layout.tile_shape))
        expected = y if layout.side is Side.K else y.T
        # `decode` rotates back in float32.
        torch.testing.assert_close(got, expected, rtol=0.0, atol=2e-6 * float(y.abs().max()))


@pytest.mark.parametrize("side", list(Side))
@pytest.mark.parametrize("name", NAMES)
def test_a_tile_is_what_the_codec_decodes(name: str, side: Side) -> None:
    codec = registry[name]
    for tokens in (32, 64, 128):
        for dim in DIMS:
            if codec.refuses(side, tokens, dim) is None:
                check(codec, codec.layout(side, tokens, dim))


@pytest.mark.parametrize("side", list(Side))
@pytest.mark.parametrize("name", WITH_TABLE)
def test_a_tile_with_a_table_is_what_the_codec_decodes(name: str, side: Side) -> None:
    """Of each head by its own constants, at a place of its own; with and without slots, and where RoPE turns some channels only."""
    for tokens, dim in ((32, 64), (64, 80), (64, 256), (128, 128)):
        codec = specimen_heads(registry[name], side, dim, 2, tokens)
        assert isinstance(codec, KvQuant)
        check_table(codec, codec.layout(side, tokens, dim))
        check_table(replace(codec, sparse=False), replace(codec, sparse=False).layout(side, tokens, dim))
        if side is Side.K:
            assert codec.calibrated is not None
            partly = replace(codec, calibrated=replace(codec.calibrated, angles=codec.calibrated.angles[:9]))
            check_table(partly, partly.layout(side, tokens, dim))


def check_table(codec: KvQuant, layout: SlabLayout) -> None:
    tile, told = codec.tile(layout), codec.constants(layout)
    assert tile is not None
    x = torch.randn(2, layout.page_tokens, layout.dim, generator=torch.Generator().manual_seed(layout.dim))
    x[:, :, 3] += 50.0
    slabs = codec.encode_at(x.unsqueeze(0), layout, torch.tensor([7040], dtype=torch.int32))[0]
    truth = codec.decode(slabs, layout).double()
    for slab, y, constants in zip(slabs, truth, [*told, told[0]], strict=False):
        got = torch.from_numpy(read(slab.numpy(), tile, layout.tile_shape, constants))
        torch.testing.assert_close(got, y if layout.side is Side.K else y.T, rtol=0.0, atol=4e-6 * float(y.abs().max()))


@pytest.mark.parametrize("side", list(Side))
def test_calibrated_scales(side: Side) -> None:
    codec = registry["fp8-head"]
    assert isinstance(codec, Fp8)
    check(replace(codec, scales=(0.3,)), codec.layout(side, 64, 64))


@pytest.mark.parametrize("side", list(Side))
@pytest.mark.parametrize("name", NAMES)
def test_what_kernels_take_for_granted(name: str, side: Side) -> None:
    """Planes and terms lie inside the slab and do not overlap; scale and zero are laid out alike; the first plane has all columns."""
    codec = registry[name]
    layout = codec.layout(side, 64, 128)
    rows, columns = layout.tile_shape
    tile = codec.tile(layout)
    assert tile is not None
    assert tile.planes[0].columns == ((0, columns),)
    if tile.zero is not None:
        assert tile.scale is not None
        assert replace(tile.zero, offset=0, dtype="float16") == replace(tile.scale, offset=0, dtype="float16")
    spans = [(plane.offset, plane.offset + rows * plane.row_nbytes) for plane in tile.planes]
    for term in (tile.scale, tile.zero):
        if term is not None and term.dtype != "low":
            count = {"row": rows, "column": term.groups * columns, "slab": 1}[term.per]
            spans.append((term.offset, term.offset + count * term_nbytes(term)))
    spans.sort()
    assert all(end <= first for (_, end), (first, _) in pairwise(spans))
    assert spans[-1][1] <= layout.nbytes
    if tile.curve is not None:
        assert tile.curve == tuple(float(np.float16(number)) for number in tile.curve)
        assert all(plane.columns == ((0, columns),) for plane in tile.planes)


@pytest.mark.parametrize("name", sorted(WITHOUT_TILE))
def test_what_is_no_tile_says_so(name: str) -> None:
    codec = registry[name]
    assert all(codec.tile(codec.layout(side, 64, 128)) is None for side in Side)
