"""Decode steps replayed as CUDA graphs give what they give without: requests that come, go, fail and wait, pages that fill, freed memory NaN."""

from __future__ import annotations

from typing import Any

import pytest

pytest.importorskip("torch")
pytest.importorskip("triton")
pytest.importorskip("transformers", minversion="5.24")

import torch
import transformers
from cases import DEVICE, needs_gpu

from kvarto.engine.core import EngineCore, Options
from kvarto.engine.probe import Probing
from kvarto.engine.request import Request, Sampling
from kvarto.formats import parse_policy

pytestmark = [pytest.mark.gpu, needs_gpu]

VOCABULARY, GENERATED = 96, 70
CONFIG: dict[str, Any] = {
    "vocab_size": VOCABULARY, "hidden_size": 256, "intermediate_size": 256, "num_hidden_layers": 3, "num_attention_heads": 4,
    "num_key_value_heads": 2, "head_dim": 64, "max_position_embeddings": 2048, "initializer_range": 0.05,
}  # fmt: skip
# Log probabilities of a model in bfloat16 whose products are of other sizes, so that sums are taken in another order.
CLOSE = 0.08


class Forced:
    """A guide that lets a text go on in one way only, so that runs whose logits differ in the last digit stay comparable."""

    def __init__(self, tokens: list[int]) -> None:
        self._left = list(reversed(tokens))

    def apply(self, logits: torch.Tensor) -> torch.Tensor:
        only = torch.full_like(logits, -torch.inf)
        only[self._left[-1]] = 0.0
        return only

    def accept(self, token: int) -> None:
        assert token == self._left.pop()

    def left(self) -> list[int]:
        """The tokens to come."""
        return self._left[::-1]


def make_model(*, broken_token: int | None = None) -> Any:
    """Random weights in bfloat16; the embedding of `broken_token` is NaN."""
    torch.manual_seed(0)
    with torch.device(DEVICE):
        model = transformers.LlamaForCausalLM(transformers.LlamaConfig(**CONFIG)).to(torch.bfloat16).eval()
    if broken_token is not None:
        with torch.no_grad():
            model.get_input_embeddings().weight[broken_token] = torch.nan
    return model


def requests_for(formats: list[str]) -> list[Request]:
    """Six texts that can go on in one way only. Their lengths are such that rows become fewer and pages fill at different steps."""
    generator, requests = torch.Generator().manual_seed(1), []
    for i, length in enumerate((1, 63, 64, 130, 200, 340)):
        tokens = torch.randint(0, VOCABULARY - 1, (length + GENERATED,), generator=generator).tolist()
        sampling = Sampling(max_tokens=GENERATED - 10 * i, temperature=0, ignore_eos=True, logprobs=0)
        guide = Forced(tokens[length:])
        requests.append(Request(str(i), tokens[:length], sampling, policy=i % len(formats), guide=guide))
    return requests


def make_engine(model: Any, formats: list[str], *, memory_bytes: int = 1 << 24, **options: Any) -> EngineCore:
    chosen = Options(memory_bytes, step_tokens=128, most_running=8, poison=True, **options)
    return EngineCore(model, [parse_policy(text) for text in formats], chosen)


def run(engine: EngineCore, requests: list[Request]) -> tuple[list[list[float]], dict[str, str]]:
    """Log probabilities of the forced tokens of each request, and the errors of those that failed, by id."""
    got: dict[Request, list[float]] = {request: [] for request in requests}
    errors: dict[str, str] = {}
    for request in requests[:4]:
        engine.add(request)
    for number in range(1000):
        if number == 20:  # prefill in between
            for request in requests[4:]:
                engine.add(request)
        if engine.idle and number > 20:
            break
        for output in engine.step():
            if output.error:
                errors[output.request.id] = output.error
                continue
            assert output.choice is not None
            assert output.choice.logprob is not None
            got[output.request].append(output.choice.logprob)
        engine.check()
    assert engine.idle
    assert engine.memory.prefixes.held_bytes == 0
    return list(got.values()), errors


