"""Conformance checks that anyone may call on a codec of their own: `check_codec(MyCodec(...))`.

Each check raises AssertionError with what was expected. Our own tests run them over the registry, so a new codec file is checked by existing.
A codec that needs constants gets those of the numbers that it is tried on (`Codec.fitted`).
"""

from __future__ import annotations

from dataclasses import replace
from typing import TYPE_CHECKING, Any

import numpy as np

from kvarto.binding import BoundCodec
from kvarto.codecs import Codec
from kvarto.codecs.kvquant import KvQuant
from kvarto.formats import Format
from kvarto.jit import torch
from kvarto.layout import PAGE_TOKENS, Side

if TYPE_CHECKING:
    from torch import Tensor

DIMS = (64, 80, 96, 128, 256)
_GUARD_BYTES = 256
_GUARD_VALUE = 1234.5


def check_codec(codec: Codec, *, dims: tuple[int, ...] = DIMS, page_tokens: int = PAGE_TOKENS) -> None:
    """Every check, for both sides and each head dimension that the codec does not refuse; it must take 64 or 128."""
    taken = []
    for side in Side:
        for dim in dims:
            if specimen(codec, side, dim, page_tokens).refuses(side, page_tokens, dim) is None:
                bound = BoundCodec(codec, codec.layout(side, page_tokens, dim))
                check_layout(bound)
                check_bytes_do_not_depend_on_batch(bound)
                check_hard_groups(bound)
                check_signal_to_noise(bound)
                check_rotation(bound)
                check_numba_reader(bound)
                check_places(bound)
                taken.append(dim)
    assert {64, 128} & set(taken), f"{codec.name} refuses every usual head dimension"


def specimen(codec: Codec, side: Side, dim: int, page_tokens: int = PAGE_TOKENS) -> Codec:
    """The codec, if it needs constants with those of `key_like` numbers of this shape."""
    return codec.fitted(key_like((16, page_tokens, dim), seed=9), side)


def specimen_format(chosen: Format, k_dim: int, v_dim: int) -> Format:
    """The format with specimens as codecs."""
    return replace(chosen, k=specimen(chosen.k, Side.K, k_dim), v=specimen(chosen.v, Side.V, v_dim))


def specimen_heads(codec: Codec, side: Side, dim: int, heads: int, page_tokens: int = PAGE_TOKENS) -> Codec:
    """The codec, if it needs constants with those of noise, wider and about another bias in each of `heads` heads."""
    bias = torch.linspace(-0.5, 0.5, dim)
    each = [
        codec.fitted(_noise((16, page_tokens, dim), seed=9 + h) * (1 + h / 4) + h * bias, side) for h in range(heads)
    ]
    made = [one.calibrated for one in each if isinstance(one, KvQuant) and one.calibrated is not None]
    first = each[0]
    if side is Side.V or not isinstance(first, KvQuant) or not made:
        return first
    zero, scale = tuple(one.zero[0] for one in made), tuple(one.scale[0] for one in made)
    return replace(first, calibrated=replace(made[0], zero=zero, scale=scale))


def check_layout(bound: BoundCodec) -> None:
    """Fields lie one after another without overlap, aligned, and the slab is a whole number of 16-byte lines."""
    layout, end = bound.layout, 0
    for field in layout.fields:
        assert field.offset >= end, f"{bound.codec.name}: field {field.name} overlaps the one before"
        end = field.end
    assert end <= layout.nbytes < end + 16, f"{bound.codec.name}: {layout.nbytes} bytes for fields that end at {end}"
    assert layout.nbytes % 16 == 0


def check_bytes_do_not_depend_on_batch(bound: BoundCodec) -> None:
    """Sealing pages alone, together, or from a strided view gives the same bytes: path invariance rests on it."""
    x = key_like((3, 2, bound.layout.page_tokens, bound.layout.dim), seed=1)
    bound = bound.fitted(x)
    together = bound.encode(x)
    assert together.dtype == torch.uint8
    assert together.shape == (3, 2, bound.layout.nbytes)
    for i in range(3):
        assert torch.equal(bound.encode(x[i : i + 1])[0], together[i]), f"{bound.codec.name}: bytes depend on the batch"
    strided = torch.stack([x, -x], dim=-1).transpose(0, 1)[..., 0].transpose(0, 1)
    assert not strided.is_contiguous()
    assert torch.equal(bound.encode(strided), together), f"{bound.codec.name}: bytes depend on strides"


