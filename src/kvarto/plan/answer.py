"""The whole answer of a plan as plain data, and how it is worked out. What is not known is None: without a GPU there is no room, without weights no
speed. No torch."""

from __future__ import annotations

import dataclasses
from collections.abc import Sequence
from dataclasses import dataclass, field
from typing import Any

from kvarto.advice import Advice, advise
from kvarto.plan.cached import CachedModel, KeyValue, Latent, stage_layers
from kvarto.plan.engines import bits_per_number, plain_bytes
from kvarto.plan.measured import Measured
from kvarto.plan.memory import Budget, Room, Stage, check_parallel, room, stages
from kvarto.plan.speed import LAYER_COST_SECONDS, Machine
from kvarto.plan.weights import Weights
from kvarto.plan.written import Bytes, KvFormat, bytes_of

CONTEXTS = (2048, 8192, 32768, 131072)
BATCHES = (1, 8, 32, 128)


@dataclass(frozen=True)
class Scenario:
    """What is asked: `concurrency` sequences of `context_tokens`, of which the last `output_tokens` are generated."""

    context_tokens: int
    concurrency: int
    output_tokens: int

    @property
    def prompt_tokens(self) -> int:
        """The rest."""
        return max(1, self.context_tokens - self.output_tokens)


@dataclass(frozen=True)
class Slice:
    """A piece of a GPU's memory."""

    name: str
    nbytes: int


@dataclass(frozen=True)
class FormatAnswer:
    """One format. Bytes are those of one tensor-parallel rank, and with several stages of the fullest one; speeds are bounds.

    bytes_per_token     what a further token costs at long context
    constant_bytes      what a sequence has beside that
    bytes_per_sequence  at the asked context
    smaller             bytes_per_sequence of the baseline over this one's
    pool_tokens, sequences, longest_context_tokens   None without a GPU
    fits                whether the asked concurrency does
    gain_bound          a decode step of the baseline over this one's, at most, both with all of the asked sequences
    tokens_per_second_bound   of all sequences that run at once: the asked ones, or as many of them as fit
    break_even_tokens   the context from which on that outweighs the constant cost of quantizing; None: never, or no question
    measured_gain, measured_break_even_tokens   the same, with kernels' measured times
    waterfall           where a GPU's memory goes at the asked concurrency
    """

    name: str
    engine: str
    page_tokens: int
    bytes_per_token: float
    constant_bytes: int
    bytes_per_sequence: int
    smaller: float
    flag: str
    needs: str
    source: str
    bits_per_number: float | None
    pool_tokens: int | None = None
    sequences: int | None = None
    longest_context_tokens: int | None = None
    fits: bool | None = None
    step_seconds_bound: float | None = None
    gain_bound: float | None = None
    tokens_per_second_bound: float | None = None
    break_even_tokens: int | None = None
    measured_step_seconds: float | None = None
    measured_gain: float | None = None
    measured_break_even_tokens: int | None = None
    waterfall: tuple[Slice, ...] = ()


@dataclass(frozen=True)
class Refused:
    """A format that cannot keep this model, or does not run on this GPU."""

    name: str
    reason: str


@dataclass(frozen=True)
class Cell:
    """One context and batch: the baseline's KV share of a step, and what each format gains at most."""

    context_tokens: int
    batch: int
    kv_share: float
    gain_bound: dict[str, float]


