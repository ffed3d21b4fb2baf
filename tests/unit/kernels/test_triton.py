"""The GPU kernel against the reference. Without a GPU its programs run in Triton's interpreter (tests/conftest.py), so cases are few and small.

What may not be read is poison: pages that the rule hides from every query are not in the table and hold 0xFF bytes, unfilled slots hold NaN.

**Tolerances**, for `out` relative to the row (one token, one head) in the 2-norm. Tensor cores take float16 operands, which carry 11 bits, and add
in float32. An operand's rounding is at most 2^-11 = 4.9e-4 of it, its root mean square a third of that; q, its product with a scale of keys, and p
times a scale of values are rounded, codes are not. Rounding a query moves a score by about 2^-12 |q| |k| / sqrt(D), which is 2.4e-4 for normal
numbers, and p by the same share. Four such units are the bound: 2e-3. bfloat16 has 8 bits, and half a unit is 2^-8 = 3.9e-3: 6e-3 where pages are
bfloat16, since p is rounded to it for each page, where errors of many tokens mostly cancel. `lse` is a weighted mean of such errors of scores: 5e-3.
"""

from __future__ import annotations

import warnings
from collections.abc import Callable, Iterator, Sequence
from contextlib import contextmanager
from dataclasses import dataclass, replace

import pytest

pytest.importorskip("torch")
pytest.importorskip("triton")

import torch
from torch import Tensor

from kvarto.binding import BoundCodec
from kvarto.codecs import registry
from kvarto.codecs.base import Codec
from kvarto.formats import parse_format
from kvarto.kernels import triton as host
from kvarto.kernels.base import PageSet, Partial, Queries, Rule
from kvarto.kernels.reference import ReferenceKernel
from kvarto.kernels.triton import TritonKernel
from kvarto.layout import Geometry, PageLayout, Side

DEVICE = "cuda" if torch.cuda.is_available() else "cpu"
gpu = pytest.mark.skipif(DEVICE == "cpu", reason="needs a GPU")
LENGTHS = (1, 63, 64, 65, 200)
SMALL = Geometry(1, 64, 64)
OUT_TOLERANCE, OUT_TOLERANCE_BFLOAT16, LSE_TOLERANCE = 2e-3, 6e-3, 5e-3
POISON = 0xFF


@dataclass(frozen=True)
class Case:
    """A ragged batch on the CPU, and the sets that it reads."""

    queries: Queries
    sets: tuple[PageSet, ...]
    rule: Rule
    softcap: float | None = None
    sinks: Tensor | None = None

    def attend(self, kernel: type[TritonKernel] | type[ReferenceKernel] = TritonKernel) -> Partial:
        """What a kernel says, on the CPU; Triton's computes on DEVICE."""
        device = "cpu" if kernel is ReferenceKernel else DEVICE
        queries = Queries(
            _to(self.queries.q, device), self.queries.start.to(device), self.queries.position.to(device),
            self.queries.longest,
        )  # fmt: skip
        sets = [replace(pages, pages=_to(pages.pages, device), table=_to(pages.table, device)) for pages in self.sets]
        scale, sinks = float(queries.q.shape[-1] ** -0.5), None if self.sinks is None else self.sinks.to(device)
        partial = kernel().attend(queries, sets, self.rule, scale=scale, softcap=self.softcap, sinks=sinks)
        return Partial(partial.out.cpu(), partial.lse.cpu())

    def check(self) -> None:
        """The kernel takes the sets, and agrees with the reference."""
        for pages in self.sets:
            support = TritonKernel().supports(pages.layout, pages.k, pages.v, DEVICE)
            assert support, support.reason
        got, expected = self.attend(), self.attend(ReferenceKernel)
        assert got.out.shape == expected.out.shape
        assert got.out.dtype == got.lse.dtype == torch.float32
        assert torch.equal(got.lse == -torch.inf, expected.lse == -torch.inf)
        seen = expected.lse > -torch.inf
        assert not got.out[~seen].any()
        lse_error = (got.lse - expected.lse)[seen].abs()
        size = expected.out[seen].norm(dim=-1)
        out_error = (got.out - expected.out)[seen].norm(dim=-1) / size
        import os
        if os.environ.get("REPORT"): print("REPORT", os.environ.get("PYTEST_CURRENT_TEST"), float(out_error.max()), float(lse_error.max()))
        assert bool((lse_error <= LSE_TOLERANCE).all()), f"lse is off by {float(lse_error.max()):.1e}"
        assert bool((out_error <= self.tolerance).all()), f"out is off by {float(out_error.max()):.1e}"

    @property
    def tolerance(self) -> float:
        bfloat16 = any(reader.codec.name == "bf16" for pages in self.sets for reader in (pages.k, pages.v))  # type: ignore[attr-defined]
        return OUT_TOLERANCE_BFLOAT16 if bfloat16 else OUT_TOLERANCE

    def row(self, b: int) -> Case:
        """Sequence b alone."""
        first, end = self.queries.start[b : b + 2].tolist()
        start, position = torch.tensor([0, end - first]).int(), self.queries.position[b : b + 1]
        queries = Queries(self.queries.q[first:end], start, position, end - first)
        sets = tuple(replace(pages, table=pages.table[b : b + 1]) for pages in self.sets)
        return replace(self, queries=queries, sets=sets)


