"""The compiled CPU kernel against the reference, and what it promises beyond: same bits in any batch, nothing read that may not be."""

from __future__ import annotations

import threading
from collections.abc import Iterator
from dataclasses import replace

import pytest

pytest.importorskip("torch")
pytest.importorskip("numba")

import torch
from batches import assert_near, make

from kvarto.binding import BoundCodec
from kvarto.codecs import registry
from kvarto.codecs.base import Codec
from kvarto.kernels import team
from kvarto.kernels.base import Partial, Queries
from kvarto.kernels.numba import NumbaKernel
from kvarto.layout import Geometry, PageLayout, Side
from kvarto.rule import Rule

LENGTHS = [1, 63, 64, 65, 130, 1000]
SMALL = Geometry(2, 64, 64)


@pytest.fixture(autouse=True)
def two_threads() -> Iterator[None]:
    before = torch.get_num_threads()
    torch.set_num_threads(2)
    yield
    torch.set_num_threads(before)


def assert_same_bits(got: Partial, expected: Partial) -> None:
    assert torch.equal(got.out, expected.out)
    assert torch.equal(got.lse, expected.lse)


@pytest.mark.parametrize(
    ("text", "heads", "k_dim", "v_dim", "R"),
    [
        ("fp32", 3, 64, 64, 1),
        ("bf16", 1, 80, 80, 3),
        ("fp16", 5, 96, 64, 4),
        ("int8", 2, 96, 96, 4),
        ("int4", 2, 128, 128, 8),
        ("fp8", 1, 256, 256, 16),
        ("int8/int4", 2, 64, 128, 7),
        ("kivi2", 1, 128, 128, 5),
        ("turbo4", 2, 128, 96, 4),
        ("turbo3/turbo2", 1, 80, 256, 2),
        ("turbo2.5/turbo3.5", 1, 128, 64, 4),
        ("fp32", 1, 40, 24, 2),
    ],
)
@pytest.mark.parametrize("raw", [False, True])
def test_decode_agrees_with_the_reference(text: str, heads: int, k_dim: int, v_dim: int, R: int, raw: bool) -> None:
    rule = Rule(64, sink_pages=0, window_pages=100 if raw else 0)  # As raw pages the whole history counts.
    batch = make(text, Geometry(heads, k_dim, v_dim), LENGTHS, [1] * len(LENGTHS), R=R, raw=raw, rule=rule)
    assert_near(batch.attend(), batch.expected())


@pytest.mark.parametrize(
    ("R", "counts"), [(1, [1, 16, 3, 8, 2, 9]), (4, [1, 5, 1, 16, 2, 3]), (16, [1, 2, 4, 1, 3, 1])]
)
@pytest.mark.parametrize("raw", [False, True])
def test_several_queries_and_ragged_batches(R: int, counts: list[int], raw: bool) -> None:
    rule = Rule(64, window_pages=3)
    batch = make("bf16", Geometry(1, 64, 80), LENGTHS, counts, R=R, raw=raw, rule=rule)
    assert_near(batch.attend(), batch.expected())


@pytest.mark.parametrize("R", [1, 3, 4, 16])
@pytest.mark.parametrize("raw", [False, True])
def test_prefill_beside_decode(R: int, raw: bool) -> None:
    batch = make("int8" if not raw else "fp32", SMALL, [300, 64, 777, 130], [300, 1, 200, 130], R=R, raw=raw)
    assert_near(batch.attend(), batch.expected())


@pytest.mark.parametrize("sliding_tokens", [1, 7, 64, 100, 300])
@pytest.mark.parametrize("raw", [False, True])
@pytest.mark.parametrize("count", [1, 70])
def test_sliding_window(sliding_tokens: int, raw: bool, count: int) -> None:
    rule = Rule(64, window_pages=1, sliding_tokens=sliding_tokens)
    lengths = [max(count, length) for length in LENGTHS]
    batch = make("fp32", SMALL, lengths, [count] * len(lengths), raw=raw, rule=rule)
    assert_near(batch.attend(), batch.expected())


