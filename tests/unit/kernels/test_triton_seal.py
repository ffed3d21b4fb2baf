"""The GPU's sealing writes the bytes of `Codec.encode`. Without a GPU the kernel runs in Triton's interpreter (tests/conftest.py)."""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass, replace

import pytest

pytest.importorskip("torch")
pytest.importorskip("triton")

import torch
from torch import Tensor

from kvarto.codecs import Codec, registry
from kvarto.codecs.fp8 import Fp8
from kvarto.kernels import triton_seal
from kvarto.layout import Geometry, PageLayout, Side
from kvarto.sealing import Sealing
from kvarto.testing import specimen

DEVICE = "cuda" if torch.cuda.is_available() else "cpu"
RAW = {"bf16": torch.bfloat16, "fp16": torch.float16, "fp32": torch.float32}
POISON = 0xA5
KINDS = ("normal", "constant", "zero", "minus zero", "mixed zeros", "tiny", "huge", "bias", "outlier", "ramp")
FEW = ("normal", "bias", "mixed zeros", "huge")
gpu = pytest.mark.skipif(DEVICE == "cpu", reason="needs a GPU")


def hard(kind: str, shape: tuple[int, int], generator: torch.Generator) -> Tensor:
    """Numbers [S, D] that are hard to seal."""
    x = torch.randn(shape, generator=generator)
    rare = torch.rand(shape, generator=generator) < 0.01
    return {
        "normal": x,
        "constant": torch.full(shape, 3.1),
        "zero": torch.zeros(shape),
        "minus zero": torch.full(shape, -0.0),
        "mixed zeros": torch.where(x > 1, x, torch.where(x > 0, 0.0, -0.0)),
        "tiny": x * 1e-6,
        "huge": x * 1e4,
        "bias": x + 200 * (torch.arange(shape[1]) % 7 == 3),
        "outlier": torch.where(rare, x * 100, x),
        "ramp": torch.linspace(-0.5, 0.5, x.numel()).view(shape),
    }[kind]


@dataclass(frozen=True)
class Case:
    """Pages k [n, Hkv, S, Dk], v [n, Hkv, S, Dv] (float32, but numbers of the raw dtype) and how they are stored."""

    k_codec: Codec
    v_codec: Codec
    geometry: Geometry
    raw: str
    k: Tensor
    v: Tensor

    @property
    def layout(self) -> PageLayout:
        return self._layout(self.k_codec, self.v_codec)

    @property
    def raw_layout(self) -> PageLayout:
        return self._layout(registry[self.raw], registry[self.raw])

    @property
    def sealings(self) -> tuple[Sealing | None, Sealing | None]:
        return self.k_codec.sealing(self.layout.k), self.v_codec.sealing(self.layout.v)

    @property
    def raw_pages(self) -> Tensor:
        return self._encode(registry[self.raw], registry[self.raw], self.raw_layout)

    @property
    def pages(self) -> Tensor:
        return self._encode(self.k_codec, self.v_codec, self.layout)

    @property
    def saturated(self) -> int:
        return self.k_codec.saturated(self.k, Side.K) + self.v_codec.saturated(self.v, Side.V)

    def seal(self, raw_pages: Tensor, raw_ids: Tensor, sealed: Tensor, ids: Tensor, saturated: Tensor | None) -> None:
        k, v = self.sealings
        support = triton_seal.supports(self.raw_layout, self.layout, k, v, DEVICE)
        assert support, support.reason
        assert k is not None
        assert v is not None
        triton_seal.seal_pages(raw_pages, self.raw_layout, raw_ids, sealed, self.layout, ids, k, v, saturated)

    def _layout(self, k: Codec, v: Codec) -> PageLayout:
        S, geometry = self.geometry.page_tokens, self.geometry
        return PageLayout(geometry, k.layout(Side.K, S, geometry.k_dim), v.layout(Side.V, S, geometry.v_dim))

    def _encode(self, k_codec: Codec, v_codec: Codec, layout: PageLayout) -> Tensor:
        return torch.cat([k_codec.encode(self.k, layout.k), v_codec.encode(self.v, layout.v)], dim=-1).flatten(1)


def case(k: Codec, v: Codec, geometry: Geometry, kinds: Sequence[str] = KINDS, *, raw: str = "bf16") -> Case:
    """A head of a page for each kind."""
    generator = torch.Generator().manual_seed(7)

    def side(dim: int) -> Tensor:
        x = torch.stack([hard(kind, (geometry.page_tokens, dim), generator) for kind in kinds])
        return x.to(RAW[raw]).float().view(-1, geometry.heads, geometry.page_tokens, dim)

    return Case(k, v, geometry, raw, side(geometry.k_dim), side(geometry.v_dim))


def check(case: Case) -> None:
    """Scattered pages, and two that are skipped: just the rows named change, and to the bytes of the reference."""
    n, generator = len(case.k), torch.Generator().manual_seed(1)
    raw_rows, rows = torch.randperm(n + 3, generator=generator)[:n], torch.randperm(n + 4, generator=generator)[:n]
    raw_pages = torch.full((n + 3, case.raw_layout.nbytes), POISON, dtype=torch.uint8)
    raw_pages[raw_rows] = case.raw_pages
    sealed = torch.full((n + 4, case.layout.nbytes), POISON, dtype=torch.uint8)
    expected = sealed.clone()
    expected[rows] = case.pages
    # The raw id of a skipped page may be anything.
    raw_ids = torch.cat([raw_rows[:1], torch.tensor([-1]), raw_rows[1:], torch.tensor([2**30])]).int()
    ids = torch.cat([rows[:1], torch.tensor([-1]), rows[1:], torch.tensor([-5])]).int()
    got = sealed.to(DEVICE)
    saturated = torch.full((1,), 1000, dtype=torch.int64, device=DEVICE)
    case.seal(raw_pages.to(DEVICE), raw_ids.to(DEVICE), got, ids.to(DEVICE), saturated)
    assert_same(case, got.cpu(), expected)
    assert int(saturated) == 1000 + case.saturated


