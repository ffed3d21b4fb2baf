"""What PagedKV refuses, each by name, with nothing changed."""

from __future__ import annotations

import pytest

pytest.importorskip("torch")

import dataclasses

import torch
from torch import Tensor

from kvarto.attention import LayerSpec, PagedKV
from kvarto.codecs import registry
from kvarto.errors import ShapeError, UsageError
from kvarto.formats import Format, Policy
from kvarto.layout import Geometry, Side

GEOMETRY = Geometry(heads=2, k_dim=64, v_dim=64)


def cache(policy: str | Policy = "int4", dtype: torch.dtype = torch.float32) -> PagedKV:
    return PagedKV([LayerSpec(GEOMETRY)], policy, dtype=dtype)


def tokens(count: int, rows: int = 2) -> Tensor:
    return torch.randn(rows, 2, count, 64, generator=torch.Generator().manual_seed(0))


@pytest.mark.parametrize(
    "shape", [(2, 4, 9, 64), (2, 4, 11, 64), (2, 4, 10, 32), (2, 3, 10, 64), (3, 4, 10, 64), (2, 0, 10, 64)]
)
def test_queries_must_be_those_of_the_tokens_appended(shape: tuple[int, ...]) -> None:
    kv = cache()
    kv.append(0, tokens(10), tokens(10))
    with pytest.raises(ShapeError, match="q: expected"):
        kv.attend(0, torch.randn(shape), scale=0.1)
    assert kv.attend(0, torch.randn(2, 4, 10, 64), scale=0.1).shape == (2, 4, 10, 64)


def test_tokens_attend_once_and_only_before_anything_else_happens() -> None:
    kv, q = cache(), torch.randn(2, 4, 10, 64)
    with pytest.raises(UsageError, match="attend: expected an append"):
        kv.attend(0, q, scale=0.1)
    kv.append(0, tokens(10), tokens(10))
    kv.attend(0, q, scale=0.1)
    with pytest.raises(UsageError, match="attend: expected an append"):
        kv.attend(0, q, scale=0.1)
    for change in (lambda: kv.crop(3), lambda: kv.reorder([1, 0])):
        kv.append(0, tokens(10), tokens(10))
        change()
        with pytest.raises(UsageError, match="attend: expected an append"):
            kv.attend(0, q, scale=0.1)


def test_wrong_dtype_is_refused_not_converted() -> None:
    kv = cache(dtype=torch.float16)
    with pytest.raises(ShapeError, match="k: expected the dtype of this cache, torch.float16, got torch.float32"):
        kv.append(0, tokens(4), tokens(4))


@pytest.mark.parametrize(
    "valid",
    [torch.ones(2, 9, dtype=torch.bool), torch.ones(3, 10, dtype=torch.bool), torch.ones(2, 10, dtype=torch.int64)],
)
def test_valid_must_be_bool_of_the_right_shape(valid: Tensor) -> None:
    with pytest.raises(ShapeError, match="valid: expected bool"):
        cache().append(0, tokens(10), tokens(10), valid)


def test_edges() -> None:
    kv = cache()
    with pytest.raises(UsageError, match="tokens: expected 0 or more"):
        kv.crop(-5)
    with pytest.raises(ShapeError, match="at least one sequence"):
        kv.append(0, tokens(3)[:0], tokens(3)[:0])
    assert kv.extend(0, torch.randn(2, 4, 0, 64), tokens(0), tokens(0), scale=0.1).shape == (2, 4, 0, 64)
    kv.extend(0, torch.randn(2, 4, 5, 64), tokens(5), tokens(5), scale=0.1)
    assert kv.extend(0, torch.randn(2, 4, 0, 64), tokens(0), tokens(0), scale=0.1).shape == (2, 4, 0, 64)
    with pytest.raises(UsageError, match="rows: expected sequences 0 to 1, got 5"):
        kv.reorder([0, 5])
    with pytest.raises(UsageError, match="sliding_tokens"):
        LayerSpec(GEOMETRY, sliding_tokens=0)
    with pytest.raises(UsageError, match="device"):
        PagedKV([LayerSpec(GEOMETRY)], "int4", dtype=torch.float32, device="gpu")


def test_sink_and_window_must_fit_the_page() -> None:
    large = LayerSpec(Geometry(1, 64, 64, page_tokens=128))
    with pytest.raises(
        UsageError, match=r"window of int4.sink128.window192: expected a multiple of this cache's pages of 128 tokens"
    ):
        PagedKV([large], "int4+sink128+window192", dtype=torch.float32)
    PagedKV([large], "int4+sink128+window256", dtype=torch.float32)


def test_calibrated_fp8_scales_for_each_head() -> None:
    codec = dataclasses.replace(registry["fp8-head"], scales=(1.0, 10.0))
    layout = codec.layout(Side.K, 64, 64)
    x = torch.full((1, 2, 64, 64), 2000.0)
    decoded = codec.decode(codec.encode(x, layout), layout)
    assert float(decoded[0, 0].max()) == 448.0
    assert float((decoded[0, 1] - 2000.0).abs().max()) < 2000.0 / 16
    assert codec.saturated(x, Side.K) == 64 * 64
    with pytest.raises(ShapeError, match="one for each of 3 KV heads"):
        codec.encode(x[:, :1].expand(1, 3, 64, 64), layout)
    with pytest.raises(UsageError, match="use fp8-head"):
        dataclasses.replace(registry["fp8"], scales=(1.0, 2.0))
    with pytest.raises(UsageError, match="positive finite"):
        dataclasses.replace(registry["fp8"], scales=(0.0,))
    PagedKV([LayerSpec(GEOMETRY)], Policy(Format(codec, codec)), dtype=torch.float32)


def test_huge_but_finite_values_are_clamped_and_counted_never_spread() -> None:
    for name in ("int4", "int8", "kivi4"):
        for side in Side:
            codec, x = registry[name], torch.full((1, 64, 64), 3e38)
            x[0, ::2] = -3e38
            layout = codec.layout(side, 64, 64)
            assert bool(torch.isfinite(codec.decode(codec.encode(x, layout), layout)).all())
            assert codec.saturated(x, side) > 0


@pytest.mark.parametrize("name", ["int8", "int4", "kivi4"])
def test_small_values_keep_their_accuracy(name: str) -> None:
    x = torch.randn(1, 64, 64, generator=torch.Generator().manual_seed(0)) * 1e-4
    codec, layout = registry[name], registry[name].layout(Side.V, 64, 64)
    error = codec.decode(codec.encode(x, layout), layout) - x
    assert float(error.square().mean() / x.square().mean()) < {"int8": 1e-3, "int4": 0.02, "kivi4": 0.02}[name]
