"""Merging partials equals one softmax over all tokens."""

from __future__ import annotations

import pytest

pytest.importorskip("torch")

import torch
from torch import Tensor

from kvarto.kernels.base import Partial, merge

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
