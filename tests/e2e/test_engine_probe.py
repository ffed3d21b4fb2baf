"""The quality probe measures what it says, and nobody but its metrics shows that it is there."""

from __future__ import annotations

import itertools
import threading
from collections import Counter
from collections.abc import Sequence
from dataclasses import replace
from pathlib import Path
from typing import Any

import pytest

pytest.importorskip("torch")
pytest.importorskip("transformers")

import tiny
import torch

import kvarto
from kvarto.engine import probe as module
from kvarto.engine.core import EngineCore, Options, Output
from kvarto.engine.engine import Ask, Engine
from kvarto.engine.probe import Probe, Probing, Tally
from kvarto.engine.request import Finish, Request, Sampling
from kvarto.errors import UnknownName, UsageError
from kvarto.formats import parse_policy
from kvarto.models.load import LoadedModel

ROOMY, SMALL = 1 << 23, 1 << 19
MOST = Sampling(max_tokens=12, temperature=0, ignore_eos=True)
ALL = Probing(1.0)
NAMES = itertools.count()


def core(*formats: str, probe: Probing = ALL, memory: int = ROOMY, family: str = "llama") -> EngineCore:
    options = Options(memory, 96, most_running=8, probe=probe, poison=True)
    return EngineCore(tiny.model(family), [parse_policy(text) for text in formats], options)


def request(length: int = 150, sampling: Sampling = MOST, **options: Any) -> Request:
    number = next(NAMES)
    tokens = tiny.prompt(length, seed=number)["input_ids"][0].tolist()
    return Request(str(number), tokens, sampling, **options)


def drive(engine: EngineCore, requests: Sequence[Request]) -> list[Output]:
    """One after another, each with its probe."""
    outputs: list[Output] = []
    for each in requests:
        engine.add(each)
        while not engine.idle:
            outputs += engine.step()
            engine.check()
    assert engine.memory.prefixes.held_bytes == 0
    return outputs


def probe_of(engine: EngineCore) -> Probe:
    assert engine.probe is not None
    return engine.probe


def outcomes(engine: EngineCore) -> dict[str, int]:
    found = Counter[str]()
    for (*_, outcome), count in probe_of(engine).outcomes.items():
        found[outcome] += count
    return dict(found)


def mean(tally: Tally) -> float:
    return tally.kl_nats / tally.positions


# ---- what it measures ------------------------------------------------------------------------------------------------


@pytest.mark.parametrize("family", ["llama", "gemma3_text"])
@pytest.mark.parametrize("text", ["int8", "int4", "int2+sink0"])
def test_it_finds_what_two_caches_show(family: str, text: str) -> None:
    """Read by transformers with a cache of ours in each format; and what is sampled by penalties and chance is compared before these."""
    engine, most = core(text, family=family), Sampling(max_tokens=12, seed=1, presence_penalty=2, ignore_eos=True)
    asked = request(sampling=most)
    drive(engine, [asked])
    model, tokens = tiny.model(family), torch.tensor([asked.tokens[:-1]])
    places = slice(asked.prompt_tokens - 1, None)
    base, other = (
        model(tokens, cache=kvarto.Cache(model, name)).logits[0, places].double().log_softmax(-1)
        for name in ("bf16", text)
    )
    kl = float((base.exp() * (base - other)).sum())
    tally = probe_of(engine).tallies[0, 0]
    assert tally.positions == 12
    assert tally.kl_nats == pytest.approx(kl, rel=0.02, abs=2e-4)
    assert tally.agreed == int((base.argmax(-1) == other.argmax(-1)).sum())
    assert outcomes(engine) == {"done": 1}


def test_the_same_numbers_in_another_format_differ_by_rounding_only(monkeypatch: pytest.MonkeyPatch) -> None:
    """Against itself: pages that are all raw, read as another policy in other chunks."""
    monkeypatch.setattr(module, "BASELINE", parse_policy("fp32"))
    engine = core("fp32+window64", family="qwen3")
    drive(engine, [request(length) for length in (5, 64, 150, 300)])
    tally = probe_of(engine).tallies[0, 0]
    assert tally.positions == tally.agreed == 48
    assert mean(tally) < 1e-7


