"""Pages that are hard to seal, and the check that a sealer writes the bytes of `Codec.encode`, for the tests of each sealer."""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass
from types import ModuleType

import pytest
import torch
from torch import Tensor

from kvarto.codecs import Codec, registry
from kvarto.codecs.fp8 import Fp8
from kvarto.layout import Geometry, PageLayout, Side
from kvarto.sealing import Sealing

RAW = {"bf16": torch.bfloat16, "fp16": torch.float16, "fp32": torch.float32}
POISON = 0xA5
KINDS = ("normal", "constant", "zero", "minus zero", "mixed zeros", "tiny", "huge", "bias", "outlier", "ramp")
FEW = ("normal", "bias", "mixed zeros", "huge")


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

    def seal(
        self,
        sealer: ModuleType,
        raw_pages: Tensor,
        raw_ids: Tensor,
        sealed: Tensor,
        ids: Tensor,
        saturated: Tensor | None,
    ) -> None:
        k, v = self.sealings
        support = sealer.supports(self.raw_layout, self.layout, k, v, raw_pages.device.type)
        assert support, support.reason
        sealer.seal_pages(raw_pages, self.raw_layout, raw_ids, sealed, self.layout, ids, k, v, saturated)

    def _layout(self, k: Codec, v: Codec) -> PageLayout:
        S, geometry = self.geometry.page_tokens, self.geometry
        return PageLayout(geometry, k.layout(Side.K, S, geometry.k_dim), v.layout(Side.V, S, geometry.v_dim))

    def _encode(self, k_codec: Codec, v_codec: Codec, layout: PageLayout) -> Tensor:
        return torch.cat([k_codec.encode(self.k, layout.k), v_codec.encode(self.v, layout.v)], dim=-1).flatten(1)


def case(
    k: Codec, v: Codec, geometry: Geometry, kinds: Sequence[str] = KINDS, *, raw: str = "bf16", seed: int = 7
) -> Case:
    """A head of a page for each kind."""
    generator = torch.Generator().manual_seed(seed)

    def side(dim: int) -> Tensor:
        x = torch.stack([hard(kind, (geometry.page_tokens, dim), generator) for kind in kinds])
        return x.to(RAW[raw]).float().view(-1, geometry.heads, geometry.page_tokens, dim)

    return Case(k, v, geometry, raw, side(geometry.k_dim), side(geometry.v_dim))


def check(case: Case, sealer: ModuleType, device: str) -> None:
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
    got = sealed.to(device)
    saturated = torch.full((1,), 1000, dtype=torch.int64, device=device)
    case.seal(sealer, raw_pages.to(device), raw_ids.to(device), got, ids.to(device), saturated)
    assert_same(case, got.cpu(), expected)
    assert int(saturated) == 1000 + case.saturated


def assert_same(case: Case, got: Tensor, expected: Tensor) -> None:
    for row, byte in (got != expected).nonzero()[:1].tolist():
        head, at = divmod(byte, case.layout.pair_nbytes)
        slab, at = ("V", at - case.layout.k.nbytes) if at >= case.layout.k.nbytes else ("K", at)
        count = int((got != expected).sum())
        pytest.fail(f"{count} bytes differ, the first in row {row}, head {head}, byte {at} of the {slab} slab")


def every_tie_of_float8(codec: Fp8) -> Case:
    """Every code, every midpoint of neighbours, and the floats next to each."""
    kind = torch.float8_e4m3fn if codec.variant == "e4m3" else torch.float8_e5m2
    codes = torch.arange(128, dtype=torch.uint8).view(kind).float()
    codes = codes[codes.isfinite()]
    exact = torch.cat([codes, (codes[1:] + codes[:-1]) / 2, torch.tensor([codec.limit * 1.04, 1e30])])
    numbers = torch.cat([exact, exact.nextafter(torch.tensor(0.0)), exact.nextafter(torch.tensor(torch.inf))])
    x = torch.zeros(64 * 64)
    x[: 2 * len(numbers)] = torch.cat([numbers, -numbers])
    x = x.view(1, 1, 64, 64)
    return Case(codec, codec, Geometry(1, 64, 64), "fp32", x, x.flip(-1))
