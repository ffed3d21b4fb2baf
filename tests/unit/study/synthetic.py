"""Made-up studies: whole results with the numbers that a test wants."""

from __future__ import annotations

from collections.abc import Sequence

from kvarto.study.fidelity import summarize
from kvarto.study.recommend import recommend
from kvarto.study.result import (
    ArmResult,
    DocumentSums,
    Fidelity,
    JsonItem,
    Margins,
    Memory,
    NeedleCell,
    Provenance,
    Scope,
    Speed,
    StudyResult,
)
from kvarto.study.verdict import judge

POSITIONS = 384


def fidelity(kl_by_document: Sequence[float], worse_nats: float = 0.0) -> Fidelity:
    """`kl_by_document`: mean KL of each; `worse_nats`: by how much the log-likelihood is worse, alike in all but a little."""
    return summarize(
        [
            DocumentSums(
                document=f"document{i}",
                positions=POSITIONS,
                kl_nats=kl * POSITIONS,
                top1_matches=round(POSITIONS * (1 - 5 * kl)),
                nll_nats=(2.3 + worse_nats + 0.0001 * (i % 2)) * POSITIONS,
                baseline_nll_nats=2.3 * POSITIONS,
            )
            for i, kl in enumerate(kl_by_document)
        ],
        path_difference=4e-5,
    )


def needles(found: Sequence[bool]) -> tuple[NeedleCell, ...]:
    """Cells of two lengths and four depths, in order."""
    grid = [(length, depth) for length in (512, 1024) for depth in (0.125, 0.375, 0.625, 0.875)]
    return tuple(
        NeedleCell(length_tokens=grid[i % 8][0], depth=grid[i % 8][1], seed=i // 8, found=hit)
        for i, hit in enumerate(found)
    )


def json_items(right: Sequence[bool]) -> tuple[JsonItem, ...]:
    return tuple(
        JsonItem(
            prompt=f"order {i}", output="{}" if hit else "oops <b>", valid=hit, follows_schema=hit, right_values=hit
        )
        for i, hit in enumerate(right)
    )


def candidate(name: str, bits: float, **measured: object) -> ArmResult:
    """Harmless unless told otherwise."""
    fields: dict[str, object] = {
        "fidelity": fidelity([0.0011, 0.0013, 0.0012, 0.0010]),
        "needles": needles([True] * 32),
        "json_items": json_items([True] * 8),
        "speed": tuple(_speed(context, 21.7) for context in (1024, 4096)),
        "memory": tuple(_memory(context, bits) for context in (1024, 4096)),
    }
    return ArmResult(name=name, role="candidate", kernel="numba", bits_per_number=bits, **(fields | measured))


def baseline(**measured: object) -> ArmResult:
    fields = candidate("fp32", 32, **measured).model_dump() | {
        "role": "baseline",
        "fidelity": None,
        "kernel": "torch sdpa",
    }
    return ArmResult.model_validate(fields)


def control() -> ArmResult:
    return ArmResult(
        name="A/A control",
        role="control",
        kernel="numba",
        bits_per_number=32,
        fidelity=fidelity([1e-9, 2e-9, 1e-9, 3e-9]),
    )


def scope() -> Scope:
    return Scope(
        budget="quick", documents=4, document_tokens=512, first_scored=128, clusters="documents", needle_lengths=(512, 1024),
        needles_per_haystack=4, needle_seeds=4, json_prompts=8, speed_contexts=(1024, 4096),
    )  # fmt: skip


def study(*candidates: ArmResult, interrupted: bool = False) -> StudyResult:
    margins = Margins()
    base = baseline()
    judged = [arm.model_copy(update={"verdict": judge(arm, base, margins)}) for arm in candidates]
    arms = (base, control(), *judged)
    return StudyResult(
        provenance=Provenance(
            kvarto="0.1.0", commit="0123456789ab", command="kvarto study --quick", model="some-model", model_identity="f" * 64,
            dtype="fp32", text="builtin", text_sha256="e" * 64, seed=0, date="2026-11-30T12:00:00+00:00", duration_seconds=250.0,
            cpu="A <fast> CPU", cores=2, threads=2, system="Linux", versions={"torch": "2.13"},
        ),
        scope=scope(),
        margins=margins,
        interrupted=interrupted,
        stage_seconds={"fidelity": 100.0},
        arms=arms,
        skipped=(),
        recommendation=recommend(arms, scope(), interrupted=interrupted),
    )  # fmt: skip


def _speed(context: int, decode: float) -> Speed:
    return Speed(
        context_tokens=context,
        prefill_tokens_per_second=(300.0, 290.0, 310.0),
        decode_tokens_per_second=(decode, decode - 1.5, decode + 1),
        prefill_runs=1,
        decode_steps=8,
    )


def _memory(context: int, bits: float) -> Memory:
    payload = int(context * 1440 * bits)
    return Memory(
        context_tokens=context, payload_bytes=payload, metadata_bytes=1000, tail_bytes=2000, allocated_bytes=payload + 5000,
        rss_growth_bytes=payload + 4000,
    )  # fmt: skip