def _to(x: Tensor, device: str) -> Tensor:
    """On the device with the same strides: `Tensor.to` makes what is not dense contiguous."""
    if device == "cpu":
        return x
    span = 1 + sum((size - 1) * stride for size, stride in zip(x.shape, x.stride(), strict=True)) if x.numel() else 0
    return x.as_strided((span,), (1,)).to(device).as_strided(x.shape, x.stride(), 0)


def case(
    packed: str | None,
    raw: str | None,
    geometry: Geometry,
    lengths: Sequence[int] = LENGTHS,
    counts: Sequence[int] | None = None,
    *,
    R: int = 4,
    rule: Rule | None = None,
    dtype: torch.dtype = torch.float32,
    keys: Callable[[Tensor], Tensor] = lambda k: k,
    values: Callable[[Tensor], Tensor] = lambda v: v,
    **options: object,
) -> Case:
    """Sequences of `lengths` tokens, of which the last `counts` (1 each) are the queries. `keys` and `values` change random ones [pages, S, Hkv, D]."""
    generator = torch.Generator().manual_seed(sum(lengths) + geometry.k_dim)
    counts = counts or [1] * len(lengths)
    rule = rule or Rule(geometry.page_tokens)
    S, heads = geometry.page_tokens, geometry.heads

    def randn(*shape: int) -> Tensor:
        return torch.randn(*shape, generator=generator)

    numbers = [
        [change(randn(geometry.pages_for(n), S, heads, dim)) for change, dim in ((keys, geometry.k_dim), (values, geometry.v_dim))]
        for n in lengths
    ]
    sets = tuple(
        _page_set(text, geometry, numbers, lengths, counts, rule, is_raw, generator)
        for text, is_raw in ((packed, False), (raw, True))
        if text is not None
    )
    q = randn(sum(counts), heads * R, geometry.k_dim).to(dtype)
    start = torch.tensor([0, *counts]).cumsum(0).int()
    position = torch.tensor([length - count for length, count in zip(lengths, counts, strict=True)]).int()
    return Case(Queries(q, start, position, max(counts)), sets, rule, **options)  # type: ignore[arg-type]


def _page_set(
    text: str, geometry: Geometry, numbers: list[list[Tensor]], lengths: Sequence[int], counts: Sequence[int],
    rule: Rule, is_raw: bool, generator: torch.Generator,
) -> PageSet:  # fmt: skip
    """The pages that some query reads in this form, anywhere in a store; all else is poison."""
    chosen = parse_format(text)
    layout = chosen.layout(geometry)
    k_codec, v_codec = BoundCodec(chosen.k, layout.k), BoundCodec(chosen.v, layout.v)
    spots = iter(torch.randperm(sum(map(geometry.pages_for, lengths)) + 3, generator=generator).tolist())
    pool = torch.full((sum(map(geometry.pages_for, lengths)) + 3, layout.nbytes), POISON, dtype=torch.uint8)
    table = torch.full((len(lengths), geometry.pages_for(max(lengths)) + 2), -1, dtype=torch.int32)
    for b, ((k, v), length, count) in enumerate(zip(numbers, lengths, counts, strict=True)):
        for page in range(len(k)):
            if not _is_read(page, range(length - count, length), rule, is_raw):
                continue
            filled = length - page * geometry.page_tokens
            slabs = []
            for codec, x in ((k_codec, k[page].clone()), (v_codec, v[page].clone())):
                x[max(filled, 0) :] = torch.nan
                slabs.append(codec.encode(x.transpose(0, 1)))
            table[b, page] = next(spots)
            pool[table[b, page]] = torch.cat(slabs, dim=-1).flatten()
    return PageSet(pool, table, layout, k_codec, v_codec, is_raw)


def _is_read(page: int, query_tokens: range, rule: Rule, is_raw: bool) -> bool:
    S, sliding = rule.page_tokens, rule.sliding_tokens or 1 << 30
    return any(
        page * S <= t and (page + 1) * S - 1 > t - sliding and rule.reads_raw(page, t // S) == is_raw
        for t in query_tokens
    )
