"""KVQuant: keys before RoPE, a range for each channel and levels for each layer that were calibrated, 1 % kept apart (Hooper et al., NeurIPS 2024).

    K  x float32 [S, D]  ->  y = x turned back by RoPE;  u = (y - zero) / scale of the channel, calibrated;  codes [S, D] of the nearest level to u
    V  x float32 [S, D]  ->  u = (x - zero) / scale of the token, float16, from the token itself;             codes [D, S]
    both, for each token, n slots: channel uint8, and float16 what the codes leave out of it.  K also: the place of the page's first token, int32

Levels lie in -1 .. 1: weighted k-means over calibration text (codecs/levels.py, calibrate/nuq.py). -1 and 1 are the 0.5 and 99.5 percentiles of a
key channel; of a value token the ends of what remains without the n numbers farthest from its mean. A slot adds to what the code says: so the code
at a slot's place is the nearest, as anywhere, and a kernel adds slots to its sums. The n largest errors of a token get its slots; by the paper's
thresholds a slot for 100 channels would often stay empty. The paper keeps 1 % of a token over all heads, in CSR and CSC; slots of fixed width are
what its authors deploy (21 + 21 of 4,096).

Constants are the layer's, not the page's: `Constants`, made by `kvarto calibrate --format`, carried by a policy file. Without them the codec refuses.
RoPE turns pairs (i, i + r / 2) of the first r channels by place x angle; angles are constants too. It is undone and done again here with the same
cosines, so the round trip is exact but for rounding. What RoPE scales keys by beside (YaRN) stays in them. Q-Norm (`normed`): levels are drawn to the
mean and variance of what they stand for, codes chosen by the levels as they were.

The first token is raw by the format: formats below 8 bits keep the first page raw unless told `+sink0`.

Error: inside its range at most half the distance of two levels times the scale. What lies beyond, and is more than there are slots, is drawn to the
end of the range, and counted if beyond twice the range. Bits: K b + 24 n / D, V b + 24 n / D + 32 / D; at D = 128, n = 1, on average 4.32, 3.32,
2.32 (the paper: 4.32 to 4.35, 3.32 to 3.35, 2.32 to 2.35, where all heads of a token share a scale of V). Source: arXiv 2401.18079, 3.1 to 3.6;
github.com/SqueezeAILab/KVQuant.
"""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass, replace
from functools import cache, cached_property
from typing import TYPE_CHECKING, Any

import numpy as np

from kvarto.codecs.base import Codec, Reader, assemble, beyond, extract, from_tile, halving_mean, to_tile
from kvarto.codecs.levels import Histogram, fit_levels, normalised, thresholds
from kvarto.codecs.packing import code_fields, code_planes, pack, unpack, unpack_tile
from kvarto.codecs.rope import turn_rows, turned
from kvarto.errors import ShapeError, UsageError
from kvarto.jit import load_floats, torch
from kvarto.layout import FieldSpec, Side, SlabLayout
from kvarto.sealing import FLOAT16_MAX, SMALLEST_STEP
from kvarto.tile import Slots, Table, Term, Tile

if TYPE_CHECKING:
    from torch import Tensor

LOW, HIGH = 0.5, 99.5
_CHANNELS_A_SLOT = 100
_MOST_CHANNELS = 256  # a slot's channel is a byte
_NARROWEST = 1e-3  # of a head's mean scale: a channel that stood still while calibrated may move a little
_BEYOND = 2.0  # of the range: what is drawn in from farther is counted
_ROUNDING = 1024.0
_BASE = 10_000.0
_LARGEST = (
    FLOAT16_MAX / 4
)  # so that what a slot holds, the difference of two numbers that RoPE has turned, is within float16


