"""Round trips for any input: packing is exact, and every codec keeps the error bound that its docstring states."""

from __future__ import annotations

import itertools

import pytest

pytest.importorskip("torch")

import numpy as np
import torch
from hypothesis import assume, given, settings
from hypothesis import strategies as st
from hypothesis.extra.numpy import arrays
from torch import Tensor

from kvarto.codecs import affine, registry
from kvarto.codecs.base import extract, halving_mean
from kvarto.codecs.packing import pack, unpack
from kvarto.layout import Side
from kvarto.sealing import FLOAT16_MAX

SETTINGS = settings(max_examples=60, deadline=None)
FLOATS = st.floats(-60000, 60000, width=32, allow_nan=False, allow_infinity=False)
SLABS = arrays(np.float32, (64, 8), elements=FLOATS, fill=FLOATS).map(lambda a: torch.from_numpy(a).repeat(1, 8))


@SETTINGS
@given(data=st.data(), bits=st.sampled_from([2, 3, 4, 8]), columns=st.sampled_from([8, 64, 80]))
def test_packing_is_exact(data: st.DataObject, bits: int, columns: int) -> None:
    codes = torch.from_numpy(data.draw(arrays(np.uint8, (2, 5, columns), elements=st.integers(0, 2**bits - 1))))
    packed = pack(codes, bits)
    assert sum(plane.numel() for plane in packed.values()) == codes.numel() * bits // 8
    assert torch.equal(unpack(packed, bits), codes)


@SETTINGS
@given(x=SLABS)
@pytest.mark.parametrize(
    ("name", "side"),
    list(itertools.product(("int8", "kivi4", "kivi3", "kivi2", "kivi4-g32", "kivi2-g32"), Side)),
)
def test_uniform_codes_are_within_half_a_step(name: str, side: Side, x: Tensor) -> None:
    codec = registry[name]
    layout = codec.layout(side, 64, 64)
    error = (codec.decode(codec.encode(x, layout), layout) - x).abs()
    axis, group = _group(name, side)
    groups = x.split(group, axis)
    ranges = torch.cat([(part.amax(axis, True) - part.amin(axis, True)).expand_as(part) for part in groups], axis)
    largest = torch.cat([part.abs().amax(axis, True).expand_as(part) for part in groups], axis)
    steps = 2 ** int(codec.bits) - 1
    # Half a step; at the ends of the range the rounding of the group's zero and scale to float16, and the smallest step.
    wider, smallest = (
        (1.125, 2.0**-17) if name == "int8" and side is Side.K else (1.0, 0.0)
    )  # a scale in a byte is rounded up
    bound = ranges / steps * 0.5 * wider * 1.001 + (largest + ranges) * 2.0**-11 * 1.01 + (steps + 1) * 2.0**-25
    bound = bound + smallest / 2
    assert bool((error <= bound).all()), float((error - bound).max())


def _group(name: str, side: Side) -> tuple[int, int]:
    """(axis of [S, D], elements) that share a scale."""
    if side is Side.V:
        return 1, 64 if name == "int8" else 32
    return 0, 32 if name.endswith("g32") else 64


@SETTINGS
@given(x=SLABS)
@pytest.mark.parametrize(
    ("name", "relative"), [("bf16", 2.0**-8), ("fp16", 2.0**-11), ("fp32", 0.0), ("fp8-token", 2.0**-4 + 2.0**-8)]
)
def test_floats_are_within_their_relative_error(name: str, relative: float, x: Tensor) -> None:
    codec = registry[name]
    layout = codec.layout(Side.K, 64, 64)
    error = (codec.decode(codec.encode(x, layout), layout) - x).abs()
    smallest = {"fp8-token": 2.0**-9 * x.abs().amax(-1, keepdim=True) / 448, "fp16": torch.tensor(2.0**-25)}.get(
        name, torch.tensor(0.0)
    )
    assert bool(
        (error <= relative * x.abs() + smallest + 1e-37).all()
    )  # 1e-37: below float32's normal numbers all bets are off


