"""How tokens are chosen: what may come, how often, and that a seed decides alone."""

from __future__ import annotations

from collections import Counter
from typing import Any

import pytest

pytest.importorskip("torch")

import torch

from kvarto.engine.request import Request, Sampling
from kvarto.engine.sampling import choose
from kvarto.errors import UsageError

PROBABILITIES = [0.4, 0.3, 0.2, 0.06, 0.04]
LOGITS = torch.tensor([PROBABILITIES]).log() + 3.0


def draw(count: int = 4000, generated: tuple[int, ...] = (), **sampling: Any) -> dict[int, float]:
    """Shares of the tokens, one seed for each draw."""
    counts: Counter[int] = Counter()
    for seed in range(count):
        request = Request("a", [1], Sampling(seed=seed, **sampling))
        request.tokens += generated
        counts[choose(LOGITS, [request])[0].token] += 1
    return {token: counts[token] / count for token in sorted(counts)}


def close(shares: dict[int, float], expected: dict[int, float]) -> bool:
    return shares.keys() == expected.keys() and all(abs(shares[t] - expected[t]) < 0.03 for t in shares)


def test_tokens_come_as_often_as_the_model_says() -> None:
    assert close(draw(), dict(enumerate(PROBABILITIES)))


def test_temperature_sharpens() -> None:
    sharp = torch.tensor(PROBABILITIES).double() ** 2
    assert close(draw(temperature=0.5), dict(enumerate((sharp / sharp.sum()).tolist())))
    assert draw(50, temperature=0.0) == {0: 1.0}
    assert draw(50, temperature=1e-3) == {0: 1.0}


@pytest.mark.parametrize(
    ("options", "kept"),
    [
        ({"top_k": 2}, 2),
        ({"top_p": 0.69}, 2),
        ({"top_p": 0.71}, 3),
        ({"top_p": 1e-9}, 1),
        ({"min_p": 0.45}, 3),
        ({"top_k": 4, "top_p": 0.85, "min_p": 0.6}, 2),
        ({"top_k": 100}, 5),
    ],
)
def test_only_likely_tokens(options: dict[str, Any], kept: int) -> None:
    whole = sum(PROBABILITIES[:kept])
    assert close(draw(**options), {t: p / whole for t, p in enumerate(PROBABILITIES[:kept])})


def test_penalties_are_of_what_was_generated() -> None:
    weights = torch.tensor(PROBABILITIES).log()
    weights[0] -= 0.5 + 2 * 0.7
    weights[2] -= 0.5 + 0.7
    expected = dict(enumerate(weights.softmax(0).tolist()))
    assert close(draw(generated=(0, 2, 0), presence_penalty=0.5, frequency_penalty=0.7), expected)
    assert draw(5, generated=(0, 0), temperature=0, frequency_penalty=1.0) == {1: 1.0}


def test_tokens_are_counted_once_each(monkeypatch: pytest.MonkeyPatch) -> None:
    request = Request("a", [1, 1, 1], Sampling(temperature=0, frequency_penalty=0.01, presence_penalty=0.1))
    looked_at = 0
    update = Counter.update

    def count(counter: Counter[int], tokens: Any) -> None:
        nonlocal looked_at
        looked_at += len(tokens)
        update(counter, tokens)

    monkeypatch.setattr(Counter, "update", count)
    logits = torch.zeros(1, 5)
    for step in range(40):  # each token costs a little more, so they take turns
        (choice,) = choose(logits, [request])
        assert choice.token == step % 5
        request.tokens.append(choice.token)
    assert looked_at == 39
    assert request.count_generated() == Counter(request.generated)


def test_a_seed_and_a_place_decide_alone() -> None:
    request = Request("a", [1, 2, 3], Sampling(seed=-5))
    (alone,) = choose(LOGITS, [request])
    crowd = choose(
        torch.cat([torch.zeros(3, 5), LOGITS]), [Request(str(i), [1], Sampling()) for i in range(3)] + [request]
    )
    assert crowd[3] == alone
    places = set()
    for _ in range(30):
        request.tokens.append(1)
        places.add(choose(LOGITS, [request])[0].token)
    assert len(places) > 1
    assert len({Request(str(i), [1], Sampling()).seed for i in range(10)}) == 10


def test_a_guide_has_the_last_word() -> None:
    class Only:
        def apply(self, logits: torch.Tensor) -> torch.Tensor:
            allowed = torch.full_like(logits, -torch.inf)
            allowed[[3, 4]] = logits[[3, 4]]
            return allowed

        def accept(self, token: int) -> None: ...

    for temperature in (0.0, 1.0):
        request = Request("a", [1], Sampling(temperature=temperature, seed=1), guide=Only())
        tokens = set()
        for _ in range(40):
            request.tokens.append(1)
            tokens.add(choose(LOGITS, [request])[0].token)
        assert tokens == ({3} if temperature == 0 else {3, 4})


def test_log_probabilities_are_the_models_own() -> None:
    (choice,) = choose(LOGITS, [Request("a", [1], Sampling(temperature=0, logprobs=2))])
    assert choice.logprob == pytest.approx(torch.tensor(0.4).log().item())
    assert [token for token, _ in choice.top] == [0, 1]
    (choice,) = choose(LOGITS, [Request("a", [1], Sampling(temperature=0, logprobs=0))])
    assert choice.top == ()
    assert choice.logprob is not None


@pytest.mark.parametrize(
    ("name", "value"),
    [
        ("max_tokens", -1), ("temperature", -1), ("temperature", float("nan")), ("top_p", 0), ("top_p", 1.1), ("top_k", -1), ("min_p", 2),
        ("presence_penalty", 3), ("frequency_penalty", -3), ("seed", 2**64), ("logprobs", 21), ("logprobs", -1), ("stop", ("",)),
        ("prompt_logprobs", 21),
    ],
)  # fmt: skip
def test_wrong_values_are_named(name: str, value: Any) -> None:
    with pytest.raises(UsageError, match=f"^{name}: expected"):
        Sampling(**{name: value})
