"""What a codec is: how one side (K or V) of a slab is written, and nothing else.

A codec presents a slab to a kernel as an affine tile, in a domain that may be rotated:

    y[s,d] = codes[s,d] * row_scale[s] * channel_scale[d] + row_zero[s] + channel_zero[d]        x = unrotate(y)

so that a kernel multiplies small exact codes and folds the terms outside its inner products. `encode` and `decode` are plain torch and are
the truth; `numba_reader` is optional and gives the tile to compiled code.

Every operation of `encode` is elementwise, a minimum or maximum, or a sum in a stated order (`halving_mean`). So the bytes of a slab do not
depend on how many slabs are encoded at once: path invariance starts here.

What is calibrated of a layer belongs to the layer's codec, not to its slabs: FP8's scales, KVQuant's levels.
"""

from __future__ import annotations

from abc import ABC, abstractmethod
from collections.abc import Callable, Sequence
from dataclasses import dataclass
from functools import lru_cache
from typing import TYPE_CHECKING, Any

import numpy as np

from kvarto.jit import torch
from kvarto.layout import FieldSpec, Side, SlabLayout, slab_layout
from kvarto.sealing import Sealing
from kvarto.tile import Tile

if TYPE_CHECKING:
    from torch import Tensor

Reader = Callable[..., None]
Array = np.ndarray[Any, np.dtype[np.float32]]


@dataclass(frozen=True)
class Codec(ABC):
    """One way to write K or V. Frozen and hashable: a codec is its parameters.

    name     what users write and pages record
    bits     bits of one code, without metadata
    source   paper, section or ADR that it implements
    version  raised when the bit layout or the meaning of a field changes; pages record it
    headline whether a quick study looks at it; variants that only experts ask for say False
    relative errors are a part of a token's norm, not of a group's range: what is constant costs as much as what is not
    """

    name: str
    bits: float
    source: str
    version: int = 1
    headline: bool = True
    relative: bool = False

    @abstractmethod
    def fields(self, side: Side, page_tokens: int, dim: int) -> Sequence[FieldSpec]:
        """The arrays of a slab as (name, dtype, shape), in the order in which they lie.

        Names that begin with `codes` or `values` are payload, all others metadata (`SlabLayout.payload_nbytes`).
        """

    @abstractmethod
    def encode(self, x: Tensor, layout: SlabLayout) -> Tensor:
        """Seal. x: float32 [..., S, D], finite. Returns uint8 [..., slab_nbytes]."""

    def encode_at(self, x: Tensor, layout: SlabLayout, first: Tensor) -> Tensor:
        """`encode`, told the places of pages in their sequences, for codecs that need them: those of first tokens, int32 [...] for leading axes."""
        return self.encode(x, layout)

    @abstractmethod
    def decode(self, slabs: Tensor, layout: SlabLayout) -> Tensor:
        """Read. slabs: uint8 [..., slab_nbytes]. Returns float32 [..., S, D], in the domain of `encode`'s input."""

    def rotate(self, x: Tensor, side: Side) -> Tensor:
        """Into the tile's domain: an orthogonal map over the last axis [..., D], for keys and queries, or for values."""
        return x

    def unrotate(self, y: Tensor, side: Side) -> Tensor:
        """Out of the tile's domain; the inverse of `rotate`."""
        return y

    @property
    def complete(self) -> bool:
        """False if it needs constants and has none: then it refuses every slab."""
        return True

    @property
    def as_read(self) -> Codec:
        """The codec without what readers need not know: slabs of all codecs that are equal then are read by one compiled reader."""
        return self

    def numba_reader(self, layout: SlabLayout) -> Reader | None:
        """A plain function for `kvarto.jit.compile_reader`; None if there is none."""
        return None

    def tile(self, layout: SlabLayout) -> Tile | None:
        """The slab as planes and affine terms, for compiled kernels that know tiles; None if it is not such a tile."""
        return None

    def sealing(self, layout: SlabLayout) -> Sealing | None:
        """What `encode` does, as plain data, for compiled code that seals; None if it is none of the ways that this knows."""
        return None

    def refuses(self, side: Side, page_tokens: int, dim: int) -> str | None:
        """Why this codec cannot write such a slab, or None if it can."""
        return None

    def saturated(self, x: Tensor, side: Side) -> int:
        """How many elements of x (float32 [..., S, D]), rotated if the codec rotates, lie outside its range and are clamped by `encode`."""
        return 0

    def saturated_at(self, x: Tensor, side: Side, first: Tensor) -> int:
        """`saturated`, told places as `encode_at` is."""
        return self.saturated(x, side)

    def constants(self, layout: SlabLayout) -> Array | None:
        """What readers are told of the layer, float32 [Hkv, C], or [1, C] for all heads alike; None if slabs say all."""
        return None

    def fitted(self, x: Tensor, side: Side) -> Codec:
        """With constants made of x, float32 [..., S, D], alone, if it cannot do without any: for tests. Real ones are `kvarto.calibrate`'s."""
        return self

    def layout(self, side: Side, page_tokens: int, dim: int) -> SlabLayout:
        """Where the fields lie in a slab of this geometry."""
        return _layout(self, side, page_tokens, dim)