@SETTINGS
@given(x=SLABS)
@pytest.mark.parametrize(("name", "side"), list(itertools.product(("int4", "int3", "int2"), Side)))
def test_fitted_codes_lose_no_more_than_codes_from_least_to_most(name: str, side: Side, x: Tensor) -> None:
    """For each group, the channel for keys and the rotated token for values, by squared error.

    Each round of least squares lowers the error that codes of the same number between the group's ends have, E. The last scale keeps the group's
    variance S instead (sums of squares, both): of an error E it makes 2 (S - sqrt(S (S - E))), hardly more than E where E is a small part of S.
    What rounding the terms may add, as norms: a key's scale is up to 2^-4 off, and ends are cut off by so much of what lies between them and the
    middle; a value's zero has few places, and a larger step than the best may be needed to reach an outlier from there: half a step for each number.
    A group near float16's end whose fitted zero lies beyond it gets the nearest zero there is, and is not held to this.
    """
    codec = registry[name]
    layout = codec.layout(side, 64, 64)
    assume(codec.saturated(x, side) == 0)
    slabs = codec.encode(x, layout)
    decoded = codec.decode(slabs, layout)
    stored, got = (x, decoded) if side is Side.K else (codec.rotate(x, side), codec.rotate(decoded, side))
    stored, got, axis = stored.double(), got.double(), -2 if side is Side.K else -1
    low, high = stored.amin(axis, True), stored.amax(axis, True)
    highest = _levels(name, side) - 1
    step = ((high - low) / highest).clamp_min(1e-30)
    plain = low + ((stored - low) / step).round() * step
    plain_error, error = ((y - stored).square().sum(axis) for y in (plain, got))
    spread = (stored - stored.mean(axis, True)).square().sum(axis)
    # Each of four rounds, and the last scale, may add what float16 takes from scale and zero; of 64 elements, as a norm.
    smallest = 2.0**-17 if side is Side.K else 2.0**-20  # scales that three bits of mantissa, or six, can tell from 0
    rounding = 8.0 * (stored.abs().amax(axis) * 2.0**-10 + highest.squeeze(axis) * smallest / 2)
    fitted = torch.minimum((plain_error.sqrt() + 4 * rounding).square(), spread)
    bound = (2 * (spread - (spread * (spread - fitted)).sqrt())).sqrt() + rounding
    if side is Side.K:
        bound = 1.05 * bound + 2.0**-4 * spread.sqrt()
        held = extract(slabs, layout, "zero").abs() < FLOAT16_MAX
    else:
        bound = 1.05 * bound + 64**0.5 * 0.5 * extract(slabs, layout, "scale").double()
        held = torch.ones_like(bound, dtype=torch.bool)
    assert bool((error.sqrt() <= bound)[held].all()), float((error.sqrt() - bound)[held].max())


@SETTINGS
@given(x=SLABS)
@pytest.mark.parametrize(
    "name", ["turbo4", "turbo3", "turbo2", "turbo4-nc", "turbo3-nc", "turbo2-nc", "turbo3.5", "turbo2.5"]
)
@pytest.mark.parametrize("side", list(Side))
def test_levels_are_within_their_part_of_the_norm(name: str, side: Side, x: Tensor) -> None:
    """Of any vector, the hardest ones included, which a rotation turns into a spike: 2 |x|^2; and corrected vectors have their length."""
    codec = registry[name]
    layout = codec.layout(side, 64, 64)
    decoded, norm = codec.decode(codec.encode(x, layout), layout), x.norm(dim=-1)
    # Float16's smallest step of a scale, times the largest level of each of 64 channels.
    rounding = 2.0**-25 * 3 * 8
    assert bool(((decoded - x).norm(dim=-1) <= 1.415 * norm + rounding).all())
    if name.endswith("-nc"):
        length, most = decoded.norm(dim=-1), 65504.0 * 8 / 3.0
        held = norm < most  # of a spike the scale is up to 2.8 times its root mean square, and float16 ends
        assert bool(((length - norm).abs() <= 2.0**-10 * norm + rounding)[held].all())


def _levels(name: str, side: Side) -> Tensor:
    """Codes of each group, float64 [1, D] or [1, 1]: the last 8 key channels of each half of 64 have two bits more."""
    levels = torch.full((1, 64 if side is Side.K else 1), 2.0 ** int(registry[name].bits), dtype=torch.float64)
    if side is Side.K:
        levels[:, 24:32] *= 4
        levels[:, 56:64] *= 4
    return levels


@SETTINGS
@given(lo=FLOATS, width=st.floats(0, 60000, width=32), levels=st.sampled_from([4, 8, 16, 256]))
def test_fit_covers_the_range(lo: float, width: float, levels: int) -> None:
    low, high = torch.tensor([lo]), torch.tensor([lo]) + width
    scale, zero = affine.fit(low, high, levels)
    assert bool(torch.isfinite(scale).all() & torch.isfinite(zero).all() & (scale >= 0).all())
    top = zero.float() + scale.float() * (levels - 1)
    assert float((top - high).abs()) <= 2.0**-10 * (width + abs(lo)) + 1e-4


@SETTINGS
@given(x=SLABS)
def test_halving_mean_is_the_mean(x: Tensor) -> None:
    expected = x.double().mean(0, keepdim=True)
    assert torch.allclose(halving_mean(x, 0).double(), expected, atol=float(x.abs().max()) * 1e-5 + 1e-30)
    odd = x[:37]
    assert torch.allclose(
        halving_mean(odd, 0).double(), odd.double().mean(0, keepdim=True), atol=float(odd.abs().max()) * 1e-5 + 1e-30
    )
