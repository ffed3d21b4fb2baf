"""The Triton kernel on a GPU against a float64 softmax over decoded pages; cases.py says what is poisoned and what the tolerances are.

Every new combination of compile-time arguments costs seconds, so there are few, and each is used on much data.
"""

from __future__ import annotations

from collections.abc import Iterator
from dataclasses import replace

import pytest

pytest.importorskip("torch")
pytest.importorskip("triton")

import torch
from cases import (
    DEVICE,
    HAS_GPU,
    LONG,
    RAGGED,
    Case,
    assert_near,
    assert_same,
    captured,
    make,
    needs_gpu,
    needs_real_gpu,
)

from kvarto.codecs import registry
from kvarto.kernels.base import PageSet, Partial, merge
from kvarto.kernels.triton import TritonKernel
from kvarto.kernels.triton_tune import Tuning, trial
from kvarto.layout import Geometry

CHUNK = 300 if HAS_GPU else 40
pytestmark = [pytest.mark.gpu, needs_gpu]


def check(case: Case) -> None:
    assert_near(case.attend(), case.truth())


@pytest.mark.parametrize("name", list(registry))
def test_every_codec_on_ragged_lengths(name: str) -> None:
    """From one token to 100,000, raw and packed pages in one call, with plain numbers and with the bias of real keys."""
    case = make(name, RAGGED)
    support = TritonKernel().supports(case.packed.layout, case.packed.k, case.packed.v, DEVICE)
    if not support:
        pytest.skip(f"{name}: {support.reason}")
    check(case)
    check(make(name, RAGGED, biased=True))


@pytest.mark.parametrize(
    ("name", "dim"),
    [
        ("int4", 64),
        ("int4", 80),
        ("int4", 96),
        ("int4", 256),
        ("int2", 64),
        ("int8", 80),
        ("fp8", 96),
        ("kivi4", 256),
        ("kivi2", 64),
    ],
)
def test_other_head_dimensions(name: str, dim: int) -> None:
    geometry = Geometry(heads=2, k_dim=dim, v_dim=dim)
    case = make(name, (1, 63, 65, 900 if HAS_GPU else 200), geometry=geometry, biased=True)
    support = TritonKernel().supports(case.packed.layout, case.packed.k, case.packed.v, DEVICE)
    assert support, support.reason
    check(case)


def test_keys_and_values_of_different_codecs_and_dimensions() -> None:
    check(
        make(
            "int8/int4", (1, 65, 1000 if HAS_GPU else 200), geometry=Geometry(heads=3, k_dim=96, v_dim=64), biased=True
        )
    )


