"""PagedKV on a GPU against PagedKV on the CPU's reference kernel, and sealing within a CUDA graph. cases.py says what the tolerances are."""

from __future__ import annotations

from dataclasses import replace
from itertools import pairwise

import pytest

pytest.importorskip("torch")
pytest.importorskip("triton")

import torch
from cases import (
    BFLOAT16,
    DEVICE,
    HAS_GPU,
    KEY_BIAS,
    POISON,
    assert_near,
    assert_same,
    captured,
    make,
    needs_gpu,
    needs_real_gpu,
)
from torch import Tensor

from kvarto.attention import LayerKV, LayerSpec, PagedKV
from kvarto.kernels import triton_seal
from kvarto.kernels.base import Partial
from kvarto.layout import Geometry

pytestmark = [pytest.mark.gpu, needs_gpu]

GEOMETRY, HQ = Geometry(heads=2, k_dim=128, v_dim=128), 8
SCALE = GEOMETRY.k_dim**-0.5
# Relative. Both sides round p and their output to bfloat16, by at most 2^-9 (cases.py), and the worst of 40,000 rows counts.
LIMIT = 6 * BFLOAT16


def tokens(count: int, rows: int) -> tuple[Tensor, Tensor, Tensor]:
    """q, k, v bfloat16 [rows, H, count, D]; keys have the bias of real ones, and magnitudes that differ by channel."""
    generator = torch.Generator().manual_seed(3)
    q, k, v = (torch.randn(rows, heads, count, 128, generator=generator) for heads in (HQ, 2, 2))
    k *= torch.logspace(-0.5, 0.7, 128)
    k[..., 3] += KEY_BIAS[0]
    k[..., 67] += KEY_BIAS[1]
    return q.bfloat16(), k.bfloat16(), (v * 0.3).bfloat16()


def assert_outputs_near(got: Tensor, expected: Tensor) -> None:
    got, expected = got.cpu().double(), expected.double()
    worst = float(((got - expected).norm(dim=-1) / (LIMIT * expected.norm(dim=-1)).clamp_min(1e-30)).max())
    assert worst <= 1, f"{worst:.2f} times the difference allowed"


def assert_same_pages(ours: LayerKV, theirs: LayerKV) -> None:
    """Every page that is sealed in one is in the other, with the same bytes; and so are raw pages, as far as they are filled."""
    for row, (mine, other) in enumerate(zip(ours.rows, theirs.rows, strict=True)):
        assert [page >= 0 for page in mine.packed] == [page >= 0 for page in other.packed]
        assert mine.raw.keys() == other.raw.keys()
        for page in [page for page, held in enumerate(mine.packed) if held >= 0]:
            assert ours.sealed_page(row, page) == theirs.sealed_page(row, page), f"page {page} of sequence {row}"
        for page in [page for page in mine.raw if (page + 1) * 64 <= mine.length]:
            assert torch.equal(ours.open.pages[mine.raw[page]].cpu(), theirs.open.pages[other.raw[page]])


@pytest.mark.parametrize("policy", ["int4", "int8", "fp8", "kivi4", "int2/kivi2+window64"])
def test_a_prefill_and_decode_steps_over_page_borders(policy: str) -> None:
    """Two sequences, one padded on the left, so that their pages fill at different times: the same outputs and the same bytes as on the CPU."""
    prompt, padding, end = (300, 83, 440) if HAS_GPU else (150, 20, 200)
    q, k, v = tokens(end, rows=2)
    valid = torch.ones(2, prompt, dtype=torch.bool)
    valid[1, :padding] = False
    ours = PagedKV([LayerSpec(GEOMETRY)], policy, dtype=torch.bfloat16, device=DEVICE)
    theirs = PagedKV([LayerSpec(GEOMETRY)], policy, dtype=torch.bfloat16, kernel="reference")
    if HAS_GPU:
        assert ours.kernel_names == "triton"
    cuts = [0, prompt // 2, prompt, *range(prompt + 1, end + 1)]
    for first, last in pairwise(cuts):
        new = q[:, :, first:last], k[:, :, first:last], v[:, :, first:last]
        mask = valid[:, first:last] if last <= prompt else None
        out = extend(ours, new, None if mask is None else mask.to(DEVICE))
        assert_outputs_near(out, extend(theirs, new, mask))
    ours.check()
    assert_same_pages(ours.layers[0], theirs.layers[0])
    assert ours.saturated_elements == theirs.saturated_elements


def extend(kv: PagedKV, new: tuple[Tensor, Tensor, Tensor], valid: Tensor | None = None) -> Tensor:
    """q, k, v of new tokens, wherever the cache is."""
    q, k, v = (x.to(kv.layers[0].device) for x in new)
    return kv.extend(0, q, k, v, valid, scale=SCALE)


def test_a_long_prefill_in_runs() -> None:
    """More tokens than a run of `extend` takes, in other runs than on the CPU, over a sliding window."""
    new = tokens(5000 if HAS_GPU else 150, rows=1)
    spec = LayerSpec(GEOMETRY, sliding_tokens=700)
    ours = PagedKV([spec], "int4", dtype=torch.bfloat16, device=DEVICE)
    theirs = PagedKV([spec], "int4", dtype=torch.bfloat16, kernel="reference")
    assert_outputs_near(extend(ours, new), extend(theirs, new))
    assert_same_pages(ours.layers[0], theirs.layers[0])


@needs_real_gpu
@pytest.mark.parametrize("name", ["int4", "kivi2"])
def test_a_graph_seals_pages_and_attends_to_them(name: str) -> None:
    """The pages that `ids` name when the graph is replayed are sealed from raw values, and read in the same replay."""
    case = make(name, (250, 1000))
    sealed = torch.full_like(case.packed.pages, POISON)
    live = replace(case, packed=replace(case.packed, pages=sealed))
    k, v = case.codecs
    k_sealing, v_sealing = k.codec.sealing(k.layout), v.codec.sealing(v.layout)
    assert k_sealing is not None
    assert v_sealing is not None
    raw_pages, raw_ids, rows = case.unsealed()
    ids, saturated = torch.full_like(rows, -1), torch.zeros(1, dtype=torch.int64, device=DEVICE)
    raw_layout, layout = case.raw.layout, case.packed.layout

    def step() -> Partial:
        triton_seal.seal_pages(raw_pages, raw_layout, raw_ids, sealed, layout, ids, k_sealing, v_sealing, saturated)
        return live.attend()

    graph, result = captured(step)
    assert bool((sealed == POISON).all())
    ids.copy_(rows)
    graph.replay()
    assert torch.equal(sealed[rows.long()], case.packed.pages[rows.long()])
    assert_near(result, case.truth())
    assert_same(result, case.attend())