@dataclass(frozen=True)
class Constants:
    """What is calibrated of a side of a layer. Plain numbers, so that a codec is its parameters.

    levels, thresholds   2^b ascending numbers, and the 2^b - 1 at which the nearest changes
    zero, scale          keys: [Hkv or 1][D], of channels before RoPE; values: ()
    angles               keys: [r / 2], radians a token; () without RoPE
    """

    levels: tuple[float, ...]
    thresholds: tuple[float, ...]
    zero: tuple[tuple[float, ...], ...] = ()
    scale: tuple[tuple[float, ...], ...] = ()
    angles: tuple[float, ...] = ()

    def __hash__(self) -> int:
        """Worked out once: kernels look readers up by it in every step."""
        return self._hash

    @cached_property
    def _hash(self) -> int:
        return hash((self.levels, self.thresholds, self.zero, self.scale, self.angles))

    @classmethod
    def of(
        cls, levels: Any, drawn: Any, ranges: tuple[Any, Any] | None = None, angles: Sequence[float] = ()
    ) -> Constants:
        """Of arrays: levels by which codes are chosen, and those that they stand for; of keys zeros and scales, [Hkv, D] each, and angles."""
        zero, scale = ((), ()) if ranges is None else (tuple(map(_floats, each)) for each in ranges)
        return cls(_floats(drawn), _floats(thresholds(levels)), zero, scale, _floats(angles))

    def why_not(self, side: Side, bits: int, dim: int) -> str | None:
        """Why they are not those of such a slab, or None."""
        if len(self.levels) != 1 << bits or len(self.thresholds) != len(self.levels) - 1:
            return f"{len(self.levels)} levels and {len(self.thresholds)} thresholds are not those of {bits} bits"
        if side is Side.V:
            return "its constants are those of keys" if self.zero or self.scale or self.angles else None
        if not self.zero:
            return "its constants are those of values"
        if {len(row) for row in (*self.zero, *self.scale)} != {dim} or len(self.zero) != len(self.scale):
            return f"its constants are of {len(self.zero[0])} channels, not of {dim}"
        return f"its angles turn {2 * len(self.angles)} channels of {dim}" if 2 * len(self.angles) > dim else None