@pytest.mark.parametrize("R", [1, 3, 8, 16])
def test_query_heads_that_share_a_head(R: int) -> None:
    check(make("int4", (1, 64, 130, LONG // 8), R=R))


@pytest.mark.parametrize("count", [2, 5, 16])
def test_several_queries_of_a_sequence(count: int) -> None:
    """Across page borders, and beside sequences with fewer queries or none."""
    check(make("int4", (count, 64, 65 + count // 2, 300, LONG // 8), (count, 0, count, 1, count)))


@pytest.mark.parametrize(
    ("name", "count"), [("int4", 17), *((name, CHUNK) for name in ("int4", "kivi2", "fp8", "bf16"))]
)
def test_a_prefill(name: str, count: int) -> None:
    """A chunk on a long history, which is decoded a stretch at a time, beside a whole prompt and a decode step."""
    check(make(name, (count, 200, LONG, 64, 130), (count, 1, count, 0, 30), biased=True))


@pytest.mark.parametrize(
    ("k_dim", "v_dim", "page_tokens", "R"), [(64, 64, 64, 3), (128, 64, 32, 4), (64, 128, 128, 1), (256, 256, 128, 4), (96, 96, 64, 5)]
)  # fmt: skip
def test_a_prefill_of_other_geometries(k_dim: int, v_dim: int, page_tokens: int, R: int) -> None:
    """First and last a sequence without queries, where what lies before and after the queries may not be read."""
    geometry, long = Geometry(2, k_dim, v_dim, page_tokens), 5000 if HAS_GPU else 300
    check(make("int8", (200, 40, long, 130), (0, 17, CHUNK, 0), geometry=geometry, R=R, biased=True))


@pytest.mark.parametrize("ahead", [False, True])
@pytest.mark.parametrize(
    ("name", "page_tokens"), [*((name, 64) for name in ("int4", "int3", "int2", "kivi4", "kivi2", "int8", "fp8")),
                              ("int4", 32), ("int4", 128), ("int8", 128), ("kivi2", 128)]
)  # fmt: skip
def test_slabs_copied_ahead_and_not(name: str, page_tokens: int, ahead: bool) -> None:
    """Whatever the shipped table says: both ways of reading, with 8 and 16 query rows, one sequence alone and several."""
    geometry = Geometry(2, 128, 128, page_tokens)
    with trial(Tuning(168, ahead)):
        for R in (4, 16):
            check(make(name, (1, 129, 1000 if HAS_GPU else 300), geometry=geometry, R=R, biased=True))
        check(make(name, (2000 if HAS_GPU else 300,), geometry=geometry))


def test_a_prefill_with_every_rule() -> None:
    lengths, counts = (40, 200 + CHUNK, 333), (40, CHUNK, 1)
    check(make("int4+sink128+window64", lengths, counts, sliding=150, softcap=30.0, sinks=True))


@pytest.mark.parametrize(
    ("text", "options"),
    [
        ("int4+window128", {}),
        ("int4+sink0", {"sliding": 200}),
        ("int4", {"sliding": 64, "sinks": True}),
        ("int4", {"softcap": 20.0, "biased": True}),
        ("int4+sink128+window64", {"sliding": 150, "softcap": 30.0, "sinks": True}),
    ],
)
def test_rules(text: str, options: dict[str, float | bool]) -> None:
    """Windows, sliding windows, learned sinks, soft caps; for one query and, the rows of two pages in a tile, for several."""
    lengths = (1, 64, 65, 129, 200, 1000 if HAS_GPU else 420)
    check(make(text, lengths, **options))  # type: ignore[arg-type]
    check(make(text, lengths, (1, 1, 5, 5, 0, 5), **options))  # type: ignore[arg-type]


def test_float16_queries_and_raw_pages_within_a_fused_projection() -> None:
    """q is a slice of q, k, v; around it is poison."""
    case = make("int4", (65, 1000 if HAS_GPU else 200), raw="fp16")
    q = case.queries.q
    fused = torch.full((len(q), q.shape[1] + 4, q.shape[2] + 16), torch.nan, dtype=q.dtype, device=DEVICE)
    fused[:, 2:-2, :-16] = q
    check(replace(case, queries=replace(case.queries, q=fused[:, 2:-2, :-16])))


def test_strides_of_bfloat16_queries() -> None:
    case = make("int4", RAGGED)
    heads_first = case.queries.q.transpose(0, 1).contiguous().transpose(0, 1)
    assert_same(replace(case, queries=replace(case.queries, q=heads_first)).attend(), case.attend())


def test_raw_pages_alone_and_packed_pages_alone() -> None:
    case = make("int4", (1, 63, 64))  # no page is packed yet
    assert_near(attend_one(case, case.raw), case.truth())
    case = make("int4+sink0", (65, 1000 if HAS_GPU else 200))
    parts = [attend_one(case, pages) for pages in (case.raw, case.packed)]
    assert_near(merge(parts), case.truth())


def attend_one(case: Case, pages: PageSet) -> Partial:
    return TritonKernel().attend(case.queries, [pages], case.rule, scale=case.scale, softcap=None)


# ---- far, replayed, reproducible -------------------------------------------------------------------------------------


@needs_real_gpu
def test_pages_beyond_two_gibibytes() -> None:
    case = make("int4", (65, 1000, 5000), store_nbytes=2**31 + 2**20)
    assert min(case.raw.pages.numel(), case.packed.pages.numel()) > 2**31
    used = case.packed.table[case.packed.table >= 0]
    assert int(used.min()) * case.packed.layout.nbytes > 2**31 - 2**24
    check(case)


@needs_real_gpu
def test_a_graph_follows_positions_tables_and_queries() -> None:
    """Captured before there are tokens; replayed when there are, when each sequence is another, and when the pages have moved."""
    case = make("int4", (70, 300, 1000, LONG))
    live = copied(case)
    live.raw.table.fill_(-1)
    live.packed.table.fill_(-1)
    live.queries.position.zero_()
    graph, result = captured(live.attend)
    graph.replay()
    assert bool((result.lse == -torch.inf).all())
    for state in (case, in_reverse(case), moved(case)):
        for name in ("q", "position"):
            getattr(live.queries, name).copy_(getattr(state.queries, name))
        for ours, theirs in ((live.raw, state.raw), (live.packed, state.packed)):
            ours.pages.copy_(theirs.pages)
            ours.table.copy_(theirs.table)
        graph.replay()
        assert_near(result, state.truth())
        assert_same(result, state.attend())


def copied(case: Case) -> Case:
    """The same in memory of its own."""
    queries = replace(case.queries, q=case.queries.q.clone(), position=case.queries.position.clone())
    raw, packed = (replace(x, pages=x.pages.clone(), table=x.table.clone()) for x in (case.raw, case.packed))
    return replace(case, queries=queries, raw=raw, packed=packed)


def in_reverse(case: Case) -> Case:
    """The last sequence first."""
    queries = replace(case.queries, q=case.queries.q.flip(0), position=case.queries.position.flip(0))
    raw, packed = (replace(x, table=x.table.flip(0)) for x in (case.raw, case.packed))
    return replace(case, queries=queries, raw=raw, packed=packed)


def moved(case: Case) -> Case:
    """Every page in the row that the next one had."""

    def move(x: PageSet) -> PageSet:
        table = torch.where(x.table >= 0, (x.table + 1) % len(x.pages), -1).int()
        return replace(x, pages=x.pages.roll(1, 0), table=table)

    return replace(case, raw=move(case.raw), packed=move(case.packed))


@pytest.fixture
def deterministic() -> Iterator[None]:
    torch.use_deterministic_algorithms(True)
    yield
    torch.use_deterministic_algorithms(False)


@pytest.mark.usefixtures("deterministic")
@pytest.mark.parametrize("count", [1, 5, CHUNK])
def test_in_deterministic_mode_a_sequence_does_not_depend_on_the_batch(count: int) -> None:
    """Nor on how wide the tables are, which grow with the longest sequence of the batch."""
    lengths = [max(count, length) for length in (65, 1000, LONG // 3, 300, LONG)]
    case = make("int4", lengths, [count] * len(lengths))
    together = case.attend()
    assert_near(together, case.truth())
    for b, length in enumerate(lengths):
        rows = slice(b * count, (b + 1) * count)
        for pages in (None, case.raw.layout.geometry.pages_for(length)):
            alone = case.row(b, pages).attend()
            assert_same(alone, Partial(together.out[rows], together.lse[rows]))
