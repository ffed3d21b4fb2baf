"""From logits to the next token. A row's result depends on that row, its request and the number of tokens it has, never on the batch."""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass
from typing import TYPE_CHECKING

import numpy as np
import torch

from kvarto.engine.request import Request, Sampling

if TYPE_CHECKING:
    from torch import Tensor


@dataclass(frozen=True)
class Choice:
    """The token chosen; its log probability and the likeliest tokens with theirs, of the model's own distribution, if they were asked for.

    error   why none could be chosen
    rank    of a token that was given: 1 is the likeliest
    """

    token: int
    logprob: float | None = None
    top: tuple[tuple[int, float], ...] = ()
    error: str = ""
    rank: int | None = None


def choose(logits: Tensor, requests: Sequence[Request]) -> list[Choice]:
    """logits float32 [n, V] of the last token of each request. What goes wrong with one is in its Choice."""
    greedy = logits.argmax(-1).tolist()
    choices = []
    for row, request, likeliest in zip(logits, requests, greedy, strict=True):
        sampling, token = request.sampling, likeliest
        try:
            if sampling.temperature > 0 or _penalizes(sampling) or request.guide is not None:
                token = _next_token(row, request)
        except Exception as error:  # noqa: BLE001 - a guide is somebody else's, and must not end the other requests
            choices.append(Choice(likeliest, error=f"{type(error).__name__}: {error}"))
            continue
        choices.append(_describe(row, token, sampling.logprobs))
    return choices


def _next_token(row: Tensor, request: Request) -> int:
    """By penalties, guide and chance. The guide hears of it."""
    allowed = _penalized(row, request)
    if request.guide is None:
        return _draw(allowed, request)
    token = _draw(request.guide.apply(allowed), request)
    request.guide.accept(token)
    return token


def logprobs_of(logits: Tensor, tokens: Sequence[int], top: int) -> list[Choice]:
    """What the model thought of tokens that are known: logits float32 [n, V] at the places before them."""
    logs = torch.log_softmax(logits, -1)
    own = logs.gather(-1, torch.tensor(tokens, device=logs.device)[:, None])
    ranks, best = (logs > own).sum(-1) + 1, torch.topk(logs, top)
    columns = (own[:, 0].tolist(), ranks.tolist(), best.indices.tolist(), best.values.tolist())
    return [
        Choice(token, logprob, tuple(zip(likeliest, values, strict=True)), rank=rank)
        for token, logprob, rank, likeliest, values in zip(tokens, *columns, strict=True)
    ]


def _describe(row: Tensor, token: int, top: int | None) -> Choice:
    if top is None:
        return Choice(token)
    logs = torch.log_softmax(row, -1)
    best = torch.topk(logs, top)
    pairs = tuple(zip(best.indices.tolist(), best.values.tolist(), strict=True))
    return Choice(token, float(logs[token]), pairs)


def _penalizes(sampling: Sampling) -> bool:
    return sampling.presence_penalty != 0 or sampling.frequency_penalty != 0


def _penalized(row: Tensor, request: Request) -> Tensor:
    """Logits less what generated tokens cost: presence once, frequency for each time (OpenAI)."""
    sampling = request.sampling
    if not _penalizes(sampling) or not request.generated_tokens:
        return row
    counts = request.count_generated()
    tokens = torch.tensor(list(counts), device=row.device)
    times = torch.tensor(list(counts.values()), device=row.device, dtype=row.dtype)
    return row.index_add(0, tokens, -(sampling.presence_penalty + sampling.frequency_penalty * times))


def _draw(row: Tensor, request: Request) -> int:
    """One token, by the request's own random numbers: one for each place in its text, so that going over it again gives the same."""
    sampling = request.sampling
    if sampling.temperature == 0:
        return int(row.argmax())
    probabilities, tokens = torch.softmax((row - row.max()).double() / sampling.temperature, -1).sort(
        descending=True, stable=True
    )
    kept = len(probabilities) if sampling.top_k == 0 else min(sampling.top_k, len(probabilities))
    # The smallest set whose probability reaches top_p: those before which less than that has come.
    before = probabilities.cumsum(-1) - probabilities
    kept = min(
        kept, int((before < sampling.top_p).sum()), int((probabilities >= sampling.min_p * probabilities[0]).sum())
    )
    cumulative = probabilities[: max(kept, 1)].cumsum(-1)
    place = torch.searchsorted(cumulative, _uniform(request) * cumulative[-1], right=True)
    return int(tokens[min(int(place), len(cumulative) - 1)])


def _uniform(request: Request) -> float:
    """In [0, 1): of the request's seed and the place in its text."""
    return float(np.random.Generator(np.random.Philox(key=request.seed, counter=len(request.tokens))).random())
