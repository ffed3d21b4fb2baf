"""Where every field of a page lies: offsets are computed here and nowhere else. No torch.

A page is `Hkv` pairs of slabs, head after head: the K slab of head 0, its V slab, the K slab of head 1, and so on. So a tensor-parallel
rank owns one contiguous range, and a kernel that works on one head reads one contiguous range.

    page  uint8 [page_nbytes] = [Hkv][ K slab (k.nbytes) | V slab (v.nbytes) ]
    slab  uint8 [slab_nbytes] = fields one after another, each aligned to its element, the whole padded to 16 bytes

Within a slab K is token-major ([S, Dk]) and V is channel-major ([Dv, S]): the axis that attention sums over is the contiguous one, and
codes narrower than a byte are packed along it (docs/page-format.md).
"""

from __future__ import annotations

import math
from collections.abc import Iterable
from dataclasses import dataclass
from enum import StrEnum
from functools import cached_property

from kvarto.errors import ShapeError

PAGE_TOKENS = 64
SLAB_ALIGNMENT_BYTES = 16
ITEM_BYTES = {"uint8": 1, "uint16": 2, "float16": 2, "bfloat16": 2, "int32": 4, "float32": 4}


class Side(StrEnum):
    """Which of the two cached tensors a slab holds."""

    K = "k"
    V = "v"


@dataclass(frozen=True)
class Geometry:
    """The shape of one layer's cache: `heads` = Hkv, `k_dim` = Dk, `v_dim` = Dv, `page_tokens` = S.

    Raises ShapeError when a dimension is not a positive multiple of 8 (so that one-bit planes fill whole bytes), or S not one of 32.
    """

    heads: int
    k_dim: int
    v_dim: int
    page_tokens: int = PAGE_TOKENS

    def __post_init__(self) -> None:
        if self.heads < 1:
            raise ShapeError("heads", "at least 1 KV head", self.heads)
        for name, dim in (("k_dim", self.k_dim), ("v_dim", self.v_dim)):
            if dim < 8 or dim % 8:
                raise ShapeError(name, "a positive multiple of 8", dim)
        if self.page_tokens < 32 or self.page_tokens % 32:
            raise ShapeError("page_tokens", "a positive multiple of 32", self.page_tokens)

    def dim(self, side: Side) -> int:
        """Head dimension of one side."""
        return self.k_dim if side is Side.K else self.v_dim

    @property
    def elements_per_token(self) -> int:
        """Numbers that one token caches in this layer, K and V together."""
        return self.heads * (self.k_dim + self.v_dim)

    def pages_for(self, tokens: int) -> int:
        """Pages that `tokens` tokens touch, the last one perhaps open."""
        return -(-tokens // self.page_tokens)


@dataclass(frozen=True)
class Field:
    """One array inside a slab."""

    name: str
    dtype: str
    shape: tuple[int, ...]
    offset: int

    @property
    def nbytes(self) -> int:
        """Bytes of the array without padding."""
        return math.prod(self.shape) * ITEM_BYTES[self.dtype]

    @property
    def end(self) -> int:
        """Offset of the first byte after the array."""
        return self.offset + self.nbytes


FieldSpec = tuple[str, str, tuple[int, ...]]
"""(name, dtype, shape): what a codec says of a field; `slab_layout` gives it an offset."""


@dataclass(frozen=True)
class SlabLayout:
    """The fields of one head's bytes of one side of one page."""

    side: Side
    page_tokens: int
    dim: int
    fields: tuple[Field, ...]

    def __getitem__(self, name: str) -> Field:
        """The field called `name`; KeyError is a bug of the codec that asks."""
        return self._by_name[name]

    @cached_property
    def _by_name(self) -> dict[str, Field]:
        return {field.name: field for field in self.fields}

    @cached_property
    def nbytes(self) -> int:
        """Bytes of the slab, padding included."""
        return _align(self.fields[-1].end, SLAB_ALIGNMENT_BYTES)

    @cached_property
    def gaps(self) -> tuple[tuple[int, int], ...]:
        """Bytes between and after the fields, (first, end): they are 0."""
        starts = [*(field.offset for field in self.fields), self.nbytes]
        ends = [0, *(field.end for field in self.fields)]
        return tuple((end, start) for end, start in zip(ends, starts, strict=True) if start > end)

    @property
    def payload_nbytes(self) -> int:
        """Bytes of the codes themselves: of the fields whose names begin with `codes` or `values`. All else is metadata."""
        return sum(field.nbytes for field in self.fields if field.name.startswith(("codes", "values")))

    @property
    def tile_shape(self) -> tuple[int, int]:
        """Shape of the unpacked slab as kernels see it: K [S, D], V [D, S]."""
        return (self.page_tokens, self.dim) if self.side is Side.K else (self.dim, self.page_tokens)

    @property
    def bits_per_element(self) -> float:
        """Bits that one cached number costs, codes, metadata and padding together."""
        return self.nbytes * 8 / (self.page_tokens * self.dim)


def slab_layout(side: Side, page_tokens: int, dim: int, specs: Iterable[FieldSpec]) -> SlabLayout:
    """Lay `specs` out in the order given, each aligned to its element size."""
    fields, offset = [], 0
    for name, dtype, shape in specs:
        field = Field(name, dtype, shape, _align(offset, ITEM_BYTES[dtype]))
        fields.append(field)
        offset = field.end
    layout = SlabLayout(side, page_tokens, dim, tuple(fields))
    assert layout.payload_nbytes, "no field is named codes... or values..."
    return layout


@dataclass(frozen=True)
class PageLayout:
    """The bytes of one page of one layer: `k` and `v` slabs of every head."""

    geometry: Geometry
    k: SlabLayout
    v: SlabLayout

    @property
    def pair_nbytes(self) -> int:
        """Bytes of one head: its K slab and its V slab."""
        return self.k.nbytes + self.v.nbytes

    @property
    def nbytes(self) -> int:
        """Bytes of the page."""
        return self.geometry.heads * self.pair_nbytes

    @property
    def payload_nbytes(self) -> int:
        """Bytes of the page that are codes, not metadata."""
        return self.geometry.heads * (self.k.payload_nbytes + self.v.payload_nbytes)

    @property
    def bytes_per_token(self) -> float:
        """Bytes that one token of a full page costs in this layer."""
        return self.nbytes / self.geometry.page_tokens

    @property
    def bits_per_element(self) -> float:
        """Bits that one cached number costs, K and V together."""
        return self.bytes_per_token * 8 / self.geometry.elements_per_token

    def slab(self, side: Side) -> SlabLayout:
        """Layout of one side's slab."""
        return self.k if side is Side.K else self.v

    def slab_range(self, side: Side) -> tuple[int, int]:
        """(first, end) byte of a side's slab within the pair of a head."""
        return (0, self.k.nbytes) if side is Side.K else (self.k.nbytes, self.pair_nbytes)


def _align(offset: int, alignment: int) -> int:
    return -(-offset // alignment) * alignment
