"""TurboQuant: a norm, a rotation, and the best levels for what a rotation makes of any vector (Zandieh et al., ICLR 2026, arXiv 2504.19874).

    K, V  x float32 [S, D]  ->  y = H x;  scale float16 [S], the root mean square of y;  codes of b bits, K [S, D], V [D, S], of y / scale

The levels are Lloyd-Max levels of one coordinate of a random unit vector of D dimensions, times sqrt(D): of the density of Lemma 1, not of its
Gaussian limit, found here by Lloyd's fixed point. They are kept to a curve of two coefficients, so that a kernel computes a level and looks up none,

    level = u (a + b u^4),   u = (2 code + 1) / 2^(bits - 1) - 2, in -2 .. 2

which costs 0.00, 0.10 and 0.17 % of distortion at 2, 3 and 4 bits (u and u^3 alone 0.20 and 1.8 % at 3 and 4).

The rotation is our Hadamard transform without random signs, where the paper draws an orthogonal matrix by QR. On Gaussian vectors the error is the
same, on vectors with one large channel smaller (all coordinates are then alike); it is a sum in a stated order, so that bytes are the same
everywhere, and D log D. Random signs changed the KL of attention over real keys by 2 to 10 %, either way. The price: a vector along a row of H (all
channels alike) becomes a single spike and is clipped.

`turboN`      as in the paper: the scale is the norm. Squared error is least, but a decoded vector, and so a score, is shorter by 1 - D
`turboN-nc`   "norm correction", as vLLM's _nc: the scale is such that the decoded vector is as long as x was. Bytes are read the same way. KL of
              SmolLM2 at 4, 3, 2 bits .0109, .045, .168, without .0111, .050, .174 (intervals overlap); of attention over Qwen's keys 6 % lower,
              7 % lower, 8 % higher. A vector that is clipped may be off by 1.4 |x|. For so little the paper's own way is the default
`turboN-qjl`  the paper's inner-product variant: N - 1 bits as above, then sign(S r) of the residual r and its root mean square, S a matrix of
              Gaussian numbers. Unbiased, at 5 times the variance: worst of the three at equal bits, and here to show that. Its decoding is a
              product with S, so no compiled kernel reads it: the reference kernel runs
`turbo3.5`, `turbo2.5`   a quarter of the channels with one more bit, in a rotation and with a scale of their own. Which, is fixed by position, so
              nothing is calibrated: of keys those that RoPE turns slowest (the last D / 8 of each half), of values the first. 3.25 and 2.25 bits
              of codes, and two scales; the paper's (32 x 3 + 96 x 2) / 128 is 2.25 too, and with two norms of 16 bits it is the 2.5 that it says.
              Two scales for a token are no affine tile: on a GPU the reference kernel runs

Error: of a vector on average D |x|^2, D = .116, .034, .0093 for 2, 3, 4 bits, and (signs apart) never more than 2 |x|^2. Bits: N + 16 / D, with qjl
N + 32 / D; 3.25 and 2.25 + 32 / D. QJL: arXiv 2406.03482.
"""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass
from functools import cache
from math import lgamma, log, pi, sqrt
from typing import TYPE_CHECKING, Any

import numpy as np

from kvarto.codecs import hadamard
from kvarto.codecs.base import Codec, Reader, assemble, beyond, extract, from_tile, halving_mean, to_tile
from kvarto.codecs.packing import (
    add_single_bits,
    bend_codes,
    code_fields,
    code_planes,
    pack,
    pack_plane,
    unpack,
    unpack_plane,
    unpack_tile,
)
from kvarto.jit import load_floats, torch
from kvarto.layout import FieldSpec, Side, SlabLayout
from kvarto.sealing import FLOAT16_MAX
from kvarto.tile import Curve, Term, Tile

if TYPE_CHECKING:
    from torch import Tensor

_GRID_POINTS = 1 << 16
_UNIT = (
    1 << 10
)  # of the numbers of S and, relative to their largest, of residuals: sums of their products are exact in float64


# ---- levels ----------------------------------------------------------------------------------------------------------


