"""The CPU's sealing writes the bytes of `Codec.encode`, whatever is around a slab, on any number of threads."""

from __future__ import annotations

from dataclasses import replace

import pytest

pytest.importorskip("torch")
pytest.importorskip("numba")

import torch
from hypothesis import given, settings
from hypothesis import strategies as st
from sealing_cases import FEW, KINDS, POISON, RAW, Case, assert_same, case, check, every_tie_of_float8

from kvarto.binding import BoundCodec, choose_sealer
from kvarto.codecs import registry
from kvarto.codecs.fp8 import Fp8
from kvarto.kernels import numba_seal
from kvarto.layout import Geometry, Side

SEALED = [name for name in registry if not name.startswith(("turbo", "kvquant"))]


@pytest.mark.parametrize("name", SEALED)
def test_every_codec_that_says_how_it_seals_is_sealed_here(name: str) -> None:
    made = case(registry[name], registry[name], Geometry(2, 64, 64), FEW)
    k, v = (BoundCodec(registry[name], made.layout.slab(side)) for side in Side)
    assert choose_sealer(made.raw_layout, made.layout, k, v, "cpu") is not None


@pytest.mark.parametrize("dim", [64, 128, *(pytest.param(dim, marks=pytest.mark.slow) for dim in (80, 96, 256))])
@pytest.mark.parametrize("name", SEALED)
def test_bytes_are_those_of_the_codec(name: str, dim: int) -> None:
    check(case(registry[name], registry[name], Geometry(2, dim, dim)), numba_seal, "cpu")


@given(data=st.data())
@settings(max_examples=60, deadline=None)
def test_any_shape_any_numbers(data: st.DataObject) -> None:
    tokens = data.draw(st.sampled_from([32, 64, 96, 128]))
    geometry = Geometry(
        data.draw(st.sampled_from([1, 2])),
        *(data.draw(st.sampled_from([24, 40, 64, 72, 112, 192])) for _ in Side),
        tokens,
    )
    k, v = (registry[data.draw(st.sampled_from(SEALED))] for _ in Side)
    for side, codec in zip(Side, (k, v), strict=True):
        if codec.refuses(side, tokens, geometry.dim(side)):
            return
    raw, seed = data.draw(st.sampled_from(sorted(RAW))), data.draw(st.integers(0, 2**31))
    made = case(k, v, geometry, data.draw(st.permutations(KINDS))[:4], raw=raw, seed=seed)
    far = data.draw(st.sampled_from([1.0, 1e-3, 1e5])) if raw == "fp32" else 1.0
    check(replace(made, k=made.k * far, v=made.v * far), numba_seal, "cpu")


def test_scales_that_were_calibrated() -> None:
    scaled = registry["fp8-head"]
    assert isinstance(scaled, Fp8)
    two = replace(scaled, scales=(0.3, 7.0))
    check(case(two, registry["int4"], Geometry(2, 64, 80), FEW), numba_seal, "cpu")
    check(case(replace(scaled, scales=(0.1,)), two, Geometry(2, 64, 64), FEW), numba_seal, "cpu")


@pytest.mark.parametrize("name", ["fp8", "fp8_e5m2"])
def test_every_tie_of_float8(name: str) -> None:
    codec = registry[name]
    assert isinstance(codec, Fp8)
    check(every_tie_of_float8(codec), numba_seal, "cpu")


def test_ties_of_float16_and_its_subnormals() -> None:
    """All numbers halfway between two of float16, and their neighbours, as the numbers of a raw page."""
    halves = torch.arange(0x7C00, dtype=torch.int16).view(torch.float16).float()
    middles = (halves[1:] + halves[:-1]) / 2
    numbers = torch.cat([middles, middles.nextafter(torch.tensor(0.0)), middles.nextafter(torch.tensor(torch.inf))])
    pages = -(-len(numbers) // (64 * 64))
    x = torch.zeros(pages * 64 * 64)
    x[: len(numbers)] = numbers
    x = x.view(pages, 1, 64, 64)
    check(Case(registry["fp16"], registry["fp16"], Geometry(1, 64, 64), "fp32", x, -x), numba_seal, "cpu")


@pytest.mark.parametrize("threads", [1, 2, 5])
def test_threads_do_not_matter(threads: int) -> None:
    before = torch.get_num_threads()
    torch.set_num_threads(threads)
    try:
        check(case(registry["int4"], registry["int8"], Geometry(2, 64, 64)), numba_seal, "cpu")
    finally:
        torch.set_num_threads(before)


def test_no_pages_and_no_counter() -> None:
    made = case(registry["int8"], registry["int8"], Geometry(1, 64, 64), FEW)
    sealed = torch.full((4, made.layout.nbytes), POISON, dtype=torch.uint8)
    none = torch.zeros(0, dtype=torch.int32)
    made.seal(numba_seal, made.raw_pages, none, sealed, none, None)
    assert bool((sealed == POISON).all())
    ids = torch.arange(4, dtype=torch.int32)
    made.seal(numba_seal, made.raw_pages, ids, sealed, ids, None)
    assert_same(made, sealed, made.pages)


def test_refusals_say_why() -> None:
    def reason(name: str, geometry: Geometry, raw: str = "bf16") -> str | None:
        made = Case(registry[name], registry[name], geometry, raw, torch.empty(0), torch.empty(0))
        return numba_seal.supports(made.raw_layout, made.layout, *made.sealings, "cpu").reason

    assert reason("int4", Geometry(1, 64, 64)) is None
    assert reason("turbo4", Geometry(1, 64, 64)) == "K: the codec does not say how it seals (Codec.sealing)"
    assert reason("int8", Geometry(1, 64, 64), raw="int8") == "K: the raw pages are not of a raw codec"
    three = replace(registry["fp8-head"], scales=(1.0, 2.0, 3.0))
    made = Case(registry["int8"], three, Geometry(2, 64, 64), "bf16", torch.empty(0), torch.empty(0))
    assert (
        numba_seal.supports(made.raw_layout, made.layout, *made.sealings, "cpu").reason == "V: 3 scales for 2 KV heads"
    )
    assert (
        numba_seal.supports(made.raw_layout, made.layout, *made.sealings, "cuda").reason
        == "it runs on the CPU, not on cuda"
    )