@lru_cache(maxsize=4096)
def _layout(codec: Codec, side: Side, page_tokens: int, dim: int) -> SlabLayout:
    return slab_layout(side, page_tokens, dim, codec.fields(side, page_tokens, dim))


def assemble(layout: SlabLayout, **arrays: Tensor) -> Tensor:
    """Put the fields of slabs together: each array is [..., *field.shape] of the field's dtype. Returns uint8 [..., slab_nbytes], padding 0."""
    lead = next(iter(arrays.values())).shape[: -len(layout.fields[0].shape)]
    pieces, offset = [], 0
    for field in layout.fields:
        array = arrays[field.name]
        assert array.dtype == getattr(torch, field.dtype), (field.name, array.dtype)
        assert array.shape == (*lead, *field.shape), (field.name, array.shape)
        pieces.append(array.new_zeros((*lead, field.offset - offset), dtype=torch.uint8))
        pieces.append(array.reshape(*lead, -1).contiguous().view(torch.uint8))
        offset = field.end
    pieces.append(pieces[0].new_zeros((*lead, layout.nbytes - offset)))
    return torch.cat(pieces, dim=-1)


def extract(slabs: Tensor, layout: SlabLayout, name: str) -> Tensor:
    """The field `name` of slabs uint8 [..., slab_nbytes], as [..., *field.shape] of its dtype."""
    field = layout[name]
    piece = slabs[..., field.offset : field.end].contiguous()
    return piece.view(getattr(torch, field.dtype)).reshape(*slabs.shape[:-1], *field.shape)


def to_tile(x: Tensor, side: Side) -> Tensor:
    """[..., S, D] as the tile lies in memory: unchanged for K, [..., D, S] for V."""
    return x if side is Side.K else x.transpose(-1, -2)


def from_tile(tile: Tensor, side: Side) -> Tensor:
    """The inverse of `to_tile`."""
    return tile if side is Side.K else tile.transpose(-1, -2)


def beyond(x: Tensor, limit: float) -> int:
    """How many elements of x have a magnitude over `limit`. Nearly always none, which the extremes say in a tenth of the time."""
    lowest, highest = torch.aminmax(x)
    return 0 if -limit <= lowest and highest <= limit else int((x.abs() > limit).sum())


def halving_mean(x: Tensor, dim: int) -> Tensor:
    """Mean over an axis, added by halves ((first half + second half), again, ...): the same bits on every path, batch and device.

    An odd remainder of an axis is carried to the next round. Keeps the axis, with size 1. The count divides as a tensor: torch multiplies by a
    number's reciprocal instead on GPUs, which rounds twice.
    """
    count = total = x.shape[dim]
    while count > 1:
        half = count // 2
        summed = x.narrow(dim, 0, half) + x.narrow(dim, half, half)
        x = summed if count % 2 == 0 else torch.cat([summed, x.narrow(dim, 2 * half, 1)], dim)
        count -= half
    return x / x.new_full((), total)