@dataclass(frozen=True)
class KvQuant(Codec):
    """`calibrated`: the constants, without which nothing is written. `sparse`: numbers are kept apart; `normed`: calibration draws the levels."""

    relative: bool = True  # what is constant after RoPE is not before it
    sparse: bool = True
    normed: bool = False
    calibrated: Constants | None = None

    def __post_init__(self) -> None:
        made = self.calibrated
        numbers = () if made is None else (*made.levels, *made.thresholds, *made.angles, *sum(made.zero, ()))
        if not all(abs(number) < float("inf") for number in numbers):
            raise UsageError(f"constants of {self.name}", "finite numbers", "others")
        if made is not None and (list(made.levels), list(made.thresholds)) != (
            sorted(made.levels),
            sorted(made.thresholds),
        ):
            raise UsageError(f"constants of {self.name}", "ascending levels and thresholds", "others")
        if made is not None and not all(0 < scale < float("inf") for scale in sum(made.scale, ())):
            raise UsageError(f"constants of {self.name}", "positive finite scales", "others")

    def refuses(self, side: Side, page_tokens: int, dim: int) -> str | None:
        """There must be constants, of such a slab."""
        if self.calibrated is None:
            return (
                "its levels are calibrated for each model, and there are none; run: kvarto calibrate MODEL "
                f"--format {self.name} -o policy.json, and name policy.json as the format"
            )
        if dim > _MOST_CHANNELS:
            return f"a head dimension of {dim} is more than {_MOST_CHANNELS}"
        return self.calibrated.why_not(side, int(self.bits), dim)

    def fields(self, side: Side, page_tokens: int, dim: int) -> Sequence[FieldSpec]:
        """Codes in tile order; of each slot all tokens, what is added and to which channel; then the place of a K page, or the terms of V tokens."""
        rows, columns = (page_tokens, dim) if side is Side.K else (dim, page_tokens)
        kept = (slots(dim), page_tokens)
        fields = [*code_fields(int(self.bits), rows, columns)]
        if self.sparse:
            fields += [("values_slot", "float16", kept)]
        if side is Side.V:
            fields += [("scale", "float16", (page_tokens,)), ("zero", "float16", (page_tokens,))]
        if self.sparse:
            fields += [("slot", "uint8", kept)]
        return [*fields, ("first", "int32", (1,))] if side is Side.K else fields

    # ---- numbers to bytes ------------------------------------------------------------------------------------------

    def encode(self, x: Tensor, layout: SlabLayout) -> Tensor:
        """As a page at the beginning of a sequence."""
        return self.encode_at(x, layout, torch.zeros((), dtype=torch.int32, device=x.device))

    def encode_at(self, x: Tensor, layout: SlabLayout, first: Tensor) -> Tensor:
        """Turn back, normalise, round, and keep what was lost most."""
        y, zero, scale = self._ranges(x, layout.side, first)
        levels, ends = (_tensor(numbers, x.device) for numbers in (self._made.levels, self._made.thresholds))
        codes = torch.bucketize(((y - zero) / scale).contiguous(), ends)
        arrays = pack(to_tile(codes.to(torch.uint8), layout.side), int(self.bits))
        if self.sparse:
            missing = y - (levels[codes] * scale + zero)
            slot = _farthest(missing, slots(layout.dim))
            lost = missing.gather(-1, slot).clamp(-FLOAT16_MAX, FLOAT16_MAX)
            arrays["values_slot"] = lost.half().transpose(-1, -2)
            arrays["slot"] = slot.to(torch.uint8).transpose(-1, -2)
        if layout.side is Side.V:
            return assemble(layout, **arrays, scale=scale.half().squeeze(-1), zero=zero.half().squeeze(-1))
        place = first.to(torch.int32).reshape(*first.shape, *[1] * (x.dim() - 2 - first.dim()))
        return assemble(layout, **arrays, first=place.expand(x.shape[:-2]).unsqueeze(-1))

    def saturated(self, x: Tensor, side: Side) -> int:
        """As of a page at the beginning of a sequence."""
        return self.saturated_at(x, side, torch.zeros((), dtype=torch.int32, device=x.device))

    def saturated_at(self, x: Tensor, side: Side, first: Tensor) -> int:
        """Elements beyond a quarter of float16; of keys those beyond twice their channel's range for which there is no slot."""
        if side is Side.V:
            return beyond(x, _LARGEST)
        y, zero, scale = self._ranges(x, side, first)
        outside = ((y - zero).abs() > _BEYOND * scale).sum(-1)
        return int((outside - slots(x.shape[-1]) * self.sparse).clamp_min(0).sum()) + beyond(x, _LARGEST)

    def _ranges(self, x: Tensor, side: Side, first: Tensor) -> tuple[Tensor, Tensor, Tensor]:
        """(y, zero, scale): the numbers that are coded, float32 [..., S, D], and the middle and half width of their ranges, broadcast to them."""
        x = x.clamp(-_LARGEST, _LARGEST)
        if side is Side.V:
            return x, *token_ranges(x, slots(x.shape[-1]) if self.sparse else 0)
        made = self._made
        if len(made.zero) > 1 and x.shape[-3] != len(made.zero):
            raise ShapeError(
                f"constants of {self.name}", f"of one, or each of {x.shape[-3]} KV heads", f"of {len(made.zero)}"
            )
        return turned(x, first, made.angles, back=True), *self._key_ranges(x.device)

    def _key_ranges(self, device: torch.device) -> tuple[Tensor, Tensor]:
        """zero, scale float32 [Hkv, 1, D], or [1, D]."""
        zero, scale = (_tensor(numbers, device).unsqueeze(-2) for numbers in (self._made.zero, self._made.scale))
        return (zero, scale) if len(zero) > 1 else (zero[0], scale[0])

    # ---- bytes to numbers ------------------------------------------------------------------------------------------

    def decode(self, slabs: Tensor, layout: SlabLayout) -> Tensor:
        """Levels times scale plus zero, plus what the slots hold, turned by RoPE."""
        names = [name for name, _, _ in code_fields(int(self.bits), *layout.tile_shape)]
        codes = from_tile(unpack({name: extract(slabs, layout, name) for name in names}, int(self.bits)), layout.side)
        if layout.side is Side.V:
            zero, scale = (extract(slabs, layout, name).float().unsqueeze(-1) for name in ("zero", "scale"))
        else:
            zero, scale = self._key_ranges(slabs.device)
        y = _tensor(self._made.levels, slabs.device)[codes.long()] * scale + zero
        if self.sparse:
            slot, lost = (extract(slabs, layout, name).transpose(-1, -2) for name in ("slot", "values_slot"))
            y = y.scatter_add(-1, slot.long(), lost.float())
        if layout.side is Side.V:
            return y
        return turned(y, extract(slabs, layout, "first").squeeze(-1), self._made.angles)

    def constants(self, layout: SlabLayout) -> np.ndarray[Any, np.dtype[np.float32]]:
        """[Hkv or 1, C]: levels; of keys zeros, scales, how many pairs RoPE turns, and their angles."""
        made = self._made
        rows = [
            [*made.levels, *zero, *scale, float(len(made.angles)), *made.angles]
            for zero, scale in zip(made.zero or [()], made.scale or [()], strict=True)
        ]
        return np.array(rows, np.float32)

    @property
    def complete(self) -> bool:
        """There are constants."""
        return self.calibrated is not None

    @property
    def as_read(self) -> KvQuant:
        """Readers are told the constants when they read."""
        return replace(self, calibrated=None)

    def tile(self, layout: SlabLayout) -> Tile | None:
        """Levels in a table, of keys ranges and angles too, and slots; None without constants, which say how many channels RoPE turns."""
        if self.calibrated is None:
            return None
        kept, lost_at, slot_at = self._slot_places(layout)
        slots, planes = Slots(kept, lost_at, slot_at) if self.sparse else None, code_planes(layout, int(self.bits))
        if layout.side is Side.K:
            return Tile(planes, table=Table(slots, True, len(self.calibrated.angles), layout["first"].offset))
        scale, zero = (Term(layout[name].offset, "float16", "column") for name in ("scale", "zero"))
        return Tile(planes, scale, zero, table=Table(slots))

    def numba_reader(self, layout: SlabLayout) -> Reader:
        """The whole slab into the tile; no terms are left."""
        return self._values_reader(layout) if layout.side is Side.V else self._keys_reader(layout)

    def _values_reader(self, layout: SlabLayout) -> Reader:
        bits, low, high = int(self.bits), layout.fields[0].offset, layout.fields[1].offset
        kept, lost_at, slot_at = self._slot_places(layout)
        dim, tokens, scale_at, zero_at = layout.dim, layout.page_tokens, layout["scale"].offset, layout["zero"].offset

        def read(slab, constants, tile, row_scale, row_zero, channel_scale, channel_zero):  # type: ignore[no-untyped-def]
            unpack_tile(slab, low, high, bits, tile)
            load_floats(slab, scale_at, "float16", row_scale)
            load_floats(slab, zero_at, "float16", row_zero)
            for channel in range(dim):
                for token in range(tokens):
                    level = constants[np.int64(tile[channel, token])]
                    tile[channel, token] = level * row_scale[token] + row_zero[token]
            for j in range(kept):
                load_floats(slab, lost_at + 2 * tokens * j, "float16", row_zero)
                for token in range(tokens):
                    tile[slab[slot_at + tokens * j + token], token] += row_zero[token]
            row_scale[:], row_zero[:] = np.float32(1.0), np.float32(0.0)

        return read

    def _keys_reader(self, layout: SlabLayout) -> Reader:
        bits, low, high = int(self.bits), layout.fields[0].offset, layout.fields[1].offset
        kept, lost_at, slot_at = self._slot_places(layout)
        dim, tokens, first_at = layout.dim, layout.page_tokens, layout["first"].offset
        zero_at, scale_at, pairs_at = 1 << bits, (1 << bits) + dim, (1 << bits) + 2 * dim

        def read(slab, constants, tile, row_scale, row_zero, channel_scale, channel_zero):  # type: ignore[no-untyped-def]
            unpack_tile(slab, low, high, bits, tile)
            zero, scale = constants[zero_at:scale_at], constants[scale_at:pairs_at]
            for token in range(tokens):
                for channel in range(dim):
                    level = constants[np.int64(tile[token, channel])]
                    tile[token, channel] = level * scale[channel] + zero[channel]
            for j in range(kept):
                load_floats(slab, lost_at + 2 * tokens * j, "float16", row_zero)
                for token in range(tokens):
                    tile[token, slab[slot_at + tokens * j + token]] += row_zero[token]
            row_zero[:] = np.float32(0.0)
            first = slab[first_at : first_at + 4].view(np.int32)[0]
            pairs, angles = np.int64(constants[pairs_at]), constants[pairs_at + 1 :]
            turn_rows(tile, first, pairs, angles, channel_scale, channel_zero)  # type: ignore[no-untyped-call]
            channel_scale[:], channel_zero[:] = np.float32(1.0), np.float32(0.0)

        return read

    def _slot_places(self, layout: SlabLayout) -> tuple[int, int, int]:
        """How many slots a token has, and the bytes where what they hold and their channels begin."""
        if not self.sparse:
            return 0, 0, 0
        return slots(layout.dim), layout["values_slot"].offset, layout["slot"].offset

    # ---- constants -------------------------------------------------------------------------------------------------

    def fitted(self, x: Tensor, side: Side) -> KvQuant:
        """Constants made of x alone, one head's for all, without gradients, for RoPE of base 10,000 over all channels: for tests."""
        dim, origin = x.shape[-1], torch.zeros((), dtype=torch.int32, device=x.device)
        angles = tuple(float(np.float32(_BASE ** (-2.0 * i / dim))) for i in range(dim // 2)) if side is Side.K else ()
        y = turned(x.clamp(-_LARGEST, _LARGEST), origin, angles, back=True).reshape(-1, dim)
        ranges = key_ranges(*_percentiles(y)) if side is Side.K else None
        histogram = Histogram()
        zero, scale = token_ranges(y, slots(dim)) if ranges is None else map(torch.from_numpy, ranges)
        histogram.add(((y - zero) / scale).numpy())
        levels = _rounded(fit_levels(histogram, int(self.bits)))
        drawn = _rounded(normalised(histogram, levels)) if self.normed else levels
        return replace(self, calibrated=Constants.of(levels, drawn, ranges, angles))

    @property
    def _made(self) -> Constants:
        assert self.calibrated is not None, "used in spite of refuses"
        return self.calibrated


def slots(dim: int) -> int:
    """How many numbers of a token are kept apart."""
    return max(1, round(dim / _CHANNELS_A_SLOT))


def key_ranges(low: Any, high: Any) -> tuple[Any, Any]:
    """Middle and half width, float32 [Hkv, D], of channels that lie between low and high [Hkv, D]."""
    zero, scale = (low / 2 + high / 2).astype(np.float32), (high / 2 - low / 2).astype(np.float32)
    least = np.maximum(_NARROWEST * scale.mean(axis=-1, keepdims=True), SMALLEST_STEP)
    return zero, np.maximum(scale, least).astype(np.float32)


def token_ranges(x: Tensor, without: int) -> tuple[Tensor, Tensor]:
    """Middle and half width [..., S, 1], as float16 rounds them, of tokens [..., S, D], but for the numbers farthest from a token's mean."""
    lo = hi = x
    if without:
        apart = torch.zeros_like(x, dtype=torch.bool).scatter_(-1, _farthest(x - halving_mean(x, -1), without), True)
        lo, hi = x.masked_fill(apart, torch.inf), x.masked_fill(apart, -torch.inf)
    lo, hi = lo.amin(-1, keepdim=True), hi.amax(-1, keepdim=True)
    zero, scale = (lo * 0.5 + hi * 0.5).half().float(), (hi * 0.5 - lo * 0.5).half().float()
    return zero, scale.clamp_min(SMALLEST_STEP)


def _farthest(x: Tensor, count: int) -> Tensor:
    """The channels of the `count` largest magnitudes of each token, int64 [..., S, count], the largest first; of equals the first."""
    order = torch.arange(x.shape[-1] - 1, -1, -1, device=x.device)
    key = (x.abs().contiguous().view(torch.int32).long() << 8) | order
    top = key.amax(-1, keepdim=True) if count == 1 else key.topk(count, dim=-1).values
    return x.shape[-1] - 1 - (top & 0xFF)


def _percentiles(y: Tensor) -> tuple[Any, Any]:
    """The LOW and HIGH percentiles of each channel of y [n, D], by nearest rank, [1, D]."""
    ordered = y.sort(dim=0).values
    kept = max(1, int(np.ceil(LOW / 100 * len(y))))
    return ordered[None, kept - 1].numpy(), ordered[None, -kept].numpy()


@cache
def _tensor(numbers: tuple[Any, ...], device: torch.device) -> Tensor:
    return torch.tensor(numbers, dtype=torch.float32, device=device)


def _rounded(levels: Any) -> Any:
    """So that they are the same whatever adds up a histogram."""
    return np.round(levels * _ROUNDING) / np.float32(_ROUNDING)


def _floats(numbers: Any) -> tuple[float, ...]:
    return tuple(float(number) for number in numbers)


_SOURCE = "KVQuant, NeurIPS 2024, arXiv 2401.18079"

CODECS = (
    KvQuant("kvquant4", 4, _SOURCE, headline=False),
    KvQuant("kvquant3", 3, _SOURCE, headline=False),
    KvQuant("kvquant2", 2, _SOURCE, headline=False, normed=True),
)