@dataclass(frozen=True)
class Answer:
    """All of it. `notes` say what was assumed or left out."""

    model: CachedModel
    scenario: Scenario
    baseline: str
    formats: tuple[FormatAnswer, ...]
    refused: tuple[Refused, ...]
    plain_bytes_per_token: float
    plain_constant_bytes: int
    weights: Weights | None
    weights_unknown: str
    budget: Budget | None
    stages: tuple[Stage, ...]
    prefill_seconds_bound: float | None
    prefill_share: float | None
    kv_share: float | None
    cells: tuple[Cell, ...]
    advice: tuple[Advice, ...]
    measured: Measured | None
    notes: tuple[str, ...]

    def to_json(self) -> dict[str, Any]:
        """For programs."""
        model, weights, budget = self.model, self.weights, self.budget
        return {
            "kvarto_plan": 1,
            "model": {
                "name": model.name, "family": model.family, "attention": model.attention, "layers": len(model.layers),
                "caching_layers": model.caching_layers, "query_heads": model.query_heads or None, "max_tokens": model.max_tokens,
                "bf16_bytes_per_token": number(self.plain_bytes_per_token), "bf16_constant_bytes": self.plain_constant_bytes,
            },
            "weights": weights and {
                "dtype": weights.dtype, "nbytes": weights.nbytes, "parameters": weights.parameters.total,
                "active_parameters": weights.parameters.active, "source": weights.parameters.source,
            },
            "weights_unknown": self.weights_unknown or None,
            "gpu": budget and {
                "name": budget.gpu.name, "title": budget.gpu.title, "memory_bytes": budget.gpu.memory_bytes,
                "bandwidth_bytes_per_second": budget.gpu.bandwidth, "bf16_flops": budget.gpu.bf16_flops, "source": budget.gpu.source,
                "tp": budget.tp, "pp": budget.pp, "memory_share": budget.share, "overhead_bytes": budget.overhead_bytes,
            },
            "stages": [dataclasses.asdict(stage) for stage in self.stages],
            "scenario": dataclasses.asdict(self.scenario) | {"prompt_tokens": self.scenario.prompt_tokens},
            "baseline": self.baseline,
            "formats": [dataclasses.asdict(each) | {"bytes_per_token": number(each.bytes_per_token)} for each in self.formats],
            "refused": [dataclasses.asdict(each) for each in self.refused],
            "speeds_are": "upper bounds: memory and arithmetic at rated speed, nothing else takes time",
            "measured": self.measured and {"path": self.measured.path, "gpu": self.measured.gpu, "commit": self.measured.commit},
            "kv_share": self.kv_share, "prefill_share": self.prefill_share, "prefill_seconds_bound": self.prefill_seconds_bound,
            "curves": [dataclasses.asdict(cell) for cell in self.cells],
            "advice": [rule.to_json() for rule in self.advice],
            "notes": list(self.notes),
        }  # fmt: skip


def number(value: float) -> float:
    """A whole one as int."""
    return int(value) if value == int(value) else float(value)


