"""The checks themselves: each of these codecs is broken in one way, and `check_codec` says which."""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass

import pytest

pytest.importorskip("torch")
pytest.importorskip("numba")

from torch import Tensor

from kvarto.codecs import Codec
from kvarto.codecs.base import Reader, assemble, extract, from_tile, to_tile
from kvarto.jit import load_floats
from kvarto.layout import FieldSpec, Side, SlabLayout
from kvarto.testing import check_codec


@dataclass(frozen=True)
class OneNumber(Codec):
    """Keeps the middle of a slab, which is within its range."""

    def fields(self, side: Side, page_tokens: int, dim: int) -> Sequence[FieldSpec]:
        return [("values", "float32", (1,))]

    def encode(self, x: Tensor, layout: SlabLayout) -> Tensor:
        return assemble(layout, values=(x.amax((-2, -1)) / 2 + x.amin((-2, -1)) / 2).unsqueeze(-1))

    def decode(self, slabs: Tensor, layout: SlabLayout) -> Tensor:
        value = extract(slabs, layout, "values").unsqueeze(-1)
        return value.expand(*slabs.shape[:-1], layout.page_tokens, layout.dim).clone()


@dataclass(frozen=True)
class Faulty(Codec):
    """Float32 as it is, but for one `fault` of `decode` or of the compiled reader."""

    fault: str | None = None

    def fields(self, side: Side, page_tokens: int, dim: int) -> Sequence[FieldSpec]:
        return [("values", "float32", (page_tokens, dim) if side is Side.K else (dim, page_tokens))]

    def encode(self, x: Tensor, layout: SlabLayout) -> Tensor:
        return assemble(layout, values=to_tile(x, layout.side))

    def decode(self, slabs: Tensor, layout: SlabLayout) -> Tensor:
        x = from_tile(extract(slabs, layout, "values"), layout.side).clone()
        if self.fault == "one place is lost":
            x[..., 5, 7] = x[..., 5, 6]
        return x

    def numba_reader(self, layout: SlabLayout) -> Reader:
        start = 4 if self.fault == "reads on into the next slab" else 0
        rows, beyond_tile = layout.tile_shape[0], self.fault == "writes beyond the tile"
        before_term = self.fault == "writes before a term"

        def read(slab, constants, tile, row_scale, row_zero, channel_scale, channel_zero):  # type: ignore[no-untyped-def]
            load_floats(slab, start, "float32", tile.reshape(tile.size))
            if beyond_tile:
                tile[rows, 0] = 1.0
            if before_term:
                channel_zero[-2 * channel_zero.size + channel_zero.size - 1] = 0.0

        return read


def test_a_sound_codec_passes() -> None:
    check_codec(Faulty("sound", 32, "this test"), dims=(64,))


@pytest.mark.parametrize(
    ("fault", "message"),
    [
        ("one place is lost", r"loses element \(5, 7\)"),
        ("reads on into the next slab", "not close"),
        ("writes beyond the tile", "K reader writes outside tile"),
        ("writes before a term", "K reader writes outside channel_zero"),
    ],
)
def test_a_faulty_codec_is_found(fault: str, message: str) -> None:
    with pytest.raises(AssertionError, match=message):
        check_codec(Faulty("faulty", 4, "this test", fault=fault), dims=(64,))


def test_a_codec_that_keeps_one_number_of_a_slab_is_found() -> None:
    with pytest.raises(AssertionError, match="keeps -?0.* dB of 4 bits, expected 15.1"):
        check_codec(OneNumber("mean", 4, "this test"), dims=(64,))
