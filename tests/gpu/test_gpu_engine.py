"""The engine's pages on a GPU: sequences of several policies in one step, in chunks, over page borders, against PagedKV on the CPU for each alone."""

from __future__ import annotations

import pytest

pytest.importorskip("torch")
pytest.importorskip("triton")

import torch
from cases import BFLOAT16, DEVICE, HAS_GPU, needs_gpu
from torch import Tensor

from kvarto.attention import LayerSpec, PagedKV
from kvarto.engine.memory import Compute, Memory
from kvarto.engine.request import Request, Sampling
from kvarto.engine.scheduler import Work
from kvarto.engine.step import Step
from kvarto.formats import parse_policy
from kvarto.layout import Geometry

pytestmark = [pytest.mark.gpu, needs_gpu]

GEOMETRY, HQ = Geometry(heads=2, k_dim=128, v_dim=128), 8
SCALE = GEOMETRY.k_dim**-0.5
POLICIES = ["int4", "int8", "kivi2+window64"]
SPECS = [LayerSpec(GEOMETRY), LayerSpec(GEOMETRY, sliding_tokens=100), LayerSpec(GEOMETRY)]
LIMIT = 6 * BFLOAT16  # as in test_gpu_cache.py


class Sequence:
    """A request with keys, values and queries for each layer, bfloat16 [layers, heads, tokens, D], and a cache that has it alone."""

    def __init__(self, number: int, length: int, memory: Memory) -> None:
        generator = torch.Generator().manual_seed(number)
        self.q, self.k, self.v = (
            torch.randn(len(SPECS), heads, length, 128, generator=generator).bfloat16() for heads in (HQ, 2, 2)
        )
        policy = number % len(POLICIES)
        self.request = Request(str(number), [number] * length, Sampling(), policy)
        self.request.holding = memory.begin(self.request)
        self.alone = PagedKV(SPECS, POLICIES[policy], dtype=torch.bfloat16, kernel="reference")

    def expected(self, layer: int, first: int, end: int) -> Tensor:
        at = layer, slice(None), slice(first, end)
        return self.alone.extend(layer, self.q[at][None], self.k[at][None], self.v[at][None], scale=SCALE)[0].transpose(
            0, 1
        )


def step_of(memory: Memory, works: list[Work]) -> Step:
    aside = torch.cuda.Stream() if HAS_GPU else None
    step = Step(memory, memory.plan(works), torch.device(DEVICE), aside)
    step.begin()
    return step


def test_a_crowd_of_several_policies_in_chunks() -> None:
    lengths = (1000, 300, 513, 64, 129, 700) if HAS_GPU else (150, 64, 70)
    compute = Compute(torch.bfloat16, torch.device(DEVICE), "triton")
    memory = Memory(
        SPECS, [parse_policy(text) for text in POLICIES], compute, budget_bytes=64 << 20, step_tokens=512, poison=True
    )
    sequences = [Sequence(number, length, memory) for number, length in enumerate(lengths)]
    turn = 0
    while going := [s for s in sequences if s.request.missing]:
        works = []
        for i, sequence in enumerate(going):
            count = min(sequence.request.missing, (63, 1, 130)[(turn + i) % 3] if turn else 90)
            assert sequence.request.holding.reserve(count)
            works.append(Work(sequence.request, count))
        step = step_of(memory, works)
        by_request = {sequence.request: sequence for sequence in going}
        spans = [(by_request[work.request], work.request.holding.length, work.count) for work in step.plan.works]
        for layer in range(len(SPECS)):
            q, k, v = (
                torch.cat([x[layer, :, first : first + count].transpose(0, 1) for x, first, count in parts]).to(DEVICE)
                for parts in (
                    [(getattr(sequence, name), first, count) for sequence, first, count in spans] for name in "qkv"
                )
            )
            out = step.attend(layer, q, k, v, scale=SCALE).cpu().double()
            expected = torch.cat([s.expected(layer, first, first + count) for s, first, count in spans]).double()
            worst = float(((out - expected).norm(dim=-1) / (LIMIT * expected.norm(dim=-1)).clamp_min(1e-30)).max())
            assert worst <= 1, f"layer {layer}: {worst:.2f} times the difference allowed"
        assert bool(torch.isfinite(step.finish()).all())
        for work in step.plan.works:
            work.request.holding.commit(work.request.tokens)
        memory.prefixes.check()
        turn += 1


def test_who_is_not_finite_is_named_without_harm_to_others() -> None:
    compute = Compute(torch.bfloat16, torch.device(DEVICE), "triton")
    memory = Memory(SPECS[:1], [parse_policy("int4")], compute, budget_bytes=16 << 20, step_tokens=128, poison=True)
    good, bad = (Sequence(3 * number, 70, memory) for number in (1, 2))
    bad.k[0, 1, 33, 5] = torch.nan
    works = [Work(sequence.request, 64) for sequence in (bad, good) if sequence.request.holding.reserve(64)]
    step = step_of(memory, works)
    q, k, v = (
        torch.cat([getattr(sequence, name)[0, :, :64].transpose(0, 1) for sequence in (bad, good)]).to(DEVICE)
        for name in "qkv"
    )
    out = step.attend(0, q, k, v, scale=SCALE)
    wrong = (~torch.isfinite(step.finish())).nonzero().flatten().cpu()
    assert [work.request for work in step.plan.works_of(wrong.numpy())] == [bad.request]
    expected = good.expected(0, 0, 64)
    assert float((out[64:].cpu().double() - expected.double()).norm() / expected.double().norm()) < LIMIT
