"""Decode steps replayed as CUDA graphs give what the same steps give without: requests that come and go, pages that fill, freed memory NaN."""

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


def run(model: Any, formats: list[str], *, graphs: bool) -> tuple[list[list[float]], EngineCore]:
    """Log probabilities of the forced tokens of each request."""
    chosen = Options(1 << 24, step_tokens=128, most_running=8, poison=True, graphs=graphs)
    engine = EngineCore(model, [parse_policy(text) for text in formats], chosen)
    generator = torch.Generator().manual_seed(1)
    requests = []
    for i, length in enumerate((1, 63, 64, 130, 200, 340)):
        tokens = torch.randint(0, VOCABULARY, (length + GENERATED,), generator=generator).tolist()
        most = GENERATED - 10 * i  # so that rows become fewer
        sampling = Sampling(max_tokens=most, temperature=0, ignore_eos=True, logprobs=0)
        requests.append(
            Request(str(i), tokens[:length], sampling, policy=i % len(formats), guide=Forced(tokens[length:]))
        )
    got: dict[Request, list[float]] = {request: [] for request in requests}
    for request in requests[:4]:
        engine.add(request)
    for number in range(1000):
        if number == 20:  # prefill in between
            for request in requests[4:]:
                engine.add(request)
        if engine.idle and number > 20:
            break
        for output in engine.step():
            assert not output.error
            assert output.choice is not None
            assert output.choice.logprob is not None
            got[output.request].append(output.choice.logprob)
        engine.check()
    assert engine.memory.prefixes.held_bytes == 0
    return list(got.values()), engine


@pytest.mark.parametrize("formats", [["int4"], ["bf16"], ["int8+window64"], ["kivi2", "fp8"]], ids="+".join)
def test_replayed_steps(formats: list[str]) -> None:
    torch.manual_seed(0)
    with torch.device(DEVICE):
        model = transformers.LlamaForCausalLM(transformers.LlamaConfig(**CONFIG)).to(torch.bfloat16).eval()
    expected, plain = run(model, formats, graphs=False)
    got, engine = run(model, formats, graphs=True)
    assert plain.graphs.replays == 0
    assert engine.graphs.why_not is None
    # Two formats at once are not replayed, only what is left when one of them has ended.
    assert engine.graphs.replays > (20 if len(formats) == 1 else 5)
    for one, other in zip(got, expected, strict=True):
        assert one == pytest.approx(other, abs=CLOSE)