def test_a_bf16_model_against_itself() -> None:
    """Its rounding is the noise under all other numbers, and its logits are kept as they are."""
    model = tiny.model("llama", dtype=torch.bfloat16, initializer_range=0.1)
    engine = EngineCore(
        model, [parse_policy("bf16+sink64"), parse_policy("int4")], Options(ROOMY, 96, probe=ALL, most_running=8)
    )
    drive(engine, [request(policy=i % 2) for i in range(6)])
    noise, seen = (mean(probe_of(engine).tallies[policy, 0]) for policy in (0, 1))
    assert noise < 1e-5
    assert seen > 10 * noise
    assert engine.forward.logits_dtype == torch.bfloat16


def test_what_was_found_in_the_prefix_cache_is_read_again_from_the_first_place_on() -> None:
    engine = core("int8", "bf16")
    asked = request(60, Sampling(max_tokens=150, temperature=0, ignore_eos=True))
    again = Request("again", asked.tokens[:60], asked.sampling)
    drive(engine, [asked])
    before = probe_of(engine).tallies[0, 0].kl_nats
    drive(engine, [again])
    tally = probe_of(engine).tallies[0, 0]
    assert tally.kl_nats == pytest.approx(2 * before, rel=1e-3)
    assert tally.positions % 2 == 0


def test_long_texts_keep_so_many_places_evenly() -> None:
    trace = module.Trace()
    for place in range(10, 1010):
        trace.add(place, torch.full((4,), float(place)), torch.float32)
    assert 32 <= len(trace.places) <= module.MOST_POSITIONS
    assert {b - a for a, b in itertools.pairwise(trace.places)} == {16}
    assert [float(row[0]) for row in trace.rows] == trace.places
    assert trace.places[0] == 10


def test_rows_keep_the_models_own_numbers() -> None:
    trace, logits = module.Trace(), torch.randn(3, 8).bfloat16()
    trace.add(0, logits.float()[1], torch.bfloat16)
    assert torch.equal(trace.rows[0], logits[1])
    assert trace.rows[0].untyped_storage().nbytes() == 16


def test_contexts() -> None:
    assert [module.context_of(tokens) for tokens in (1, 1024, 1025, 4096, 16385, 1 << 16, 1 << 20)] == [
        0, 0, 1, 1, 3, 3, 4,
    ]  # fmt: skip
    assert len(module.CONTEXT_NAMES) == len(module.CONTEXTS) + 1


def test_impossible_tokens_do_not_count_and_impossible_answers_are_no_number() -> None:
    base, other = torch.tensor([0.5, 0.5, 0.0]).log(), torch.tensor([0.25, 0.5, 0.25]).log()
    assert module.kl_nats(base, other) == pytest.approx(0.5 * torch.log(torch.tensor(2.0)).item())
    assert module.kl_nats(base, base) == 0
    with pytest.raises(kvarto.errors.NotFinite):
        module.kl_nats(other, base)


# ---- who is chosen ---------------------------------------------------------------------------------------------------


def test_a_share_is_chosen_by_name_alone() -> None:
    chosen = [name for name in map(str, range(10_000)) if module._is_chosen(name, 0.05)]
    assert 400 < len(chosen) < 600
    assert chosen == [name for name in map(str, range(10_000)) if module._is_chosen(name, 0.05)]
    assert not module._is_chosen("0", 0)
    assert all(module._is_chosen(str(i), 1) for i in range(100))


def test_bf16_and_who_must_not_be_probed_are_left_alone() -> None:
    engine = core("int8", "bf16")
    drive(engine, [request(policy=1), request(probed=False)])
    assert outcomes(engine) == {}
    assert len(engine.memory.offers) == 2