@pytest.mark.parametrize(("sink_pages", "window_pages"), [(0, 0), (1, 0), (2, 3), (0, 5), (30, 0)])
@pytest.mark.parametrize("raw", [False, True])
@pytest.mark.parametrize("sliding_tokens", [None, 500])
def test_raw_and_packed_halves_of_the_rule(
    sink_pages: int, window_pages: int, raw: bool, sliding_tokens: int | None
) -> None:
    rule = Rule(64, sink_pages, window_pages, sliding_tokens)
    batch = make("fp32", SMALL, LENGTHS, [1, 40, 1, 65, 100, 130], R=3, raw=raw, rule=rule)
    assert_near(batch.attend(), batch.expected())


@pytest.mark.parametrize("count", [1, 3, 40])
@pytest.mark.parametrize("softcap", [0.5, 30.0])
def test_softcap(count: int, softcap: float) -> None:
    batch = make("fp32", SMALL, [1000, 300], [count, count])
    assert_near(batch.attend(softcap), batch.expected(softcap))


@pytest.mark.parametrize("text", ["fp32", "bf16", "int8", "int4", "kivi2"])
@pytest.mark.parametrize("count", [1, 20])
def test_keys_with_large_biases(text: str, count: int) -> None:
    batch = make(text, Geometry(1, 128, 128), [1000, 200], [count, count], bias=200.0)
    # Scores reach 100 here, and a float32 of that size is good to 4e-6 before exp.
    assert_near(batch.attend(), batch.expected(), tolerance=1e-4)


@pytest.mark.parametrize("raw", [False, True])
def test_a_row_has_the_same_bits_alone_and_in_a_batch(raw: bool) -> None:
    rule = Rule(64, sink_pages=1, window_pages=2 if raw else 0)
    batch = make(
        "bf16" if raw else "int4", SMALL, [5000, 1, 65, 3000, 1000, 64], [1, 1, 3, 200, 16, 2], raw=raw, rule=rule
    )
    together = batch.attend()
    for b, (first, end) in enumerate(zip(batch.queries.start.tolist(), batch.queries.start.tolist()[1:], strict=False)):
        alone = batch.row(b).attend()
        assert_same_bits(alone, Partial(together.out[first:end], together.lse[first:end]))


def test_threads_do_not_change_bits() -> None:
    batch = make("int4", SMALL, [5000, 300], [1, 200])
    expected = batch.attend()
    for threads in (1, 3):
        torch.set_num_threads(threads)
        assert_same_bits(batch.attend(), expected)


def test_decode_is_the_last_row_of_prefill() -> None:
    prefill = make("int8", SMALL, [1000], [500])
    decode = replace(
        prefill, queries=Queries(prefill.queries.q[-1:], torch.tensor([0, 1]).int(), torch.tensor([999]).int(), 1)
    )
    got, whole = decode.attend(), prefill.attend()
    assert_near(got, Partial(whole.out[-1:], whole.lse[-1:]), tolerance=1e-5)


def test_chunks_of_a_prefill_agree() -> None:
    whole = make("int8", SMALL, [1000], [500])
    result = whole.attend()
    for first, end in ((0, 1), (1, 30), (30, 300), (300, 500)):
        queries = Queries(
            whole.queries.q[first:end],
            torch.tensor([0, end - first]).int(),
            torch.tensor([500 + first]).int(),
            end - first,
        )
        assert_near(
            replace(whole, queries=queries).attend(), Partial(result.out[first:end], result.lse[first:end]), 1e-5
        )


def test_strided_queries_and_tables() -> None:
    batch = make("int8", SMALL, [200, 1000], [3, 2])
    q = torch.stack([batch.queries.q, torch.full_like(batch.queries.q, torch.nan)], dim=1)[:, 0].transpose(1, 2)
    wide = torch.full((2, 40), -1, dtype=torch.int32)
    wide[:, : batch.pages.table.shape[1]] = batch.pages.table
    strided = replace(
        batch,
        queries=replace(batch.queries, q=q.contiguous().transpose(1, 2)),
        pages=replace(batch.pages, table=wide.t().contiguous().t()),
    )
    assert not strided.queries.q.is_contiguous()
    assert not strided.pages.table.is_contiguous()
    assert_same_bits(strided.attend(), batch.attend())


