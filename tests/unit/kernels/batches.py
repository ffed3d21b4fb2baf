"""Ragged batches of pages and queries for kernel tests. What a kernel may not read is poisoned: unseen slots and pages hold NaN."""

from __future__ import annotations

from dataclasses import dataclass, replace

import torch
from torch import Tensor

from kvarto.binding import BoundCodec
from kvarto.formats import parse_format
from kvarto.kernels.base import PageSet, Partial, Queries
from kvarto.kernels.numba import NumbaKernel
from kvarto.kernels.reference import ReferenceKernel
from kvarto.layout import Geometry
from kvarto.rule import Rule
from kvarto.testing import specimen_format


@dataclass(frozen=True)
class Batch:
    """Sequences of `lengths` tokens, of which the last `counts` are the queries; all pages of each are in the set."""

    queries: Queries
    pages: PageSet
    rule: Rule

    def attend(self, softcap: float | None = None) -> Partial:
        return NumbaKernel().attend(self.queries, [self.pages], self.rule, scale=self.scale, softcap=softcap)

    def expected(self, softcap: float | None = None) -> Partial:
        return ReferenceKernel().attend(self.queries, [self.pages], self.rule, scale=self.scale, softcap=softcap)

    @property
    def scale(self) -> float:
        return float(self.queries.q.shape[-1] ** -0.5)

    def row(self, b: int) -> Batch:
        """Sequence b alone."""
        first, end = self.queries.start[b : b + 2].tolist()
        start = torch.tensor([0, end - first], dtype=torch.int32)
        queries = Queries(self.queries.q[first:end], start, self.queries.position[b : b + 1], end - first)
        return replace(self, queries=queries, pages=replace(self.pages, table=self.pages.table[b : b + 1]))


def make(
    text: str,
    geometry: Geometry,
    lengths: list[int],
    counts: list[int],
    *,
    R: int = 4,
    seed: int = 0,
    raw: bool = False,
    bias: float = 0.0,
    rule: Rule | None = None,
) -> Batch:
    """A batch in the format `text`; `bias` goes onto two channels of every key."""
    generator = torch.Generator().manual_seed(seed)

    def randn(*shape: int) -> Tensor:
        return torch.randn(*shape, generator=generator)

    S, chosen = geometry.page_tokens, specimen_format(parse_format(text), geometry.k_dim, geometry.v_dim)
    layout = chosen.layout(geometry)
    k_codec, v_codec = BoundCodec(chosen.k, layout.k), BoundCodec(chosen.v, layout.v)
    width = max(geometry.pages_for(length) for length in lengths)
    used = sum(geometry.pages_for(length) for length in lengths)
    spots = torch.randperm(used + 3, generator=generator)  # Three pages belong to nobody.
    pool = torch.full((used + 3, layout.nbytes), 0xFF, dtype=torch.uint8)
    table = torch.full((len(lengths), width), -1, dtype=torch.int32)
    taken = 0
    for b, length in enumerate(lengths):
        count = geometry.pages_for(length)
        k, v = randn(count * S, geometry.heads, geometry.k_dim), randn(count * S, geometry.heads, geometry.v_dim)
        k[..., 3] += bias
        k[..., geometry.k_dim // 2 + 3] -= bias
        if raw and text in ("bf16", "fp16", "fp32"):  # Other formats share terms among tokens, and are never raw.
            k[length:], v[length:] = torch.nan, torch.nan
        slabs = [codec.encode(x.unflatten(0, (count, S)).transpose(1, 2)) for codec, x in ((k_codec, k), (v_codec, v))]
        ids = spots[taken : taken + count]
        pool[ids] = torch.cat(slabs, dim=-1).flatten(1)
        table[b, :count] = ids.int()
        taken += count
    q = randn(sum(counts), geometry.heads * R, geometry.k_dim)
    q[..., 3] *= 0.1
    q[..., geometry.k_dim // 2 + 3] *= 0.1
    start = torch.tensor([0, *counts]).cumsum(0).int()
    position = torch.tensor([length - count for length, count in zip(lengths, counts, strict=True)]).int()
    pages = PageSet(pool, table, layout, k_codec, v_codec, raw)
    return Batch(Queries(q, start, position, max(counts)), pages, rule or Rule(S))


def assert_near(got: Partial, expected: Partial, tolerance: float = 2e-5) -> None:
    """Float rounding only, relative to the size of the values."""
    assert torch.equal(torch.isinf(got.lse), torch.isinf(expected.lse))
    torch.testing.assert_close(got.lse, expected.lse, rtol=tolerance, atol=tolerance)
    size = float(expected.out.abs().max())
    torch.testing.assert_close(got.out, expected.out, rtol=0.0, atol=tolerance * max(size, 1e-3))