@dataclass(frozen=True)
class Question:
    """What a plan is made of. `pool_bytes`: for keys and values, in place of a budget."""

    model: CachedModel
    formats: Sequence[KvFormat]
    baseline: KvFormat
    scenario: Scenario
    weights: Weights | None = None
    weights_unknown: str = ""
    budget: Budget | None = None
    pool_bytes: int | None = None
    measured: Measured | None = None
    layer_cost_seconds: float = LAYER_COST_SECONDS
    notes: tuple[str, ...] = field(default=())

    def group(self, sequences: int) -> int:
        """How many of them a stage works on at once: with several stages each has a group of its own."""
        return -(-sequences // (self.budget.pp if self.budget else 1))

    @property
    def tp(self) -> int:
        """Ranks that share heads."""
        return self.budget.tp if self.budget else 1


def answer(question: Question) -> Answer:
    """Work everything out. Raises UsageError for a parallelism that the model does not take."""
    model, scenario, budget, weights = question.model, question.scenario, question.budget, question.weights
    notes = [*model.notes, *question.notes]
    made = [Stage(0, len(model.layers), 0, question.pool_bytes)] if question.pool_bytes is not None else []
    machine = None
    if budget is not None:
        notes += check_parallel(model, budget.tp, budget.pp)
        if budget.pp > 1:
            notes.append(
                f"speeds: the sequences go through the {budget.pp} stages in as many groups; a step is a group's way through all of them"
            )
        if weights is not None:
            made = stages(model, weights, budget)
            machine = Machine(model, weights, budget.gpu, budget.tp, question.layer_cost_seconds)
    answers, refused = [], []
    for kv in question.formats:
        reason = kv.refuses(model) or (kv.refuses_gpu(budget.gpu.sm) if budget and budget.gpu.sm else None)
        if reason:
            refused.append(Refused(kv.name, reason))
        else:
            answers.append(_format(question, kv, made, machine))
    if model.max_tokens and scenario.context_tokens > model.max_tokens:
        notes.append(
            f"the model was made for {model.max_tokens:,} tokens, fewer than the {scenario.context_tokens:,} that are asked"
        )
    plain = plain_bytes(model)
    base, batch, context = question.baseline, scenario.concurrency, scenario.context_tokens
    share = machine.kv_share(base, question.group(batch), context) if machine else None
    prefill = machine.prefill_seconds(scenario.prompt_tokens) if machine else None
    prefill_share = None
    if machine and prefill is not None:
        generating = scenario.output_tokens * machine.step_seconds(base, question.group(batch), context) / batch
        prefill_share = prefill / (prefill + generating)
    signals = _signals(question, answers, made, machine, share, prefill_share)
    return Answer(
        model, scenario, base.name, tuple(answers), tuple(refused), float(plain.growth), plain.constant, weights, question.weights_unknown, budget,
        tuple(made), prefill, prefill_share, share, tuple(_cells(question, machine, answers)) if machine else (), tuple(advise(signals)),
        question.measured, tuple(notes),
    )  # fmt: skip


def _fullest(question: Question, kv: KvFormat) -> Bytes:
    """On the stage whose ranks hold the most of a sequence."""
    if question.budget is None or question.budget.pp == 1:
        return bytes_of(kv, question.model, question.tp)
    start, parts = 0, []
    for count in stage_layers(len(question.model.layers), question.budget.pp):
        parts.append(bytes_of(kv, question.model, question.tp, start, start + count))
        start += count
    return max(parts, key=lambda part: part.sequence(question.scenario.context_tokens))


def _format(question: Question, kv: KvFormat, made: list[Stage], machine: Machine | None) -> FormatAnswer:
    scenario, base = question.scenario, question.baseline
    context, batch = scenario.context_tokens, scenario.concurrency
    held = _fullest(question, kv)
    nbytes = held.sequence(context)
    found: dict[str, Any] = {}
    if made:
        there = room(kv, question.model, made, question.tp)
        sequences = there.sequences(context)
        found |= {
            "pool_tokens": there.pool_tokens(context), "sequences": sequences, "fits": sequences >= batch,
            "longest_context_tokens": there.longest_context(batch, question.model.max_tokens),
            "waterfall": _waterfall(question, made, there) if question.budget else (),
        }  # fmt: skip
    if machine:
        found |= {
            "step_seconds_bound": machine.step_seconds(kv, question.group(batch), context),
            "gain_bound": machine.gain(kv, base, question.group(batch), context),
        }
        running = min(batch, found.get("sequences", batch))
        found["tokens_per_second_bound"] = (
            running / machine.step_seconds(kv, question.group(running), context) if running else 0.0
        )
        if kv.name != base.name:
            found["break_even_tokens"] = machine.break_even_tokens(kv, base, question.group(batch))
        if question.measured:
            found |= _measured(question, machine, kv)
    return FormatAnswer(
        kv.name, kv.engine, kv.page_tokens, float(held.growth), held.constant, nbytes,
        _fullest(question, base).sequence(context) / max(1, nbytes), kv.flag, kv.needs, kv.source, bits_per_number(kv, question.model), **found,
    )  # fmt: skip


def _measured(question: Question, machine: Machine, kv: KvFormat) -> dict[str, Any]:
    assert question.measured
    measured, base = question.measured, question.baseline
    context, batch = question.scenario.context_tokens, question.group(question.scenario.concurrency)
    mine, other = (machine.measured_seconds(measured, each, batch, context) for each in (kv, base))
    found: dict[str, Any] = {"measured_step_seconds": mine, "measured_gain": other / mine if mine and other else None}
    if kv.name != base.name:
        found["measured_break_even_tokens"] = machine.measured_break_even_tokens(measured, kv, base, batch)
    return found


def _waterfall(question: Question, made: list[Stage], there: Room) -> tuple[Slice, ...]:
    """Of the fullest stage: what is left to others, weights, overhead, constant and growing parts of all sequences, and what is free or missing."""
    assert question.budget
    budget, context, batch = question.budget, question.scenario.context_tokens, question.scenario.concurrency
    number, (held, pool) = min(enumerate(there.parts), key=lambda pair: pair[1][1] - batch * pair[1][0].peak(context))
    total = held.peak(context)
    constant = total - min(total, int(held.growth * context))
    usable = int(budget.gpu.memory_bytes * budget.share)
    return (
        Slice("not the engine's", budget.gpu.memory_bytes - usable), Slice("weights", made[number].weights_bytes),
        Slice("overhead", budget.overhead_bytes), Slice("windows, states, open pages", batch * constant),
        Slice("keys and values that grow", batch * (total - constant)), Slice("free", pool - batch * total),
    )  # fmt: skip


def _cells(question: Question, machine: Machine, answers: list[FormatAnswer]) -> list[Cell]:
    by_name = {kv.name: kv for kv in question.formats}
    chosen = [by_name[each.name] for each in answers]
    contexts = [
        context for context in CONTEXTS if not question.model.max_tokens or context <= question.model.max_tokens
    ] or list(CONTEXTS[:1])
    return [
        Cell(
            context, batch, machine.kv_share(question.baseline, question.group(batch), context),
            {kv.name: machine.gain(kv, question.baseline, question.group(batch), context) for kv in chosen},
        )
        for batch in sorted({*BATCHES, question.scenario.concurrency})
        for context in contexts
    ]  # fmt: skip


_STANDS_FOR = {
    "bf16": ("bf16",), "fp8": ("fp8", "vllm:fp8_e4m3"), "int4": ("int4", "vllm:int4_per_token_head"), "int2": ("int2",),
}  # fmt: skip


def _signals(
    question: Question, answers: list[FormatAnswer], made: list[Stage], machine: Machine | None, share: float | None, prefill_share: float | None
) -> dict[str, float]:  # fmt: skip
    """What advice is given by; those that are not known are left out."""
    signals = model_signals(question.model, question.scenario.context_tokens)
    signals["concurrency"] = question.scenario.concurrency
    by_name = {each.name: each for each in answers}
    if question.budget:
        signals["sm"] = question.budget.gpu.sm
    if made:
        signals["pool_bytes"] = min(stage.pool_bytes for stage in made)
        for name, stand_ins in _STANDS_FOR.items():
            found = next((by_name[each] for each in stand_ins if each in by_name), None)
            if found is not None:
                signals[f"fits_{name}"] = bool(found.fits)
    if machine and share is not None and prefill_share is not None:
        signals |= {"kv_share": share, "prefill_share": prefill_share}
        fp8 = next((by_name[each] for each in _STANDS_FOR["fp8"] if each in by_name), None)
        if fp8 is not None:
            least = fp8.break_even_tokens
            signals["below_break_even"] = least is None or question.scenario.context_tokens < least
    return signals


def model_signals(model: CachedModel, context_tokens: int) -> dict[str, float]:
    """What advice goes by that a model alone tells."""
    plain = plain_bytes(model)
    return {
        "latent": any(isinstance(part, Latent) for part in model.parts),
        "widest_head": max(
            (max(each.k_dim, each.v_dim) for each in model.parts if isinstance(each, KeyValue)), default=0
        ),
        "constant_share": plain.constant / max(1, plain.sequence(context_tokens)),
    }
