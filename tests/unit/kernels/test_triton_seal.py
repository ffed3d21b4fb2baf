"""The GPU's sealing writes the bytes of `Codec.encode`. Without a GPU the kernel runs in Triton's interpreter (tests/conftest.py)."""

from __future__ import annotations

from dataclasses import replace

import pytest

pytest.importorskip("torch")
pytest.importorskip("triton")

import torch
from sealing_cases import FEW, POISON, Case, assert_same, case, check, every_tie_of_float8

from kvarto.codecs import registry
from kvarto.codecs.fp8 import Fp8
from kvarto.kernels import triton_seal
from kvarto.layout import Geometry, Side
from kvarto.testing import specimen

DEVICE = "cuda" if torch.cuda.is_available() else "cpu"
gpu = pytest.mark.skipif(DEVICE == "cpu", reason="needs a GPU")


@pytest.mark.parametrize("dim", [64, 128])
@pytest.mark.parametrize("name", [name for name in registry if not name.startswith(("turbo", "kvquant"))])
def test_bytes_are_those_of_the_codec(name: str, dim: int) -> None:
    check(case(registry[name], registry[name], Geometry(2, dim, dim)), triton_seal, DEVICE)


@pytest.mark.parametrize(
    ("name", "geometry"),
    [
        ("int4", Geometry(1, 80, 80)),
        ("int4", Geometry(1, 96, 112)),
        ("int3", Geometry(1, 192, 96)),
        ("int4", Geometry(1, 256, 256)),
        ("int2", Geometry(1, 64, 128, 32)),
        ("int4", Geometry(1, 128, 64, 128)),
        ("kivi4", Geometry(1, 80, 72)),
        ("kivi2", Geometry(1, 128, 96, 128)),
        ("int8", Geometry(1, 72, 96)),
        ("fp8-token", Geometry(1, 80, 80)),
        ("fp8", Geometry(1, 256, 96)),
        ("bf16", Geometry(1, 72, 80)),
    ],
)
def test_other_geometries(name: str, geometry: Geometry) -> None:
    check(case(registry[name], registry[name], geometry, FEW), triton_seal, DEVICE)


@pytest.mark.parametrize("raw", ["fp16", "fp32"])
@pytest.mark.parametrize("name", ["int4", "int8", "kivi2", "fp8", "fp8_e5m2-token", "bf16", "fp16"])
def test_other_raw_dtypes(name: str, raw: str) -> None:
    made = case(registry[name], registry[name], Geometry(1, 64, 64), FEW, raw=raw)
    far = 1e5 if raw == "fp32" else 1.0
    check(replace(made, k=made.k * far, v=made.v * far), triton_seal, DEVICE)


def test_sides_of_different_codecs_and_calibrated_scales() -> None:
    scaled = registry["fp8-head"]
    assert isinstance(scaled, Fp8)
    two = replace(scaled, scales=(0.3, 7.0))
    check(case(two, registry["int4"], Geometry(2, 64, 80), FEW), triton_seal, DEVICE)
    check(case(registry["kivi2"], two, Geometry(2, 64, 64), FEW), triton_seal, DEVICE)
    check(case(replace(scaled, scales=(0.1,)), two, Geometry(2, 64, 64), FEW), triton_seal, DEVICE)


@pytest.mark.parametrize("name", ["fp8", "fp8_e5m2"])
def test_every_tie_of_float8(name: str) -> None:
    codec = registry[name]
    assert isinstance(codec, Fp8)
    check(every_tie_of_float8(codec), triton_seal, DEVICE)


def test_no_pages_and_no_counter() -> None:
    made = case(registry["int8"], registry["int8"], Geometry(1, 64, 64), FEW)
    sealed = torch.full((4, made.layout.nbytes), POISON, dtype=torch.uint8, device=DEVICE)
    none = torch.zeros(0, dtype=torch.int32, device=DEVICE)
    made.seal(triton_seal, made.raw_pages.to(DEVICE), none, sealed, none, None)
    assert bool((sealed == POISON).all())
    ids = torch.arange(4, dtype=torch.int32, device=DEVICE)
    made.seal(triton_seal, made.raw_pages.to(DEVICE), ids, sealed, ids, None)
    assert_same(made, sealed.cpu(), made.pages)


