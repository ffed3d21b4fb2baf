"""KVQuant by the Triton kernel on a GPU: levels in a table, slots, RoPE from each page's place; cases.py says what is poisoned and allowed.

Constants differ by head, and pages know their places. Ragged lengths up to 100,000 tokens, of every codec, test_gpu_attend.py has.
"""

from __future__ import annotations

from dataclasses import replace

import pytest

pytest.importorskip("torch")
pytest.importorskip("triton")

import torch
from cases import DEVICE, HAS_GPU, LONG, Case, assert_near, assert_same, captured, make, needs_gpu, needs_real_gpu

from kvarto.binding import choose_kernel
from kvarto.kernels.base import Partial
from kvarto.kernels.reference import ReferenceKernel
from kvarto.kernels.triton import TritonKernel
from kvarto.layout import Geometry

NAMES = ("kvquant4", "kvquant3", "kvquant2")
CHUNK = 300 if HAS_GPU else 40
pytestmark = [pytest.mark.gpu, needs_gpu]


def check(case: Case) -> None:
    packed = case.packed
    support = TritonKernel().supports(packed.layout, packed.k, packed.v, DEVICE)
    assert support, support.reason
    assert_near(case.attend(), case.truth())


@pytest.mark.parametrize("name", NAMES)
@pytest.mark.parametrize("dim", [64, 80, 96, 256])
def test_other_head_dimensions(name: str, dim: int) -> None:
    check(make(name, (1, 63, 65, 900 if HAS_GPU else 200), geometry=Geometry(2, dim, dim)))


@pytest.mark.parametrize("page_tokens", [32, 128])
def test_other_pages(page_tokens: int) -> None:
    geometry, lengths = Geometry(3, 64, 128, page_tokens), (1, 300, 1000 if HAS_GPU else 400)
    check(make("kvquant3+sink128", lengths, geometry=geometry))
    check(make("kvquant3+sink128", lengths, (1, 200, CHUNK), geometry=geometry))


@pytest.mark.parametrize("name", NAMES)
@pytest.mark.parametrize(("count", "R"), [(1, 1), (5, 3), (16, 4)])
def test_several_queries_of_a_sequence(name: str, count: int, R: int) -> None:
    check(make(name, (count, 64, 65 + count // 2, 300, LONG // 8), (count, 0, count, 1, count), R=R))


@pytest.mark.parametrize("name", NAMES)
def test_a_prefill(name: str) -> None:
    check(make(name, (CHUNK, 200, LONG, 64, 130), (CHUNK, 1, CHUNK, 0, 30)))


@pytest.mark.parametrize("text", ["kvquant4/int8", "int4/kvquant3", "kvquant2/fp8"])
@pytest.mark.parametrize("count", [1, CHUNK])
def test_formats_of_which_one_side_has_a_table(text: str, count: int) -> None:
    check(make(text, (count, 130 + count, LONG // 4 + count), (count, 1, count)))


@pytest.mark.parametrize("counts", [(1, 1, 1), (5, 0, 16), (40, 1, CHUNK)])
def test_rules(counts: tuple[int, ...]) -> None:
    lengths = (64, 300, 1000 if HAS_GPU else 420)
    check(make("kvquant4+sink128+window64", lengths, counts, sliding=150, softcap=30.0, sinks=True))


@pytest.mark.parametrize("name", NAMES)
@pytest.mark.parametrize("count", [1, CHUNK])
def test_the_reference_kernel_says_the_same(name: str, count: int) -> None:
    case = make(name, (count, 2000 if HAS_GPU else 300), (count, count), geometry=Geometry(2, 64, 80))
    got = case.attend()
    expected = ReferenceKernel().attend(
        case.queries, [case.raw, case.packed], case.rule, scale=case.scale, softcap=case.softcap
    )
    assert float((got.out - expected.out).norm()) <= 5e-3 * float(expected.out.norm())
    assert float((got.lse - expected.lse).abs().max()) <= 2e-2


@needs_real_gpu
@pytest.mark.parametrize("name", NAMES)
def test_it_is_chosen(name: str) -> None:
    packed = make(name, (200,)).packed
    assert choose_kernel(None, packed.layout, packed.k, packed.v, "cuda").name == "triton"


@needs_real_gpu
@pytest.mark.parametrize("name", ["kvquant4", "kvquant4/int8"])
def test_a_graph_is_replayed_on_other_pages(name: str) -> None:
    """Constants stay where the graph found them; nothing is asked of the host, or recording would fail."""
    case = make(name, (70, 300, 1000, LONG))
    live = replace(
        case,
        queries=replace(case.queries, q=case.queries.q.clone()),
        packed=replace(case.packed, pages=case.packed.pages.clone(), table=case.packed.table.clone()),
    )
    graph, result = captured(live.attend)
    live.queries.q.neg_()
    moved = torch.where(live.packed.table >= 0, (live.packed.table + 1) % len(live.packed.pages), -1)
    live.packed.pages.copy_(case.packed.pages.roll(1, 0))
    live.packed.table.copy_(moved)
    graph.replay()
    assert_near(result, live.truth())
    assert_same(result, live.attend())


@needs_real_gpu
@pytest.mark.parametrize("count", [1, CHUNK])
def test_nothing_is_allocated_that_stays(count: int) -> None:
    """Constants are sent with the first call."""
    case = make("kvquant3", (1000, 2000), (count, count))
    case.attend()
    torch.cuda.synchronize()
    before = torch.cuda.memory_allocated()
    with torch.cuda.device(0):
        torch.cuda.set_sync_debug_mode("error")
        try:
            case.attend()
        finally:
            torch.cuda.set_sync_debug_mode("default")
    torch.cuda.synchronize()
    assert torch.cuda.memory_allocated() == before


def test_in_deterministic_mode_a_sequence_does_not_depend_on_the_batch() -> None:
    case = make("kvquant4", (65, 1000, LONG // 3, 300))
    torch.use_deterministic_algorithms(True)
    try:
        together = case.attend()
        for b in range(4):
            assert_same(case.row(b).attend(), Partial(together.out[b : b + 1], together.lse[b : b + 1]))
    finally:
        torch.use_deterministic_algorithms(False)
    assert_near(together, case.truth())