def check_hard_groups(bound: BoundCodec) -> None:
    """Constant, zero, tiny, huge, one-outlier and biased slabs decode to finite numbers, off by no more than the range of their slab.

    Of a codec whose errors are `relative` what is decoded of a token is about no longer than the token, and does not point away from it.
    """
    tokens, dim = bound.layout.page_tokens, bound.layout.dim
    zero = torch.zeros(1, tokens, dim)
    outlier = zero.clone()
    outlier[0, 3, 5] = 100.0
    cases = {"zero": zero, "constant": zero + 3.7, "tiny": key_like((1, tokens, dim), seed=2) * 1e-6, "outlier": outlier,
             "bias": key_like((1, tokens, dim), seed=3) + 300.0, "huge": key_like((1, tokens, dim), seed=4) * 1e4}  # fmt: skip
    codec = bound
    for name, x in cases.items():
        bound = codec.fitted(x)
        decoded = bound.decode(bound.encode(x))
        assert decoded.shape == x.shape
        assert decoded.dtype == torch.float32
        assert bool(torch.isfinite(decoded).all()), f"{bound.codec.name}: {name} slab decodes to NaN or infinity"
        if bound.codec.relative:
            token, norm = x.clamp(-65504.0, 65504.0), x.norm(dim=-1)
            off, forward = (decoded - token).norm(dim=-1), (decoded * token).sum(-1)
            assert bool(((off <= 1.42 * norm + 1e-6) & (forward >= 0)).all()), (
                f"{bound.codec.name}: a token of the {name} slab is off by more than its norm"
            )
            continue
        inside = x.abs() <= 400.0  # float8 at scale 1 clamps beyond 448; what saturates is counted, not bounded
        reach = float(x.max() - x.min()) + 2.0**-4 * float(x.abs().max()) + 1e-6
        assert float(((decoded - x).abs() * inside).max()) <= reach, (
            f"{bound.codec.name}: {name} slab is off by more than its range"
        )
    bound = codec.fitted(zero)
    beyond = zero + 1e30
    assert bool(torch.isfinite(bound.decode(bound.encode(beyond))).all())
    error = float((bound.decode(bound.encode(beyond)) - beyond).abs().max()) / 1e30
    assert error < 0.01 or bound.codec.saturated(beyond, bound.layout.side) > 0, (
        f"{bound.codec.name}: clamps without counting"
    )


def check_rotation(bound: BoundCodec) -> None:
    """`rotate` preserves inner products and `unrotate` undoes it."""
    x, y = key_like((5, bound.layout.dim), seed=5), key_like((5, bound.layout.dim), seed=6)
    torch.testing.assert_close(bound.unrotate(bound.rotate(x)), x, rtol=1e-4, atol=1e-4)
    torch.testing.assert_close((bound.rotate(x) * bound.rotate(y)).sum(-1), (x * y).sum(-1), rtol=1e-4, atol=1e-2)


def check_signal_to_noise(bound: BoundCodec) -> None:
    """Noise of unit variance keeps what `codec.bits` promise, with 3 dB and more to spare: all of its bits are used, for every element.

    A uniform code of b bits over the range of 64 numbers of a Gaussian keeps about 6.02 b - 4 dB, a float of 8 bits at least 25.
    """
    bits = bound.codec.bits
    least = min(6.02 * bits - 9.0, max(24.0, 3.0 * bits))
    x = _noise((64, 1, bound.layout.page_tokens, bound.layout.dim), seed=8)
    bound = bound.fitted(x)
    error = bound.decode(bound.encode(x)).double() - x.double()
    signal, noise = x.double().square(), error.square()
    kept = 10.0 * float(torch.log10(signal.mean() / noise.mean()))
    side = bound.layout.side.upper()
    assert kept >= least, f"{bound.codec.name}: {side} keeps {kept:.1f} dB of {bits} bits, expected {least:.1f}"
    # The worst place of a slab: a code that is never stored shows here and not in the mean.
    lost = noise.sum(dim=(0, 1)) / signal.sum(dim=(0, 1))
    assert float(lost.max()) < 0.9, (
        f"{bound.codec.name}: {side} loses element {divmod(int(lost.argmax()), lost.shape[1])}"
    )