def test_without_a_share_nothing_is_set_up() -> None:
    engine = core("int8", probe=Probing())
    assert engine.probe is None
    assert len(engine.memory.offers) == len(engine.policies) == 1
    assert len(core("int8").memory.offers) == 2


@pytest.mark.parametrize(
    ("options", "message"),
    [
        ({"share": 1.5}, "probe_share: expected 0 to 1, got 1.5"),
        ({"share": float("nan")}, "probe_share: expected 0 to 1, got nan"),
        ({"share": 0.5, "threshold_nats": 0.0}, "probe_threshold: expected more than 0 nats"),
        ({"threshold_nats": 0.1}, "probe_threshold: expected a probe_share above 0 with it"),
    ],
)
def test_options_that_are_refused(options: dict[str, float], message: str) -> None:
    with pytest.raises(UsageError, match=message):
        Probing(**options)


def test_a_threshold_needs_bf16_to_be_offered() -> None:
    with pytest.raises(
        UsageError, match="probe_threshold: expected bf16 among the formats offered, got int8, int4; add --also bf16"
    ):
        core("int8", "int4", probe=Probing(1.0, 0.1))


# ---- nobody else notices ---------------------------------------------------------------------------------------------


def crowd() -> list[Request]:
    samplings = [Sampling(max_tokens=10 + 7 * i, temperature=i % 2, seed=i, ignore_eos=True) for i in range(6)]
    prompts = [tiny.prompt(40 + 50 * i, seed=i)["input_ids"][0].tolist() for i in range(6)]
    return [Request(f"crowd {i}", prompts[i], samplings[i], policy=i % 2) for i in range(6)]


@pytest.mark.parametrize("memory", [ROOMY, SMALL])
def test_clients_get_the_same_with_and_without(memory: int) -> None:
    texts = []
    for probing in (ALL, Probing()):
        engine, requests = core("int4", "int8", probe=probing, memory=memory), crowd()
        for each in requests:
            engine.add(each)
        while not engine.idle:
            engine.step()
            engine.check()
        assert engine.memory.prefixes.held_bytes == 0
        texts.append([each.generated for each in requests])
        if probing is ALL:
            assert sum(outcomes(engine).values()) == 6
    assert texts[0] == texts[1]


def step_until_it_reads(engine: EngineCore) -> None:
    while probe_of(engine)._running is None:
        engine.step()
        assert not engine.idle, "it was never probed"


def test_it_reads_a_page_at_a_time_and_a_tenth_of_the_time_while_clients_are_here(
    monkeypatch: pytest.MonkeyPatch,
) -> None:
    engine = core("int4")
    probe = probe_of(engine)
    now = 0.0

    def clock() -> float:
        nonlocal now
        now += 1  # twice in a pass: it takes a second
        return now

    monkeypatch.setattr(module.time, "monotonic", clock)
    engine.add(request(600))
    while probe.idle:
        engine.step()
    read: list[int] = []
    monkeypatch.setattr(probe, "_score", lambda _, work: read.append(work.count))
    for _ in range(30):
        before = len(read)
        probe.step(96, busy=True, starved=False)
        read += [0] * (len(read) == before)
    assert read[0] == 64
    assert sum(count > 0 for count in read) <= 4
    probe.step(96, busy=False, starved=True)
    assert read[-1] == 0
    probe.step(96, busy=False, starved=False)
    assert read[-1] == 64


