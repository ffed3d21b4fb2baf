"""Ragged batches for the GPU kernel, and the truth of them: a float64 softmax over the numbers that the pages hold.

**What may not be read is poison.** Pools have spare pages of bytes 0xFF (NaN in every float format) before, after and between the pages used, slots
that are not filled yet hold NaN, and the tables name only pages that a query may read: an id of -1 used as it is reads poison.

**Tolerances** follow from what the tensor cores' operands are rounded to; nothing else is worth mentioning in float32.
    packed V   p times the token's scale becomes float16: off by at most 2^-12 of the span of the token's values, zero point included. These
               errors are independent, so over tokens they add like p * span in a root of squares; twice that is allowed.
    packed K   q times a channel's scale becomes float16, so scores are off by about 2^-12 |q * span of the channel|; a prefill decodes keys first,
               less one of them, which is off by as much. Twice that is allowed for the scores, and what it does to p. Where keys are rotated, so
               are queries, and become bfloat16 again: 2^-9 of |q| |k| / sqrt(D), since the errors of channels are independent.
    raw        bfloat16 p: 2^-9 of p * |v|, and again twice that. Packed bfloat16 pages likewise.
For one token of normal numbers that is .003 of the output for packed pages and .004 for raw ones.

Without a GPU these tests are skipped. KVARTO_GPU_TESTS=cpu runs them in Triton's interpreter, with shorter sequences: minutes, for who edits them.
KVARTO_GPU_LONG is the length of the long sequences: a memory checker wants them shorter.
"""

from __future__ import annotations

import os
from collections.abc import Callable, Sequence
from dataclasses import dataclass, replace
from itertools import pairwise

import pytest
import torch
from torch import Tensor

from kvarto.binding import BoundCodec
from kvarto.codecs import registry
from kvarto.formats import Format, parse_format
from kvarto.kernels.base import PageSet, Partial, Queries
from kvarto.kernels.triton import TritonKernel
from kvarto.layout import Geometry, Side
from kvarto.rule import Rule
from kvarto.testing import specimen_heads

HAS_GPU = torch.cuda.is_available()
DEVICE = "cuda" if HAS_GPU else "cpu"
ON_CPU = os.environ.get("KVARTO_GPU_TESTS") == "cpu"
needs_gpu = pytest.mark.skipif(not HAS_GPU and not ON_CPU, reason="needs a GPU")
needs_real_gpu = pytest.mark.skipif(not HAS_GPU, reason="needs a GPU")

GEOMETRY = Geometry(heads=2, k_dim=128, v_dim=128)
LONG = int(os.environ.get("KVARTO_GPU_LONG", "100000" if HAS_GPU else "700"))
RAGGED = (1, 63, 64, 65, 1000 if HAS_GPU else 200, LONG)
PREFILL_TOKENS = 16  # More queries of a sequence are a prefill.
# Largest relative error of rounding to it; the interpreter cuts the bits of bfloat16 off instead.
FLOAT16, BFLOAT16 = 2.0**-12, 2.0**-9 if HAS_GPU else 2.0**-7
POISON = 0xFF
_ROWS = 32  # Queries whose truth is worked out at once: 100,000 scores of each head.
SPARE_PAGES = 3
KEY_BIAS = (200.0, -150.0)


@dataclass(frozen=True)
class Truth:
    """float64: out [T, Hq, Dv] and lse [T, Hq], and how far a kernel may be from them, [T, Hq] each: the norm over Dv, and the magnitude."""

    out: Tensor
    lse: Tensor
    out_limit: Tensor
    lse_limit: Tensor