def test_pages_may_be_rows_of_a_wider_store() -> None:
    batch = make("int8", SMALL, [500], [1])
    store = torch.full((len(batch.pages.pages), batch.pages.layout.nbytes + 48), 0xFF, dtype=torch.uint8)
    store[:, 16 : 16 + batch.pages.layout.nbytes] = batch.pages.pages
    inside = replace(batch, pages=replace(batch.pages, pages=store[:, 16 : 16 + batch.pages.layout.nbytes]))
    assert_same_bits(inside.attend(), batch.attend())


def test_a_page_beyond_two_gibibytes() -> None:
    batch = make("int8", SMALL, [64], [1], rule=Rule(64))
    nbytes, far = batch.pages.layout.nbytes, 2**31 // batch.pages.layout.nbytes + 2
    try:
        store = torch.empty((far + 1, nbytes), dtype=torch.uint8)  # Not touched, so hardly any of it becomes real.
    except RuntimeError:
        pytest.skip("not enough address space")
    store[far] = batch.pages.pages[batch.pages.table[0, 0]]
    queries = replace(batch.queries, position=torch.tensor([64]).int())
    near = replace(batch, queries=queries)
    distant = replace(near, pages=replace(batch.pages, pages=store, table=torch.tensor([[far]]).int()))
    assert_same_bits(distant.attend(), near.attend())


def test_queries_that_see_nothing() -> None:
    batch = make("int8", SMALL, [30, 200], [2, 1])  # The first sequence has no sealed page.
    partial = batch.attend()
    assert torch.equal(partial.out[:2], torch.zeros_like(partial.out[:2]))
    assert bool((partial.lse[:2] == -torch.inf).all())
    assert bool(torch.isfinite(partial.lse[2]).all())
    empty = replace(batch, queries=Queries(batch.queries.q[:0], torch.zeros(3).int(), batch.queries.position, 0))
    assert empty.attend().out.shape == (0, 8, 64)


def test_nan_in_a_query_is_not_hidden() -> None:
    batch = make("int8", SMALL, [300, 300], [1, 40])
    batch.queries.q[0, 1, 5] = torch.nan
    batch.queries.q[7, 2, 5] = torch.nan
    out = batch.attend().out
    assert bool(out[0, 1].isnan().all())
    assert bool(out[7, 2].isnan().all())
    assert int(out.isnan().any(dim=-1).sum()) == 2


def test_python_threads_at_once() -> None:
    batches = [make("int4", SMALL, [1500, 100], [1, 30], seed=seed) for seed in range(3)]
    expected = [batch.attend() for batch in batches]
    got: list[list[Partial]] = [[] for _ in batches]

    def run(i: int) -> None:
        got[i] += [batches[i].attend() for _ in range(10)]

    threads = [threading.Thread(target=run, args=(i,)) for i in range(len(batches))]
    for thread in threads:
        thread.start()
    for thread in threads:
        thread.join()
    for partials, reference in zip(got, expected, strict=True):
        assert len(partials) == 10
        for partial in partials:
            assert_same_bits(partial, reference)


def test_without_openmp(monkeypatch: pytest.MonkeyPatch) -> None:
    batch = make("int4", SMALL, [3000, 100], [1, 30])
    expected = batch.attend()
    monkeypatch.setattr(team, "_openmp", lambda: None)
    assert_same_bits(batch.attend(), expected)


class Unread(Codec):
    """A codec without a tile reader."""

    fields = registry["fp32"].fields
    encode = registry["fp32"].encode
    decode = registry["fp32"].decode


def test_supports() -> None:
    def support(codec: Codec, device: str) -> object:
        layout = PageLayout(SMALL, codec.layout(Side.K, 64, 64), codec.layout(Side.V, 64, 64))
        return NumbaKernel().supports(layout, BoundCodec(codec, layout.k), BoundCodec(codec, layout.v), device)

    assert support(registry["int8"], "cpu")
    assert not support(registry["int8"], "cuda")
    refused = support(Unread("unread", 32, "test"), "cpu")
    assert not refused
    assert "tile reader" in str(refused)


def test_supports_says_how_to_get_numba(monkeypatch: pytest.MonkeyPatch) -> None:
    batch = make("int8", SMALL, [64], [1])
    monkeypatch.setattr("kvarto.kernels.numba.why_unavailable", lambda _package: "it is not installed")
    support = NumbaKernel().supports(batch.pages.layout, batch.pages.k, batch.pages.v, "cpu")
    assert "pip install" in str(support.reason)