def check_numba_reader(bound: BoundCodec) -> None:
    """The compiled tile and its terms equal `rotate(decode(...))`, from a slab whose neighbours are poisoned; neighbours of the tile and of the
    terms are left alone.
    """
    layout, x = bound.layout, key_like((1, bound.layout.page_tokens, bound.layout.dim), seed=7)
    bound = bound.fitted(x)
    if bound.numba is None:
        return
    slab = bound.encode(x, torch.tensor([1_000_000], dtype=torch.int32))
    among = np.full(layout.nbytes + 2 * _GUARD_BYTES, 0xFF, np.uint8)  # as float16, bfloat16, float32 and float8: NaN
    among[_GUARD_BYTES:-_GUARD_BYTES] = slab[0].numpy()
    guarded = [_Guarded(layout.tile_shape, np.nan), *_neutral_terms(layout.page_tokens, layout.dim)]
    told = np.zeros((1, 0), np.float32) if bound.constants is None else bound.constants
    bound.numba(among[_GUARD_BYTES:-_GUARD_BYTES], told[0], *[array.inside for array in guarded])
    names = ("tile", "row_scale", "row_zero", "channel_scale", "channel_zero")
    for name, array in zip(names, guarded, strict=True):
        assert array.untouched_around(), f"{bound.codec.name}: the {layout.side.upper()} reader writes outside {name}"
    tile, row_scale, row_zero, channel_scale, channel_zero = (array.inside for array in guarded)
    codes = tile if layout.side is Side.K else tile.T
    got = codes * row_scale[:, None] * channel_scale + row_zero[:, None] + channel_zero
    expected = bound.rotate(bound.decode(slab))[0]
    torch.testing.assert_close(torch.from_numpy(got), expected, rtol=1e-4, atol=1e-4 * float(expected.abs().max()))


def check_places(bound: BoundCodec) -> None:
    """The bytes of a page at a place do not depend on what pages at other places it is sealed with, and are as good there as at the beginning."""
    x = key_like((3, 2, bound.layout.page_tokens, bound.layout.dim), seed=10)
    bound, first = bound.fitted(x), torch.tensor([0, 64, 1 << 20], dtype=torch.int32)
    together = bound.encode(x, first)
    assert torch.equal(together[0], bound.encode(x)[0]), f"{bound.codec.name}: without a place it is not the beginning"
    for i in range(3):
        alone = bound.encode(x[i : i + 1], first[i : i + 1])[0]
        assert torch.equal(alone, together[i]), f"{bound.codec.name}: bytes depend on the places of other pages"
        error = float((bound.decode(together[i]) - x[i]).square().mean() / x[i].square().mean())
        assert error < 4.0 ** (1.0 - min(bound.codec.bits, 3.0)), (
            f"{bound.codec.name}: page at {int(first[i])} is off by {error:.2g}"
        )


def key_like(shape: tuple[int, ...], seed: int) -> Tensor:
    """Numbers of the scale of real keys, float32: unit noise, a token-independent bias, two channels with a bias of 200 and -120.

    Made by integer arithmetic, so that every version of every library gives the same bits.
    """
    bias = np.linspace(-2.0, 2.0, shape[-1])
    bias[3], bias[shape[-1] // 2 + 3] = 200.0, -120.0
    return torch.from_numpy((_unit_noise(shape, seed) + bias).astype(np.float32))


def _noise(shape: tuple[int, ...], seed: int) -> Tensor:
    """The noise of `key_like` alone, float32: nearly a Gaussian of unit variance."""
    return torch.from_numpy(_unit_noise(shape, seed).astype(np.float32))


def _unit_noise(shape: tuple[int, ...], seed: int) -> np.ndarray[Any, np.dtype[np.float64]]:
    count = int(np.prod(shape))
    state = (np.arange(count, dtype=np.uint64) + np.uint64(seed * 1_000_003)) * np.uint64(0x9E3779B97F4A7C15)
    noise: np.ndarray[Any, np.dtype[np.float64]] = np.zeros(count)
    for _ in range(4):
        state ^= state >> np.uint64(31)
        state *= np.uint64(0xBF58476D1CE4E5B9)
        noise += (state >> np.uint64(40)).astype(np.float64) / 2.0**24 - 0.5
    noise *= np.sqrt(3.0)
    return noise.reshape(shape)


class _Guarded:
    """A float32 array in the middle of a larger one, whose ends must keep what they hold."""

    def __init__(self, shape: tuple[int, ...], value: float) -> None:
        guard = _GUARD_BYTES // 4
        self._whole = np.full(int(np.prod(shape)) + 2 * guard, _GUARD_VALUE, np.float32)
        self.inside = self._whole[guard:-guard].reshape(shape)
        self.inside[...] = value

    def untouched_around(self) -> bool:
        guard = _GUARD_BYTES // 4
        return bool((self._whole[:guard] == _GUARD_VALUE).all() and (self._whole[-guard:] == _GUARD_VALUE).all())


def _neutral_terms(tokens: int, dim: int) -> list[_Guarded]:
    return [_Guarded((count,), value) for count, value in ((tokens, 1.0), (tokens, 0.0), (dim, 1.0), (dim, 0.0))]
