"""Saturation is counted element by element, however fast a codec sees that there is none."""

from __future__ import annotations

from dataclasses import replace

import pytest

pytest.importorskip("torch")

import torch

from kvarto.codecs import registry
from kvarto.codecs.fp8 import Fp8
from kvarto.layout import Side


@pytest.mark.parametrize(
    ("name", "limit"),
    [
        ("fp16", 65504),
        ("fp8", 448),
        ("fp8_e5m2", 57344),
        ("int8", 65504),
        ("kivi2", 65504),
        ("int4", 65504),
        ("turbo3", 65504),
    ],
)
def test_elements_beyond_the_range(name: str, limit: float) -> None:
    x = torch.randn(2, 64, 32)
    assert registry[name].saturated(x, Side.K) == 0
    x[0, 3, 5], x[1, 7, 9], x[1, 8, 9] = limit * 1.01, -limit * 3, limit
    assert registry[name].saturated(x, Side.K) == 2


def test_each_head_by_its_own_scale() -> None:
    codec = registry["fp8-head"]
    assert isinstance(codec, Fp8)
    codec, x = replace(codec, scales=(1.0, 4.0)), torch.zeros(2, 64, 32)
    x[0, 0, 0] = x[1, 0, 0] = 500.0
    assert codec.saturated(x, Side.K) == 1


def test_values_that_are_rotated_before_they_are_clamped() -> None:
    codec, x = registry["int4"], torch.zeros(1, 64, 64)
    x[0, 0, 0] = 100_000.0  # spread over the channels it is 12,500
    assert codec.saturated(x, Side.V) == 0
    x[0, 0, 0] = 600_000.0
    assert codec.saturated(x, Side.V) == 64
    assert codec.saturated(x, Side.K) == 1
