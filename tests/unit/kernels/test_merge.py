"""Merging partials equals one softmax over all tokens; a kernel merges the sets it is given."""

from __future__ import annotations

from dataclasses import replace

import pytest

pytest.importorskip("torch")

import torch
from batches import assert_near, make
from torch import Tensor

from kvarto.kernels.base import Partial, merge
from kvarto.kernels.numba import NumbaKernel
from kvarto.kernels.reference import ReferenceKernel
from kvarto.layout import Geometry
from kvarto.rule import Rule

T, HEADS, TOKENS, DIM = 3, 4, 50, 8


def softmax_over(scores: Tensor, v: Tensor, sinks: Tensor | None = None) -> Partial:
    """scores [T, Hq, N], v [N, Dv]."""
    if sinks is not None:
        scores = torch.cat([scores, sinks[None, :, None].expand(T, HEADS, 1)], dim=-1)
        v = torch.cat([v, torch.zeros(1, DIM)])
    return Partial(torch.softmax(scores, dim=-1) @ v, torch.logsumexp(scores, dim=-1))


@pytest.fixture
def scores_and_values() -> tuple[Tensor, Tensor]:
    generator = torch.Generator().manual_seed(0)
    return torch.randn(T, HEADS, TOKENS, generator=generator) * 20, torch.randn(TOKENS, DIM, generator=generator)


def test_merge_is_exact(scores_and_values: tuple[Tensor, Tensor]) -> None:
    scores, v = scores_and_values
    pieces = [(0, 1), (1, 20), (20, 50)]
    merged = merge([softmax_over(scores[..., i:j], v[i:j]) for i, j in pieces])
    expected = softmax_over(scores, v)
    torch.testing.assert_close(merged.out, expected.out)
    torch.testing.assert_close(merged.lse, expected.lse)


def test_sinks_take_part_without_a_value(scores_and_values: tuple[Tensor, Tensor]) -> None:
    scores, v = scores_and_values
    sinks = torch.tensor([-100.0, 0.0, 30.0, 100.0])
    merged = merge([softmax_over(scores[..., :30], v[:30]), softmax_over(scores[..., 30:], v[30:])], sinks)
    expected = softmax_over(scores, v, sinks)
    torch.testing.assert_close(merged.out, expected.out)
    torch.testing.assert_close(merged.lse, expected.lse)


def test_empty_partials_do_not_matter(scores_and_values: tuple[Tensor, Tensor]) -> None:
    scores, v = scores_and_values
    full = softmax_over(scores, v)
    empty = Partial(torch.zeros_like(full.out), torch.full_like(full.lse, -torch.inf))
    merged = merge([empty, full, empty])
    torch.testing.assert_close(merged.out, full.out)
    torch.testing.assert_close(merged.lse, full.lse)
    nothing = merge([empty, empty])
    assert torch.equal(nothing.out, empty.out)
    assert torch.equal(nothing.lse, empty.lse)


def test_a_query_that_saw_only_a_sink_gives_zero() -> None:
    empty = Partial(torch.zeros(T, HEADS, DIM), torch.full((T, HEADS), -torch.inf))
    merged = merge([empty], torch.zeros(HEADS))
    assert torch.equal(merged.out, empty.out)
    assert torch.equal(merged.lse, torch.zeros(T, HEADS))


@pytest.mark.parametrize("kernel", [ReferenceKernel(), NumbaKernel()], ids=lambda kernel: kernel.name)
@pytest.mark.parametrize("dtype", [torch.float32, torch.bfloat16, torch.float16])
def test_a_kernel_merges_sets_and_sinks_and_takes_any_float(
    kernel: ReferenceKernel | NumbaKernel, dtype: torch.dtype
) -> None:
    if isinstance(kernel, NumbaKernel):
        pytest.importorskip("numba")
    rule, lengths, counts = Rule(64, window_pages=1), [300, 70], [40, 1]
    raw, packed = (
        make(text, Geometry(2, 64, 64), lengths, counts, raw=text == "fp32", rule=rule) for text in ("fp32", "int8")
    )
    q, sinks = raw.queries.q.to(dtype), torch.linspace(-3, 3, raw.queries.q.shape[1])
    sets = [raw.pages, replace(packed.pages, table=torch.nn.functional.pad(packed.pages.table, (0, 3), value=-1))]
    queries, single = replace(raw.queries, q=q), replace(raw.queries, q=q.float())
    got = kernel.attend(queries, sets, rule, scale=0.125, softcap=None, sinks=sinks)
    parts = [ReferenceKernel().attend(single, [pages], rule, scale=0.125, softcap=None) for pages in sets]
    assert_near(got, merge(parts, sinks))
    assert got.out.dtype == got.lse.dtype == torch.float32