def test_it_gives_way_to_who_needs_memory() -> None:
    engine = core("int4", memory=SMALL // 2)
    engine.add(request(200))
    step_until_it_reads(engine)
    probe = probe_of(engine)
    reader = probe._running
    assert reader is not None
    assert reader.request.holding.length > 0
    most = engine.memory.capacity_tokens(0) - 1
    large = request(most - 2, Sampling(max_tokens=1, temperature=0), probed=False)
    outputs = drive(engine, [large])
    assert [output.request for output in outputs if output.finish is Finish.LENGTH] == [large]
    assert large.preemptions == 0
    assert outcomes(engine) == {"skipped": 1}


def test_without_room_beside_what_is_held_it_does_not_begin(monkeypatch: pytest.MonkeyPatch) -> None:
    engine = core("int4", memory=SMALL)
    monkeypatch.setattr(engine.memory, "has_room", lambda _: False)
    drive(engine, [request()])
    assert outcomes(engine) == {"skipped": 1}
    tokens = engine.memory.capacity_tokens(1) + 50
    assert tokens < engine.memory.capacity_tokens(0)
    engine = core("int4", memory=SMALL)
    drive(engine, [request(tokens)])
    assert outcomes(engine) == {"skipped": 1}


def test_no_more_are_kept_than_may() -> None:
    engine = core("int4")
    requests = [request(20) for _ in range(module.MOST_KEPT + 3)]
    for each in requests:
        engine.add(each)
    while not engine.idle:
        engine.step()
    assert outcomes(engine) == {"done": module.MOST_KEPT, "skipped": 3}


def test_what_clients_leave_or_what_fails_is_forgotten() -> None:
    engine = core("int4")
    left = request()
    engine.add(left)
    for _ in range(5):
        engine.step()
    engine.abort(left)
    engine.abort(left)
    assert left.finish is Finish.ABORT
    assert engine.idle
    assert probe_of(engine)._traces == {}
    assert outcomes(engine) == {}


def test_closing_leaves_nothing_held() -> None:
    engine = core("int4")
    for length in (600, 70):
        engine.add(request(length))
    while not (probe_of(engine)._running and probe_of(engine)._queue):
        engine.step()
    assert engine.memory.prefixes.held_bytes > 0
    engine.stop_probing()
    engine.check()
    assert outcomes(engine) == {"skipped": 2}
    assert engine.idle
    assert engine.memory.prefixes.held_bytes == 0
    drive(engine, [request()])
    assert outcomes(engine) == {"skipped": 2}


@pytest.mark.parametrize("error", [RuntimeError("out of memory"), None])
def test_a_probe_that_fails_harms_nobody(error: RuntimeError | None, monkeypatch: pytest.MonkeyPatch) -> None:
    engine = core("int4")
    other = request(100, Sampling(max_tokens=100, temperature=0, ignore_eos=True), probed=False)
    engine.add(other)
    engine.add(request(80))
    run = engine.forward.run

    def fail(step: Any) -> Any:
        if probe_of(engine)._running is None or step.plan.works[0].request is not probe_of(engine)._running.request:
            return run(step)
        if error:
            raise error
        result = run(step)
        return replace(result, logits=torch.full_like(result.logits, torch.nan))

    monkeypatch.setattr(engine.forward, "run", fail)
    while not engine.idle:
        assert not [output.error for output in engine.step() if output.error]
        engine.check()
    assert outcomes(engine) == {"failed": 1}
    assert len(other.generated) == 100
    assert engine.memory.prefixes.held_bytes == 0


# ---- routing ---------------------------------------------------------------------------------------------------------

SHARP = Probing(1.0, 0.1)


def test_a_bad_format_is_routed_and_a_good_one_is_not() -> None:
    engine = core("int2+sink0", "int8", "bf16", probe=SHARP)
    probe = probe_of(engine)
    drive(engine, [request(policy=i % 2) for i in range(2 * module.FEWEST_PROMPTS - 2)])
    assert probe.routed == set()
    drive(engine, [request(policy=i % 2) for i in range(12)])
    assert probe.routed == {(0, 0)}
    assert mean(probe.tallies[0, 0]) > 1
    assert mean(probe.tallies[1, 0]) < 0.05
    assert (probe.routes(0, 500, 10), probe.routes(0, 5000, 10), probe.routes(1, 500, 10)) == (True, False, False)
    probe.routed = {(0, 1)}
    assert (probe.routes(0, 500, 10), probe.routes(0, 500, 1000)) == (False, True)  # the second one's text gets there


def test_the_same_prompt_again_is_no_evidence() -> None:
    engine = core("int2+sink0", "bf16", probe=SHARP)
    same = request()
    drive(engine, [Request(str(i), same.tokens[: same.prompt_tokens], MOST) for i in range(2 * module.FEWEST_PROMPTS)])
    assert probe_of(engine).routed == set()
    assert len(probe_of(engine).tallies[0, 0].recent) == 1


def test_one_outlier_does_not_route() -> None:
    tally = Tally()
    for number in range(20):
        tally.add(bytes([number]), [module.Score(0, 50.0 if number == 7 else 0.01, True)])
    assert tally.kl_nats / tally.positions > 2
    assert tally.lower_bound_nats < 0.1


def test_old_positions_are_forgotten() -> None:
    tally = Tally()
    for number, kl in enumerate([5.0] * 100 + [0.5] * 100):
        tally.add(bytes([number]), [module.Score(i, kl, True) for i in range(32)])
    assert len(tally.recent) == module.WINDOW_POSITIONS // 32
    assert tally.lower_bound_nats == pytest.approx(0.5)
    assert tally.positions == 6400


def engine_of(*also: str, **options: Any) -> Engine:
    loaded = LoadedModel(tiny.model("llama"), None, "tiny", "tiny", Path())
    return Engine(loaded, kv="int2+sink0", also=also, memory="8MiB", step_tokens=128, most_running=4, **options)


def settle(engine: Engine) -> None:
    end = threading.Event()
    for _ in range(3000):
        if engine.core.idle:
            return
        end.wait(0.01)
    raise AssertionError("it never came to rest")


def test_who_names_no_format_gets_bf16_where_the_default_is_bad() -> None:
    with engine_of("bf16", probe=SHARP) as engine:
        prompts = [tiny.prompt(150, seed=i)["input_ids"][0].tolist() for i in range(12)]
        for prompt in prompts:
            engine.generate([prompt], MOST)
            settle(engine)
        (routed,), (named,) = engine.generate(prompts[:1], MOST), engine.generate(prompts[:1], MOST, kv="int2+sink0")
        assert (routed.kv, named.kv) == ("bf16", "int2+sink0")
        policy = engine.core.probe.baseline  # type: ignore[union-attr]
        assert engine.route(0, 150, 12) == policy
        assert engine.route(0, 150, engine.offers[policy].most_tokens) == 0  # bf16 could not serve it at all


def test_bf16_pages_for_the_probe_alone_are_not_offered() -> None:
    with engine_of(probe=ALL) as engine:
        assert (engine.formats, list(map(str, engine.core.policies))) == (["int2+sink0"], ["int2+sink0", "bf16"])
        assert [offer.name for offer in engine.offers] == ["int2+sink0"]
        with pytest.raises(UnknownName):
            engine.policy_of("bf16")
        with pytest.raises(UnknownName, match="bf16"):
            engine.generate([Ask([5] * 70, MOST, "bf16")])
        with pytest.raises(UnknownName, match="bf16"):
            engine.submit(Ask([5] * 70, MOST, "bf16"), lambda _: None)


def test_warming_up_reads_pages_of_all_formats_and_is_not_probed() -> None:
    with engine_of(probe=ALL) as engine:
        engine.warm_up()
        assert [engine.core.memory.sealed(policy)[0] > 0 for policy in range(2)] == [True, True]
        settle(engine)
        assert not engine.core.probe.outcomes  # type: ignore[union-attr]


def test_an_engine_closes_at_once_while_it_probes() -> None:
    for drain in (True, False):
        engine = engine_of(probe=ALL)
        engine.generate([[5] * 900] * 3, MOST)
        engine.close(drain=drain, timeout_seconds=20)
        assert not engine._loop._thread.is_alive()
        assert engine.core.memory.prefixes.held_bytes == 0
        engine.core.check()