def expected_of(model: Any, formats: list[str]) -> list[list[float]]:
    """The same without graphs."""
    engine = make_engine(model, formats, graphs=False)
    expected, errors = run(engine, requests_for(formats))
    assert engine.graphs.replays == 0
    assert not errors
    return expected


def assert_alike(got: list[list[float]], expected: list[list[float]]) -> None:
    for one, other in zip(got, expected, strict=True):
        assert one == pytest.approx(other, abs=CLOSE)


@pytest.mark.parametrize("formats", [["int4"], ["bf16"], ["int8+window64"], ["kivi2", "fp8"]], ids="+".join)
def test_replayed_steps(formats: list[str]) -> None:
    model = make_model()
    engine = make_engine(model, formats)
    got, errors = run(engine, requests_for(formats))
    assert not errors
    assert engine.graphs.why_not is None
    # Two formats at once are not replayed, only what is left when one of them has ended.
    assert engine.graphs.replays > (20 if len(formats) == 1 else 5)
    assert_alike(got, expected_of(model, formats))


def test_a_broken_row_of_a_replayed_step_ends_one_request() -> None:
    """Its keys are NaN. The others, rows of the same graph, and whoever gets its pages afterwards, are as without it."""
    broken, model = VOCABULARY - 1, make_model(broken_token=VOCABULARY - 1)
    requests, engine = requests_for(["int4"]), make_engine(model, ["int4"])
    replays_before = 12
    requests[2].guide = Forced([*requests[2].guide.left()[:replays_before], broken, 0])
    got, errors = run(engine, requests)
    assert engine.graphs.replays > 20
    assert list(errors) == ["2"]
    assert "not finite" in errors["2"]
    expected = expected_of(model, ["int4"])
    expected[2], got[2] = expected[2][:replays_before], got[2][:replays_before]
    assert_alike(got, expected)


def test_preempted_between_replays() -> None:
    """Memory for two thirds of them: who waited comes back to other pages, in rows of other graphs."""
    model = make_model()
    engine = make_engine(model, ["bf16"], memory_bytes=1_300_000)
    got, errors = run(engine, requests_for(["bf16"]))
    assert not errors
    assert engine.scheduler.preemptions > 0
    assert engine.graphs.replays > 10
    assert_alike(got, expected_of(model, ["bf16"]))


def test_replayed_steps_are_probed() -> None:
    """The logits of a replayed step lie where the next replay writes: the probe keeps them as they were."""
    model = make_model()
    engine = make_engine(model, ["int8"], probe=Probing(1.0))
    _, errors = run(engine, requests_for(["int8"]))
    assert not errors
    assert engine.graphs.replays > 20
    assert engine.probe is not None
    done = sum(count for (_, _, outcome), count in engine.probe.outcomes.items() if outcome == "done")
    tallies = engine.probe.tallies.values()
    assert done == 6
    assert sum(tally.positions for tally in tallies) > 200
    assert sum(tally.kl_nats for tally in tallies) / sum(tally.positions for tally in tallies) < 1e-3


def test_a_recording_that_fails(monkeypatch: pytest.MonkeyPatch, caplog: pytest.LogCaptureFixture) -> None:
    """It is tried once for each shape, said, and the steps run as they do without graphs."""
    model = make_model()
    engine = make_engine(model, ["int4"])
    forward, tried = engine.forward.run, []

    def fails(step: Any) -> Any:
        result = forward(step)
        if torch.cuda.is_current_stream_capturing():
            tried.append(step)
            raise RuntimeError("no such luck")
        return result

    monkeypatch.setattr(engine.forward, "run", fails)
    got, errors = run(engine, requests_for(["int4"]))
    assert not errors
    assert engine.graphs.replays == 0
    assert len(tried) == len(engine.graphs.failed) > 1
    assert "no such luck" in caplog.text
    assert_alike(got, expected_of(model, ["int4"]))