def test_refusals_say_why() -> None:
    def reason(name: str, geometry: Geometry, raw: str = "bf16") -> str | None:
        made = Case(registry[name], registry[name], geometry, raw, torch.empty(0), torch.empty(0))
        return triton_seal.supports(made.raw_layout, made.layout, *made.sealings, DEVICE).reason

    assert reason("int4", Geometry(1, 64, 64)) is None
    assert reason("int4", Geometry(1, 64, 64, 96)) == "K: a page of 96 tokens is not a power of two"
    assert reason("int4", Geometry(1, 72, 64)) is None
    assert reason("int8", Geometry(1, 64, 1024)) == "V: a slab of 1024 x 64 is more than 32768 numbers"
    assert reason("int8", Geometry(1, 64, 64), raw="int8") == "K: the raw pages are not of a raw codec"
    three = replace(registry["fp8-head"], scales=(1.0, 2.0, 3.0))
    made = Case(registry["int8"], three, Geometry(2, 64, 64), "bf16", torch.empty(0), torch.empty(0))
    support = triton_seal.supports(made.raw_layout, made.layout, *made.sealings, DEVICE)
    assert support.reason == "V: 3 scales for 2 KV heads"
    support = triton_seal.supports(made.raw_layout, made.layout, None, None, DEVICE)
    assert support.reason == "K: the codec does not say how it seals (Codec.sealing)"


@gpu
@pytest.mark.parametrize("name", list(registry))
def test_the_reference_gives_the_same_bytes_on_a_gpu(name: str) -> None:
    odd = Geometry(2, 96, 80)
    k, v = (specimen(registry[name], side, odd.dim(side)) for side in Side)
    if any(codec.refuses(side, odd.page_tokens, odd.dim(side)) for side, codec in zip(Side, (k, v), strict=True)):
        odd = Geometry(2, 128, 64)
        k, v = (specimen(registry[name], side, odd.dim(side)) for side in Side)
    made = case(k, v, odd)
    there = replace(made, k=made.k.cuda(), v=made.v.cuda())
    assert_same(made, there.pages.cpu(), made.pages)


@gpu
def test_stores_beyond_two_gibibytes() -> None:
    made = case(registry["int4"], registry["int4"], Geometry(2, 128, 128), FEW)
    n = len(made.k)
    rows, raw_rows = (2**31 // layout.nbytes + 100 for layout in (made.layout, made.raw_layout))
    raw_pages = torch.empty((raw_rows, made.raw_layout.nbytes), dtype=torch.uint8, device=DEVICE)
    sealed = torch.empty((rows, made.layout.nbytes), dtype=torch.uint8, device=DEVICE)
    raw_pages[-n:] = made.raw_pages.to(DEVICE)
    first = torch.arange(n, dtype=torch.int32, device=DEVICE)
    made.seal(triton_seal, raw_pages, first + raw_rows - n, sealed, first + rows - n, None)
    assert_same(made, sealed[-n:].cpu(), made.pages)


@gpu
def test_a_graph_seals_what_the_ids_name_when_it_is_replayed() -> None:
    made = case(registry["fp8"], registry["int4"], Geometry(2, 128, 128), FEW)
    n, raw_pages = len(made.k), made.raw_pages.to(DEVICE)
    sealed = torch.full((n, made.layout.nbytes), POISON, dtype=torch.uint8, device=DEVICE)
    saturated = torch.zeros(1, dtype=torch.int64, device=DEVICE)
    raw_ids = torch.arange(n, dtype=torch.int32, device=DEVICE)
    ids = torch.full((n,), -1, dtype=torch.int32, device=DEVICE)
    made.seal(triton_seal, raw_pages, raw_ids, sealed, ids, saturated)
    graph = torch.cuda.CUDAGraph()
    with torch.cuda.graph(graph):
        made.seal(triton_seal, raw_pages, raw_ids, sealed, ids, saturated)
    graph.replay()
    assert bool((sealed == POISON).all())
    ids.copy_(torch.arange(n))
    graph.replay()
    assert_same(made, sealed.cpu(), made.pages)
    assert int(saturated) == made.saturated