@cache
def curve(bits: int, dim: int) -> Curve:
    """The (a, b) of least distortion for `bits` bits in `dim` dimensions, rounded to float16; b = 0 for one bit.

    Lloyd's iteration: the nearest level for every number, then the curve of least squares for that, until it stands still.
    """
    z, mass, moment = _integrals(dim)
    u = _places(bits)[1 << (bits - 1) :]
    basis = np.stack([u, u**5][: 1 if bits == 1 else 2], axis=1)
    levels, previous = u, u + 1.0
    while np.abs(levels - previous).max() > 1e-9:
        ends = np.concatenate([[0.0], (levels[1:] + levels[:-1]) / 2, [z[-1]]])
        weights, sums = np.diff(np.interp(ends, z, mass)), np.diff(np.interp(ends, z, moment))
        fitted = np.linalg.solve(basis.T @ (weights[:, None] * basis), basis.T @ sums)
        levels, previous = basis @ fitted, levels
    a, b = (*map(float, fitted.astype(np.float16)), 0.0)[:2]
    return a, b


@cache
def levels_of(bits: int, dim: int) -> np.ndarray[Any, np.dtype[np.float32]]:
    """The 2^bits levels, ascending, float32, for coordinates of a mean square of 1."""
    (a, b), u = curve(bits, dim), _places(bits)
    return (u * (a + b * u**4)).astype(np.float32)


def _places(bits: int) -> np.ndarray[Any, np.dtype[np.float64]]:
    """u of each code."""
    return (2.0 * np.arange(1 << bits) + 1.0) / (1 << bits >> 1) - 2.0


@cache
def _integrals(dim: int) -> tuple[np.ndarray[Any, Any], ...]:
    """(z, mass, moment): twice the integrals of p and of z p from 0 on, p the density of a coordinate times sqrt(dim), z 0 .. sqrt(dim).

    Of a unit vector's coordinate t the density is Gamma(d / 2) / (sqrt(pi) Gamma((d - 1) / 2)) (1 - t^2)^((d - 3) / 2) (Lemma 1).
    """
    z = np.linspace(0.0, sqrt(dim), _GRID_POINTS)
    constant = lgamma(dim / 2) - lgamma((dim - 1) / 2) - 0.5 * log(pi * dim)
    p = np.exp(constant + (dim - 3) / 2 * np.log1p(-np.minimum(z * z / dim, 1.0 - 1e-12)))
    return z, _integral(p, z[1]), _integral(p * z, z[1])


def _integral(p: np.ndarray[Any, Any], step: float) -> np.ndarray[Any, Any]:
    return np.concatenate([[0.0], np.cumsum(p[1:] + p[:-1]) * step])


@cache
def _levels_on(bits: int, dim: int, device: torch.device) -> tuple[Tensor, Tensor]:
    """(levels, thresholds between them), float32, sent to a device once."""
    levels = levels_of(bits, dim)
    return tuple(torch.from_numpy(x).to(device) for x in (levels, (levels[1:] + levels[:-1]) / 2))  # type: ignore[return-value]


# ---- vectors to codes ------------------------------------------------------------------------------------------------


def _quantize(y: Tensor, bits: int, *, corrected: bool) -> tuple[Tensor, Tensor]:
    """Codes uint8 [..., D] and scales float16 [..., 1] of y float32 [..., D], rotated."""
    levels, thresholds = _levels_on(bits, y.shape[-1], y.device)
    size = halving_mean(y * y, -1).sqrt()
    codes = torch.bucketize((y / torch.where(size > 0, size, 1.0)).contiguous(), thresholds)
    if corrected:
        size = size / halving_mean(levels[codes].square(), -1).sqrt()
    return codes.to(torch.uint8), size.clamp_max(FLOAT16_MAX).half()


def _dequantize(codes: Tensor, scale: Tensor, bits: int) -> Tensor:
    """float32 [..., D], rotated."""
    levels, _ = _levels_on(bits, codes.shape[-1], codes.device)
    return levels[codes.long()] * scale.float()


@cache
def _matrix(dim: int) -> np.ndarray[Any, np.dtype[np.float64]]:
    """S [D, D] times `_UNIT`, whole numbers: Gaussian by Box and Muller from a bit stream that is the same in every version of numpy."""
    raw = np.random.Philox(key=dim).random_raw(2 * dim * dim)
    u, v = ((raw >> np.uint64(11)).astype(np.float64) + 0.5).reshape(2, dim, dim) * 2.0**-53
    whole: np.ndarray[Any, np.dtype[np.float64]] = np.rint(np.sqrt(-2.0 * np.log(u)) * np.cos(2.0 * pi * v) * _UNIT)
    return whole


@cache
def _matrix_on(dim: int, device: torch.device) -> Tensor:
    return torch.from_numpy(_matrix(dim)).to(device)