@dataclass(frozen=True)
class Case:
    """Sequences and what a kernel is asked of them.

    codecs   of the packed pages, K and V
    k, v     float32 [pages of all sequences, Hkv, S, D], the raw numbers, NaN where there are none
    sealed   int64 [packed pages]: which of them the rows in packed.table are, in order
    """

    queries: Queries
    raw: PageSet
    packed: PageSet
    rule: Rule
    codecs: tuple[BoundCodec, BoundCodec]
    k: Tensor
    v: Tensor
    sealed: Tensor
    softcap: float | None = None
    sinks: Tensor | None = None

    @property
    def scale(self) -> float:
        return float(self.queries.q.shape[-1] ** -0.5)

    def attend(self) -> Partial:
        sets = [self.raw, self.packed]
        return TritonKernel().attend(
            self.queries, sets, self.rule, scale=self.scale, softcap=self.softcap, sinks=self.sinks
        )

    def row(self, b: int, pages: int | None = None) -> Case:
        """Sequence b alone, with tables of `pages` pages."""
        first, end = self.queries.start[b : b + 2].tolist()
        start = torch.tensor([0, end - first], dtype=torch.int32, device=DEVICE)
        queries = Queries(self.queries.q[first:end], start, self.queries.position[b : b + 1], end - first)
        raw, packed = (replace(x, table=x.table[b : b + 1, :pages].contiguous()) for x in (self.raw, self.packed))
        return replace(self, queries=queries, raw=raw, packed=packed)

    def unsealed(self) -> tuple[Tensor, Tensor, Tensor]:
        """All pages raw, uint8 [pages, nbytes]; and int32 [packed pages] which of these, to which rows of the packed store, sealing takes."""
        raw = [BoundCodec(registry["bf16"], layout) for layout in (self.raw.layout.k, self.raw.layout.v)]
        pages = torch.cat([codec.encode(x) for codec, x in zip(raw, (self.k, self.v), strict=True)], dim=-1).flatten(1)
        return pages, self.sealed.int(), self.packed.table[self.packed.table >= 0]

    def truth(self) -> Truth:
        starts = self.queries.start.tolist()
        each = [
            self._truth(b, at, min(at + _ROWS, end), at - first)
            for b, (first, end) in enumerate(pairwise(starts))
            for at in range(first, end, _ROWS)
        ]
        return Truth(*(torch.cat(parts).flatten(1, 2) for parts in zip(*each, strict=True)))

    def _truth(self, b: int, first: int, end: int, done: int) -> tuple[Tensor, ...]:
        """The fields of `Truth`, heads as [Hkv, R], of rows first to end: queries of sequence b, of which `done` come before them."""
        S, heads, T = self.rule.page_tokens, self.raw.layout.geometry.heads, end - first
        q = self.queries.q[first:end].double().unflatten(1, (heads, self.queries.q.shape[1] // heads))
        position = int(self.queries.position[b]) + done
        t = position + torch.arange(T, device=DEVICE)[:, None]
        j = torch.arange(position + T, device=DEVICE)[None, :]
        is_raw = (j // S < self.rule.sink_pages) | (j // S >= t // S - self.rule.window_pages)
        visible = (j <= t) & (j > t - (self.rule.sliding_tokens or 1 << 30))
        forms = [_Form(self.packed, b, visible & ~is_raw), _Form(self.raw, b, visible & is_raw)]
        score = sum(torch.where(form.seen, _capped(form.scores(q) * self.scale, self.softcap), 0.0) for form in forms)
        score = score.masked_fill(~visible[:, None, None], -torch.inf)  # type: ignore[union-attr]
        lse = torch.logsumexp(score, dim=-1)
        if self.sinks is not None:
            lse = torch.logaddexp(lse, self.sinks.double().view(heads, -1))
        p = torch.exp(score - lse[..., None])
        out = forms[0].out(p) + forms[1].out(p)
        score_error = 2 * FLOAT16 * self.scale * forms[0].key_size(q)
        limit = sum(form.value_error(p) for form in forms) + score_error * (
            forms[0].value_size(p) + out[0].norm(dim=-1)
        )
        return out, lse, limit, score_error + 1e-5 * lse.abs().clamp_min(1)


class _Form:
    """The tokens that sequence b has in one form, packed or raw, as float64 numbers; seen bool [T, tokens]: by which query."""

    def __init__(self, pages: PageSet, b: int, seen: Tensor) -> None:
        self.k, self.v, held = _dense(pages, b, seen.shape[1])
        assert not bool((seen & ~held).any()), "a query needs a page that the case does not hold"
        tile = pages.k.tile
        self.seen, self._read = seen[:, None, None], seen.any(dim=0)
        self._bfloat16 = tile is not None and tile.planes[0].kind == "bfloat16"
        eye = torch.eye(self.k.shape[-1], device=DEVICE)
        self._rotates = not torch.equal(pages.k.rotate(eye), eye)

    def scores(self, q: Tensor) -> Tensor:
        """q [T, Hkv, R, Dk] to [T, Hkv, R, tokens]."""
        return torch.einsum("thrd,hnd->thrn", q, self.k)

    def out(self, p: Tensor) -> Tensor:
        """Probabilities [T, Hkv, R, tokens] to [T, Hkv, R, Dv]."""
        return torch.einsum("thrn,hnd->thrd", p * self.seen, self.v)

    def key_size(self, q: Tensor) -> Tensor:
        """|q * the channels' spans|, [T, Hkv, R]; 0 where q and k are multiplied as they are. More where q is rounded once more."""
        k = self.k[:, self._read]
        if self._bfloat16 or not k.shape[1]:
            return q.new_zeros(q.shape[:-1])
        size = _norm(q * (k.amax(dim=1) - k.amin(dim=1))[:, None])
        if self._rotates:
            size += BFLOAT16 / FLOAT16 * _norm(q) * (k.norm(dim=-1).amax(dim=1) * k.shape[-1] ** -0.5)[:, None]
        return size

    def value_size(self, p: Tensor) -> Tensor:
        """Root of the sum of squares of p * |v|, [T, Hkv, R]."""
        return _norm(p * self.seen * self.v.norm(dim=-1)[None, :, None])

    def value_error(self, p: Tensor) -> Tensor:
        """What may come of rounding p, [T, Hkv, R] (module docstring)."""
        if self._bfloat16:
            return 2 * BFLOAT16 * self.value_size(p)
        span = (self.v.amax(dim=-1) - self.v.amin(dim=-1)) * self.v.shape[-1] ** 0.5
        return 2 * FLOAT16 * _norm(p * self.seen * span[None, :, None])


def _norm(x: Tensor) -> Tensor:
    """Over the last axis."""
    norm: Tensor = torch.linalg.vector_norm(x, dim=-1)
    return norm


def _capped(scores: Tensor, softcap: float | None) -> Tensor:
    return scores if softcap is None else softcap * torch.tanh(scores / softcap)


def _dense(pages: PageSet, b: int, tokens: int) -> tuple[Tensor, Tensor, Tensor]:
    """(K, V float64 [Hkv, tokens, D] with 0 where there is nothing, bool [tokens]: which are there) of sequence b."""
    geometry, row = pages.layout.geometry, pages.table[b]
    held = row >= 0
    slabs = pages.pages[row[held].long()].view(-1, geometry.heads, pages.layout.pair_nbytes)
    sides = []
    for side, reader in ((Side.K, pages.k), (Side.V, pages.v)):
        first, end = pages.layout.slab_range(side)
        shape = (len(row), geometry.heads, geometry.page_tokens, geometry.dim(side))
        x = torch.zeros(shape, dtype=torch.float64, device=DEVICE)
        x[held] = reader.decode(slabs[..., first:end]).double()
        sides.append(x.nan_to_num(nan=0.0).transpose(0, 1).flatten(1, 2)[:, :tokens])
    return sides[0], sides[1], held.repeat_interleave(geometry.page_tokens)[:tokens]


# ---- how cases are made ----------------------------------------------------------------------------------------------


def make(
    text: str,
    lengths: Sequence[int],
    counts: Sequence[int] | None = None,
    *,
    geometry: Geometry = GEOMETRY,
    R: int = 4,
    sliding: int | None = None,
    softcap: float | None = None,
    sinks: bool = False,
    biased: bool = False,
    raw: str = "bf16",
    store_nbytes: int = 0,
) -> Case:
    """Sequences of `lengths` tokens, the last counts[b] of which (1) are the queries, in the format `text`.

    raw           the format of raw pages, "bf16" or "fp16", and of the queries
    biased        keys with KEY_BIAS on two channels and magnitudes that differ by channel, values with outliers
    store_nbytes  of each store at least; pages that are used lie at its end
    """
    generator = torch.Generator(DEVICE).manual_seed(0)
    S, chosen = geometry.page_tokens, parse_format(text)
    chosen = replace(
        chosen,
        k=specimen_heads(chosen.k, Side.K, geometry.k_dim, geometry.heads, S),
        v=specimen_heads(chosen.v, Side.V, geometry.v_dim, geometry.heads, S),
    )
    rule = Rule(S, chosen.sink_tokens // S, chosen.window_tokens // S, sliding)
    counts = [1] * len(lengths) if counts is None else counts
    pages = [geometry.pages_for(length) for length in lengths]

    def randn(*shape: int) -> Tensor:
        return torch.randn(*shape, generator=generator, device=DEVICE)

    k = randn(sum(pages), geometry.heads, S, geometry.k_dim)
    v = randn(sum(pages), geometry.heads, S, geometry.v_dim)
    if biased:
        _bias(k, v)
    dtype = {"bf16": torch.bfloat16, "fp16": torch.float16}[raw]
    k, v = k.to(dtype).float(), v.to(dtype).float()
    raw_k, raw_v = _unfilled_as_nan(k, lengths, pages), _unfilled_as_nan(v, lengths, pages)
    read = [
        _pages_read(rule, length, count, pages[b])
        for b, (length, count) in enumerate(zip(lengths, counts, strict=True))
    ]
    raw_set = _page_set(parse_format(raw), geometry, raw_k, raw_v, [r for r, _ in read], store_nbytes, raw=True)
    packed_set = _page_set(chosen, geometry, k, v, [p for _, p in read], store_nbytes, raw=False)
    q = randn(sum(counts), geometry.heads * R, geometry.k_dim).to(dtype)
    start = torch.tensor([0, *counts], device=DEVICE).cumsum(0).int()
    position = torch.tensor([n - count for n, count in zip(lengths, counts, strict=True)], device=DEVICE).int()
    learned = randn(geometry.heads * R) if sinks else None
    sealed = torch.tensor([flag for _, row in read for flag in row], device=DEVICE).nonzero().flatten()
    queries = Queries(q, start, position, max(counts))
    codecs = BoundCodec(chosen.k, packed_set.layout.k), BoundCodec(chosen.v, packed_set.layout.v)
    return Case(queries, raw_set, packed_set, rule, codecs, raw_k, raw_v, sealed, softcap, learned)


def _bias(k: Tensor, v: Tensor) -> None:
    dim = k.shape[-1]
    k *= torch.logspace(-0.5, 0.7, dim, device=DEVICE)
    k[..., 3] += KEY_BIAS[0]
    k[..., dim // 2 + 3] += KEY_BIAS[1]
    v *= torch.where(torch.arange(v.shape[-1], device=DEVICE) % 37 == 5, 8.0, 0.3)


def _unfilled_as_nan(x: Tensor, lengths: Sequence[int], pages: Sequence[int]) -> Tensor:
    """x [pages of all, Hkv, S, D] with NaN in the slots behind the last token of each sequence."""
    x, end = x.clone(), 0
    for length, count in zip(lengths, pages, strict=True):
        end += count
        x[end - 1, :, length - (count - 1) * x.shape[2] :] = torch.nan
    return x


def _pages_read(rule: Rule, length: int, count: int, pages: int) -> tuple[list[bool], list[bool]]:
    """For each page of a sequence whether some query reads it raw, and whether some query reads it packed."""
    S, first_token = rule.page_tokens, length - count
    query_pages = range(first_token // S, (length - 1) // S + 1) if count else range(0)
    hidden = 0 if rule.sliding_tokens is None else max(0, first_token - rule.sliding_tokens + 1) // S
    raw, packed = [False] * pages, [False] * pages
    for j in range(hidden, pages):
        forms = {rule.reads_raw(j, p) for p in query_pages if j <= p}
        raw[j], packed[j] = True in forms, False in forms
    return raw, packed


def _page_set(
    chosen: Format, geometry: Geometry, k: Tensor, v: Tensor, read: list[list[bool]], nbytes: int, *, raw: bool
) -> PageSet:
    """The pages of k, v [pages of all sequences, Hkv, S, D] that are read, in random rows of a store of poison."""
    layout = chosen.layout(geometry)
    codecs = BoundCodec(chosen.k, layout.k), BoundCodec(chosen.v, layout.v)
    wanted = torch.tensor([flag for row in read for flag in row], dtype=torch.bool, device=DEVICE)
    used = int(wanted.sum())
    rows = max(used + SPARE_PAGES, nbytes // layout.nbytes + 1)
    # Row -1 of `store` is the first row of what is allocated: poison too.
    store = torch.full((rows + 1, layout.nbytes), POISON, dtype=torch.uint8, device=DEVICE)[1:]
    generator = torch.Generator().manual_seed(1)
    places = torch.cat([torch.arange(len(row), dtype=torch.int32) for row in read]).to(DEVICE) * geometry.page_tokens
    spots = (rows - used - SPARE_PAGES + torch.randperm(used + SPARE_PAGES, generator=generator)[:used]).to(DEVICE)
    if used:
        store[spots] = torch.cat(
            [codec.encode(x[wanted], places[wanted]) for codec, x in zip(codecs, (k, v), strict=True)], dim=-1
        ).flatten(1)
    flat = torch.full((len(wanted),), -1, dtype=torch.int32, device=DEVICE)
    flat[wanted] = spots.int()
    table = torch.full((len(read), max(map(len, read))), -1, dtype=torch.int32, device=DEVICE)
    for b, ids in enumerate(flat.split([len(row) for row in read])):
        table[b, : len(ids)] = ids
    return PageSet(store, table, layout, *codecs, raw)


# ---- comparison ------------------------------------------------------------------------------------------------------


def assert_near(got: Partial, expected: Truth) -> None:
    """Within the tolerances of the module's docstring, row by row."""
    assert bool(got.out.isfinite().all()), "poison was read"
    saw = expected.lse.isfinite()
    assert torch.equal(got.lse.isfinite(), saw)
    for name, difference, limit in (
        ("out", (got.out.double() - expected.out).norm(dim=-1), expected.out_limit),
        ("lse", (got.lse.double() - expected.lse).abs(), expected.lse_limit),
    ):
        worst = float((difference[saw] / limit[saw].clamp_min(1e-30)).max()) if bool(saw.any()) else 0.0
        assert worst <= 1, f"{name}: {worst:.2f} times the difference allowed"


def assert_same(got: Partial, expected: Partial) -> None:
    """The same bits."""
    assert torch.equal(got.out, expected.out)
    assert torch.equal(got.lse, expected.lse)


def captured(act: Callable[[], Partial]) -> tuple[torch.cuda.CUDAGraph, Partial]:
    """A graph that does what `act` does, after a run that compiles it, and where its results will lie."""
    act()
    torch.cuda.synchronize()
    graph = torch.cuda.CUDAGraph()
    with torch.cuda.graph(graph):
        result = act()
    return graph, result
