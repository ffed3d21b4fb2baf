"""The truth that other kernels are held to: decode pages, score in float32, softmax. Plain torch, any device, every codec.

It decodes at most `_PAGES_AT_ONCE` pages at a time and merges, so that even here no dense copy of the history exists.
"""

from __future__ import annotations

import itertools
from collections.abc import Sequence
from dataclasses import replace
from typing import TYPE_CHECKING

from kvarto.jit import torch
from kvarto.kernels.base import PageSet, Partial, Queries, SlabReader, Support, attend_each, merge
from kvarto.layout import PageLayout, Side
from kvarto.rule import Rule

if TYPE_CHECKING:
    from torch import Tensor

_PAGES_AT_ONCE = 16


class ReferenceKernel:
    """See the module docstring. Supports everything that a codec can decode."""

    name = "reference"

    def supports(self, layout: PageLayout, k: SlabReader, v: SlabReader, device: str) -> Support:
        """Always."""
        return Support()

    def attend(
        self,
        queries: Queries,
        sets: Sequence[PageSet],
        rule: Rule,
        *,
        scale: float,
        softcap: float | None,
        sinks: Tensor | None = None,
    ) -> Partial:
        """See `base.Kernel.attend`."""
        queries = replace(queries, q=queries.q.float())
        return attend_each(lambda pages: _attend_set(queries, pages, rule, scale, softcap), sets, sinks)


def _attend_set(queries: Queries, pages: PageSet, rule: Rule, scale: float, softcap: float | None) -> Partial:
    """One set, queries in float32."""
    T, Hq, _ = queries.q.shape
    out = queries.q.new_zeros((T, Hq, pages.layout.geometry.v_dim))
    lse = queries.q.new_full((T, Hq), -torch.inf)
    starts, positions = queries.start.tolist(), queries.position.tolist()
    for row, (first, end) in enumerate(itertools.pairwise(starts)):
        if end == first:
            continue
        partial = _attend_row(queries.q[first:end], pages, row, positions[row], rule, scale, softcap)
        out[first:end], lse[first:end] = partial.out, partial.lse
    return Partial(out, lse)


def _attend_row(
    q: Tensor, pages: PageSet, row: int, position: int, rule: Rule, scale: float, softcap: float | None
) -> Partial:
    """One sequence. q: float32 [T, Hq, Dk]."""
    T, Hq, _ = q.shape
    S = rule.page_tokens
    last_page = (position + T - 1) // S
    held = [(j, int(page)) for j, page in enumerate(pages.table[row, : last_page + 1].tolist()) if page >= 0]
    seen = Partial(q.new_zeros((T, Hq, pages.layout.geometry.v_dim)), q.new_full((T, Hq), -torch.inf))
    query_tokens = torch.arange(position, position + T, device=q.device)
    for i in range(0, len(held), _PAGES_AT_ONCE):
        numbers, ids = zip(*held[i : i + _PAGES_AT_ONCE], strict=True)
        key_tokens = (torch.tensor(numbers, device=q.device)[:, None] * S + torch.arange(S, device=q.device)).flatten()
        visible = _visible(query_tokens, key_tokens, rule, raw=pages.raw)
        if visible.any():
            k, v = (_dense(pages, list(ids), side) for side in (Side.K, Side.V))
            seen = merge([seen, _softmax(q, k, v, visible, scale, softcap)])
    return seen


def _dense(pages: PageSet, ids: list[int], side: Side) -> Tensor:
    """float32 [Hkv, len(ids) * S, D] of some pages."""
    layout, reader = pages.layout, pages.k if side is Side.K else pages.v
    first, end = layout.slab_range(side)
    heads = pages.pages[ids].view(len(ids), layout.geometry.heads, layout.pair_nbytes)[..., first:end]
    return reader.decode(heads).transpose(0, 1).flatten(1, 2)


def _visible(query_tokens: Tensor, key_tokens: Tensor, rule: Rule, *, raw: bool) -> Tensor:
    """bool [T, N]: the rule of `base`, elementwise."""
    t, j = query_tokens[:, None], key_tokens[None, :]
    page, query_page = j // rule.page_tokens, t // rule.page_tokens
    reads_raw = (page < rule.sink_pages) | (page >= query_page - rule.window_pages)
    visible = (j <= t) & (reads_raw == raw)
    if rule.sliding_tokens is not None:
        visible &= j > t - rule.sliding_tokens
    return visible


def _softmax(q: Tensor, k: Tensor, v: Tensor, visible: Tensor, scale: float, softcap: float | None) -> Partial:
    """Dense attention. q [T, Hq, Dk], k [Hkv, N, Dk], v [Hkv, N, Dv], visible [T, N]. Hidden slots may hold NaN."""
    seen = visible.any(dim=0)
    k, v, visible = k[:, seen], v[:, seen], visible[:, seen]
    heads = k.shape[0]
    grouped = q.reshape(q.shape[0], heads, -1, q.shape[-1])
    scores = torch.einsum("thrd,hnd->thrn", grouped, k) * scale
    if softcap is not None:
        scores = softcap * torch.tanh(scores / softcap)
    scores = scores.masked_fill(~visible[:, None, None, :], -torch.inf)
    lse = torch.logsumexp(scores, dim=-1)
    weights = torch.exp(scores - torch.where(lse == -torch.inf, 0.0, lse).unsqueeze(-1))
    out = torch.einsum("thrn,hnd->thrd", weights, v)
    return Partial(out.flatten(1, 2), lse.flatten(1, 2))