def assert_same(case: Case, got: Tensor, expected: Tensor) -> None:
    for row, byte in (got != expected).nonzero()[:1].tolist():
        head, at = divmod(byte, case.layout.pair_nbytes)
        slab, at = ("V", at - case.layout.k.nbytes) if at >= case.layout.k.nbytes else ("K", at)
        count = int((got != expected).sum())
        pytest.fail(f"{count} bytes differ, the first in row {row}, head {head}, byte {at} of the {slab} slab")


@pytest.mark.parametrize("dim", [64, 128])
@pytest.mark.parametrize("name", [name for name in registry if not name.startswith(("turbo", "kvquant"))])
def test_bytes_are_those_of_the_codec(name: str, dim: int) -> None:
    check(case(registry[name], registry[name], Geometry(2, dim, dim)))


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
    check(case(registry[name], registry[name], geometry, FEW))


@pytest.mark.parametrize("raw", ["fp16", "fp32"])
@pytest.mark.parametrize("name", ["int4", "int8", "kivi2", "fp8", "fp8_e5m2-token", "bf16", "fp16"])
def test_other_raw_dtypes(name: str, raw: str) -> None:
    made = case(registry[name], registry[name], Geometry(1, 64, 64), FEW, raw=raw)
    far = 1e5 if raw == "fp32" else 1.0
    check(replace(made, k=made.k * far, v=made.v * far))


def test_sides_of_different_codecs_and_calibrated_scales() -> None:
    scaled = registry["fp8-head"]
    assert isinstance(scaled, Fp8)
    two = replace(scaled, scales=(0.3, 7.0))
    check(case(two, registry["int4"], Geometry(2, 64, 80), FEW))
    check(case(registry["kivi2"], two, Geometry(2, 64, 64), FEW))
    check(case(replace(scaled, scales=(0.1,)), two, Geometry(2, 64, 64), FEW))


@pytest.mark.parametrize("name", ["fp8", "fp8_e5m2"])
def test_every_tie_of_float8(name: str) -> None:
    """Every code, every midpoint of neighbours, and the floats next to each."""
    codec = registry[name]
    assert isinstance(codec, Fp8)
    kind = torch.float8_e4m3fn if codec.variant == "e4m3" else torch.float8_e5m2
    codes = torch.arange(128, dtype=torch.uint8).view(kind).float()
    codes = codes[codes.isfinite()]
    exact = torch.cat([codes, (codes[1:] + codes[:-1]) / 2, torch.tensor([codec.limit * 1.04, 1e30])])
    numbers = torch.cat([exact, exact.nextafter(torch.tensor(0.0)), exact.nextafter(torch.tensor(torch.inf))])
    x = torch.zeros(64 * 64)
    x[: 2 * len(numbers)] = torch.cat([numbers, -numbers])
    x = x.view(1, 1, 64, 64)
    check(Case(codec, codec, Geometry(1, 64, 64), "fp32", x, x.flip(-1)))


def test_no_pages_and_no_counter() -> None:
    made = case(registry["int8"], registry["int8"], Geometry(1, 64, 64), FEW)
    sealed = torch.full((4, made.layout.nbytes), POISON, dtype=torch.uint8, device=DEVICE)
    none = torch.zeros(0, dtype=torch.int32, device=DEVICE)
    made.seal(made.raw_pages.to(DEVICE), none, sealed, none, None)
    assert bool((sealed == POISON).all())
    ids = torch.arange(4, dtype=torch.int32, device=DEVICE)
    made.seal(made.raw_pages.to(DEVICE), ids, sealed, ids, None)
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
    made.seal(raw_pages, first + raw_rows - n, sealed, first + rows - n, None)
    assert_same(made, sealed[-n:].cpu(), made.pages)


@gpu
def test_a_graph_seals_what_the_ids_name_when_it_is_replayed() -> None:
    made = case(registry["fp8"], registry["int4"], Geometry(2, 128, 128), FEW)
    n, raw_pages = len(made.k), made.raw_pages.to(DEVICE)
    sealed = torch.full((n, made.layout.nbytes), POISON, dtype=torch.uint8, device=DEVICE)
    saturated = torch.zeros(1, dtype=torch.int64, device=DEVICE)
    raw_ids = torch.arange(n, dtype=torch.int32, device=DEVICE)
    ids = torch.full((n,), -1, dtype=torch.int32, device=DEVICE)
    made.seal(raw_pages, raw_ids, sealed, ids, saturated)
    graph = torch.cuda.CUDAGraph()
    with torch.cuda.graph(graph):
        made.seal(raw_pages, raw_ids, sealed, ids, saturated)
    graph.replay()
    assert bool((sealed == POISON).all())
    ids.copy_(torch.arange(n))
    graph.replay()
    assert_same(made, sealed.cpu(), made.pages)
    assert int(saturated) == made.saturated