def sketch(r: Tensor) -> Tensor:
    """Whether S r >= 0, uint8 [..., D], for r float32 [..., D]: products of whole numbers, of which a matrix product adds exactly in any order."""
    largest = r.abs().amax(-1, keepdim=True)
    whole = (r / torch.where(largest > 0, largest, 1.0) * _UNIT).round().double()
    return (whole @ _matrix_on(r.shape[-1], r.device).T >= 0).to(torch.uint8)


def unsketch(signs: Tensor, size: Tensor) -> Tensor:
    """sqrt(pi / 2) / D |r| S^T signs, which is r on average: signs uint8 [..., D], size float16 [..., 1] = |r| / sqrt(D)."""
    dim = signs.shape[-1]
    whole = (2.0 * signs.double() - 1.0) @ _matrix_on(dim, signs.device)
    return whole.float() * (size.float() * sqrt(pi / 2 / dim) / _UNIT)


def _within(x: Tensor) -> Tensor:
    """A root mean square of these is within float16."""
    return x.clamp(-FLOAT16_MAX, FLOAT16_MAX)


# ---- one rotation, one scale -----------------------------------------------------------------------------------------


@dataclass(frozen=True)
class Turbo(Codec):
    """`bits` of a level's code; `corrected`: decoded vectors keep their length; `signs`: sign bits of the residual follow."""

    relative: bool = True
    corrected: bool = False
    signs: bool = False

    def refuses(self, side: Side, page_tokens: int, dim: int) -> str | None:
        """There must be a Hadamard matrix of the head dimension."""
        if hadamard.order_base(dim) is None:
            return f"no Hadamard transform of order {dim} (2^k, 12, 20 or 28 times 2^k)"
        return None

    def fields(self, side: Side, page_tokens: int, dim: int) -> Sequence[FieldSpec]:
        """Codes in tile order, signs likewise, then the scale of each token, and that of its residual."""
        rows, columns = (page_tokens, dim) if side is Side.K else (dim, page_tokens)
        fields = [*code_fields(int(self.bits), rows, columns)]
        if self.signs:
            fields.append(("codes_sign", "uint8", (rows, columns // 8)))
        fields.append(("scale", "float16", (page_tokens,)))
        return [*fields, ("scale_residual", "float16", (page_tokens,))] if self.signs else fields

    def encode(self, x: Tensor, layout: SlabLayout) -> Tensor:
        """Rotate, measure, round."""
        bits, y = int(self.bits), hadamard.transform(_within(x))
        codes, scale = _quantize(y, bits, corrected=self.corrected)
        arrays = pack(to_tile(codes, layout.side), bits)
        if self.signs:
            residual = y - _dequantize(codes, scale, bits)
            arrays["codes_sign"] = pack_plane(to_tile(sketch(residual), layout.side), 1)
            size = halving_mean(residual * residual, -1).sqrt()
            arrays["scale_residual"] = size.clamp_max(FLOAT16_MAX).half().squeeze(-1)
        return assemble(layout, **arrays, scale=scale.squeeze(-1))

    def decode(self, slabs: Tensor, layout: SlabLayout) -> Tensor:
        """Level times scale, and what the signs say, rotated back."""
        bits, side = int(self.bits), layout.side
        names = [name for name, _, _ in code_fields(bits, *layout.tile_shape)]
        codes = unpack({name: extract(slabs, layout, name) for name in names}, bits)
        y = _dequantize(from_tile(codes, side), extract(slabs, layout, "scale").unsqueeze(-1), bits)
        if self.signs:
            signs = from_tile(unpack_plane(extract(slabs, layout, "codes_sign"), 1), side)
            y = y + unsketch(signs, extract(slabs, layout, "scale_residual").unsqueeze(-1))
        return hadamard.transform(y, inverse=True)

    def rotate(self, x: Tensor, side: Side) -> Tensor:
        """Multiply by the Hadamard matrix."""
        return x @ hadamard.matrix(x.shape[-1]).to(x)

    def unrotate(self, y: Tensor, side: Side) -> Tensor:
        """Multiply by its transpose."""
        return y @ hadamard.matrix(y.shape[-1]).to(y).T

    def saturated(self, x: Tensor, side: Side) -> int:
        """Elements beyond float16."""
        return beyond(x, FLOAT16_MAX)

    def tile(self, layout: SlabLayout) -> Tile | None:
        """Codes on a curve, a scale for each token; None with signs, and for one bit, which is no curve."""
        if self.signs or self.bits < 2:
            return None
        scale = Term(layout["scale"].offset, "float16", "row" if layout.side is Side.K else "column")
        return Tile(code_planes(layout, int(self.bits)), scale, curve=curve(int(self.bits), layout.dim))

    def numba_reader(self, layout: SlabLayout) -> Reader | None:
        """Levels, and a row term; None where `tile` is."""
        if self.signs or self.bits < 2:
            return None
        bits, low, high = int(self.bits), layout.fields[0].offset, layout.fields[1].offset
        scale, place = layout["scale"].offset, _numba_curve(bits, layout.dim)

        def read(slab, constants, tile, row_scale, row_zero, channel_scale, channel_zero):  # type: ignore[no-untyped-def]
            unpack_tile(slab, low, high, bits, tile)
            bend_codes(tile.reshape(tile.size), place)
            load_floats(slab, scale, "float16", row_scale)

        return read


def _numba_curve(bits: int, dim: int) -> tuple[np.float32, ...]:
    """(factor, offset, a, b): u = code * factor - offset."""
    a, b = curve(bits, dim)
    return np.float32(2.0 ** (2 - bits)), np.float32(2.0 - 2.0 ** (1 - bits)), np.float32(a), np.float32(b)


# ---- two rotations, two scales ---------------------------------------------------------------------------------------


@dataclass(frozen=True)
class TurboSplit(Codec):
    """A quarter of the channels with one more bit than the others, which have floor(`bits`)."""

    relative: bool = True

    @property
    def _low_bits(self) -> int:
        return int(self.bits)

    def refuses(self, side: Side, page_tokens: int, dim: int) -> str | None:
        """Both parts need a Hadamard matrix, and the quarter whole bytes."""
        if dim % 32 or hadamard.order_base(dim // 4) is None or hadamard.order_base(dim - dim // 4) is None:
            return f"no Hadamard transforms for a quarter of {dim} channels, a multiple of 8, and for the rest"
        return None

    def fields(self, side: Side, page_tokens: int, dim: int) -> Sequence[FieldSpec]:
        """Codes in tile order, the quarter's channels first; the quarter's highest bit; two scales for each token."""
        rows, columns = (page_tokens, dim) if side is Side.K else (dim, page_tokens)
        more = (page_tokens, dim // 32) if side is Side.K else (dim // 4, page_tokens // 8)
        scales: list[FieldSpec] = [(name, "float16", (page_tokens,)) for name in ("scale_quarter", "scale")]
        return [*code_fields(self._low_bits, rows, columns), ("codes_quarter", "uint8", more), *scales]

    def encode(self, x: Tensor, layout: SlabLayout) -> Tensor:
        """Each part by itself."""
        bits, quarter = self._low_bits, layout.dim // 4
        first, rest = self._parts(_within(x), layout.side)
        high, high_scale = _quantize(hadamard.transform(first), bits + 1, corrected=False)
        low, low_scale = _quantize(hadamard.transform(rest), bits, corrected=False)
        codes = torch.cat([high & ((1 << bits) - 1), low], dim=-1)
        assert high.shape[-1] == quarter
        return assemble(
            layout,
            **pack(to_tile(codes, layout.side), bits),
            codes_quarter=pack_plane(to_tile(high >> bits, layout.side), 1),
            scale_quarter=high_scale.squeeze(-1),
            scale=low_scale.squeeze(-1),
        )

    def decode(self, slabs: Tensor, layout: SlabLayout) -> Tensor:
        """Each part by itself."""
        bits, quarter, side = self._low_bits, layout.dim // 4, layout.side
        names = [name for name, _, _ in code_fields(bits, *layout.tile_shape)]
        codes = from_tile(unpack({name: extract(slabs, layout, name) for name in names}, bits), side)
        more = from_tile(unpack_plane(extract(slabs, layout, "codes_quarter"), 1), side) << bits
        scales = [extract(slabs, layout, name).unsqueeze(-1) for name in ("scale_quarter", "scale")]
        first = _dequantize(codes[..., :quarter] + more, scales[0], bits + 1)
        rest = _dequantize(codes[..., quarter:], scales[1], bits)
        return self._whole([hadamard.transform(part, inverse=True) for part in (first, rest)], side)

    def rotate(self, x: Tensor, side: Side) -> Tensor:
        """The quarter first; each part by its matrix."""
        parts = self._parts(x, side)
        return torch.cat([part @ hadamard.matrix(part.shape[-1]).to(part) for part in parts], dim=-1)

    def unrotate(self, y: Tensor, side: Side) -> Tensor:
        """Each part by its matrix's transpose, and back in place."""
        quarter = y.shape[-1] // 4
        parts = (y[..., :quarter], y[..., quarter:])
        return self._whole([part @ hadamard.matrix(part.shape[-1]).to(part).T for part in parts], side)

    def saturated(self, x: Tensor, side: Side) -> int:
        """Elements beyond float16."""
        return beyond(x, FLOAT16_MAX)

    def numba_reader(self, layout: SlabLayout) -> Reader:
        """Levels times scales: the two scales of a token are applied while reading."""
        bits, low, high = self._low_bits, layout.fields[0].offset, layout.fields[1].offset
        more, scale_quarter, scale = (layout[name].offset for name in ("codes_quarter", "scale_quarter", "scale"))
        quarter, tokens, is_key = layout.dim // 4, layout.page_tokens, layout.side is Side.K
        first_place = _numba_curve(bits + 1, quarter)
        rest_place = _numba_curve(bits, layout.dim - quarter)

        def read(slab, constants, tile, row_scale, row_zero, channel_scale, channel_zero):  # type: ignore[no-untyped-def]
            unpack_tile(slab, low, high, bits, tile)
            if is_key:
                load_floats(slab, scale, "float16", row_scale)
                load_floats(slab, scale_quarter, "float16", row_zero)
                for token in range(tokens):
                    row = tile[token]
                    add_single_bits(slab, more + token * (quarter // 8), np.float32(1 << bits), row[:quarter])
                    bend_codes(row[:quarter], first_place)
                    bend_codes(row[quarter:], rest_place)
                    row[:quarter] *= row_zero[token]
                    row[quarter:] *= row_scale[token]
            else:
                for channel in range(quarter):
                    add_single_bits(slab, more + channel * (tokens // 8), np.float32(1 << bits), tile[channel])
                bend_codes(tile[:quarter].reshape(quarter * tokens), first_place)
                bend_codes(tile[quarter:].reshape(tile.size - quarter * tokens), rest_place)
                load_floats(slab, scale_quarter, "float16", row_scale)
                for channel in range(quarter):
                    tile[channel] *= row_scale
                load_floats(slab, scale, "float16", row_scale)
                for channel in range(quarter, tile.shape[0]):
                    tile[channel] *= row_scale
            row_scale[:], row_zero[:] = np.float32(1.0), np.float32(0.0)

        return read

    def _parts(self, x: Tensor, side: Side) -> tuple[Tensor, Tensor]:
        """The quarter's channels of x [..., D], and the others."""
        order, quarter = _order(x.shape[-1], side), x.shape[-1] // 4
        return x[..., order[:quarter]], x[..., order[quarter:]]

    def _whole(self, parts: list[Tensor], side: Side) -> Tensor:
        """The inverse of `_parts`."""
        order = _order(sum(part.shape[-1] for part in parts), side)
        return torch.cat(parts, dim=-1)[..., [order.index(channel) for channel in range(len(order))]]


@cache
def _order(dim: int, side: Side) -> list[int]:
    """All channels, the quarter with one more bit first."""
    half, run = dim // 2, dim // 8
    quarter = [*range(half - run, half), *range(dim - run, dim)] if side is Side.K else [*range(dim // 4)]
    return [*quarter, *sorted(set(range(dim)) - set(quarter))]


_SOURCE = "TurboQuant, ICLR 2026, arXiv 2504.19874"

CODECS = (
    Turbo("turbo4", 4, _SOURCE, headline=False),
    Turbo("turbo3", 3, _SOURCE, headline=False),
    Turbo("turbo2", 2, _SOURCE, headline=False),
    Turbo("turbo4-nc", 4, _SOURCE, headline=False, corrected=True),
    Turbo("turbo3-nc", 3, _SOURCE, headline=False, corrected=True),
    Turbo("turbo2-nc", 2, _SOURCE, headline=False, corrected=True),
    Turbo("turbo4-qjl", 3, _SOURCE, headline=False, signs=True),
    Turbo("turbo3-qjl", 2, _SOURCE, headline=False, signs=True),
    TurboSplit("turbo3.5", 3.25, _SOURCE, headline=False),
    TurboSplit("turbo2.5", 2.25, _SOURCE, headline=False),
)
