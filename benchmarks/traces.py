"""Traces of requests with shared prefixes, in the form of Mooncake's: made here from a seed, or read from a file.

A line of a file is {"timestamp": milliseconds, "input_length": tokens, "output_length": tokens, "hash_ids": [one for each block of the prompt]};
equal ids stand for equal tokens behind equal tokens. Published traces have blocks of 512 tokens. No text is in them: `Words` gives each id tokens of
its own.
"""

from __future__ import annotations

import json
import random
from collections import OrderedDict
from collections.abc import Iterable, Iterator, Sequence
from dataclasses import asdict, dataclass
from itertools import count
from pathlib import Path


@dataclass(frozen=True)
class Request:
    """`due_seconds` after the trace's beginning; `hash_ids`: one for each block of the prompt, whose last one may be cut short."""

    due_seconds: float
    prompt_tokens: int
    output_tokens: int
    hash_ids: tuple[int, ...]


# ---- making one ------------------------------------------------------------------------------------------------------


@dataclass(frozen=True)
class Shape:
    """What a made trace is like.

    A session has a system prompt, a document behind it (the earlier ones are asked about more: Zipf), and turns: each repeats what was said before
    and adds a question, and its answer stands before the next one. Loners share nothing but a system prompt. Sessions begin at random (Poisson).
    """

    seed: int = 0
    block_tokens: int = 64
    sessions: int = 8
    loners: int = 2
    systems: int = 2
    system_blocks: int = 2
    documents: int = 5
    document_blocks: int = 8  # the median; lengths are log-normal
    document_most_blocks: int = 20
    spread: float = 0.6  # of the logarithm of lengths
    turns: int = 3  # the mean
    question_tokens: int = 40
    output_tokens: int = 12
    output_most_tokens: int = 32
    session_seconds: float = 3.0  # from one session's beginning to the next one's, the mean
    think_seconds: float = 6.0  # from a turn to the next one, the mean


def generate(shape: Shape) -> list[Request]:
    """The trace of a shape, by its arrival times: the same for the same shape, on every machine."""
    chance, ids = random.Random(shape.seed), count()

    def take(blocks: int) -> tuple[int, ...]:
        return tuple(next(ids) for _ in range(blocks))

    def length(median: float, most: int) -> int:
        return min(most, max(1, round(chance.lognormvariate(0, shape.spread) * median)))

    systems = [take(shape.system_blocks) for _ in range(shape.systems)]
    documents = [
        chance.choice(systems) + take(length(shape.document_blocks, shape.document_most_blocks))
        for _ in range(shape.documents)
    ]
    popularity = [1 / rank for rank in range(1, shape.documents + 1)]
    requests, begins = [], 0.0
    is_loner = [True] * shape.loners + [False] * shape.sessions
    chance.shuffle(is_loner)
    for alone in is_loner:
        begins += chance.expovariate(1 / shape.session_seconds)
        if alone:
            context = chance.choice(systems) + take(length(shape.document_blocks, shape.document_most_blocks))
        else:
            context = chance.choices(documents, popularity)[0]
        due = begins
        for _ in range(1 if alone else 1 + min(round(chance.expovariate(1 / (shape.turns - 1))), 3 * shape.turns)):
            question = length(shape.question_tokens, 8 * shape.question_tokens)
            answer = length(shape.output_tokens, shape.output_most_tokens)
            blocks = -(-question // shape.block_tokens)
            prompt = len(context) * shape.block_tokens + question
            requests.append(Request(round(due, 3), prompt, answer, context + take(blocks)))
            # In the next turn question and answer are blocks of the conversation: full ones, for the sake of simple books.
            context += take(max(1, (question + answer) // shape.block_tokens))
            due += chance.expovariate(1 / shape.think_seconds)
    return sorted(requests, key=lambda request: request.due_seconds)


# ---- files -----------------------------------------------------------------------------------------------------------


def read(path: Path, block_tokens: int) -> list[Request]:
    """The requests of a JSONL file, by arrival. Raises ValueError with the line's number."""
    requests = []
    for number, line in enumerate(path.read_text().splitlines(), 1):
        if not line.strip():
            continue
        try:
            data = json.loads(line)
            request = Request(
                float(data["timestamp"]) / 1e3, int(data["input_length"]), int(data["output_length"]),
                tuple(int(each) for each in data["hash_ids"]),
            )  # fmt: skip
        except (ValueError, KeyError, TypeError) as error:
            raise ValueError(f"{path}:{number}: not a request of a trace ({type(error).__name__}: {error})") from error
        if not 0 < request.prompt_tokens <= len(request.hash_ids) * block_tokens or request.output_tokens < 1:
            raise ValueError(
                f"{path}:{number}: {len(request.hash_ids)} blocks of {block_tokens} tokens hold no {request}"
            )
        requests.append(request)
    return sorted(requests, key=lambda request: request.due_seconds)


def write(path: Path, requests: Iterable[Request]) -> None:
    """As `read` reads it."""
    lines = [
        {
            "timestamp": round(request.due_seconds * 1e3), "input_length": request.prompt_tokens,
            "output_length": request.output_tokens, "hash_ids": list(request.hash_ids),
        }
        for request in requests
    ]  # fmt: skip
    path.write_text("".join(json.dumps(line) + "\n" for line in lines))


# ---- tokens ----------------------------------------------------------------------------------------------------------


class Words:
    """Tokens for hash ids: pieces of a real text, so that what is generated is text too. `corpus`: its tokens."""

    def __init__(self, corpus: Sequence[int], block_tokens: int) -> None:
        assert len(corpus) > 2 * block_tokens
        self._corpus, self._block_tokens = corpus, block_tokens

    def block(self, hash_id: int) -> list[int]:
        """`block_tokens` tokens. Two in front, chosen by the id, keep blocks apart that begin at the same place of the text."""
        at = random.Random(hash_id).randrange(len(self._corpus) - self._block_tokens)
        mark = [self._corpus[hash_id % 997], self._corpus[hash_id // 997 % 991]]
        return [*mark, *self._corpus[at : at + self._block_tokens - 2]]

    def prompt(self, request: Request) -> list[int]:
        """Its tokens."""
        tokens = [token for hash_id in request.hash_ids for token in self.block(hash_id)]
        return tokens[: request.prompt_tokens]


# ---- what to expect --------------------------------------------------------------------------------------------------


@dataclass(frozen=True)
class Facts:
    """Of a trace: `distinct_tokens` is what a cache that forgets nothing holds in the end, `ceiling` the hit rate that it reaches."""

    requests: int
    prompt_tokens: int
    output_tokens: int
    longest_tokens: int
    distinct_tokens: int
    ceiling: float
    seconds: float

    def as_json(self) -> dict[str, float]:
        return asdict(self)


def facts(requests: Sequence[Request], block_tokens: int) -> Facts:
    prompt = sum(request.prompt_tokens for request in requests)
    distinct = {prefix for request in requests for prefix in _prefixes(request)}
    return Facts(
        len(requests), prompt, sum(request.output_tokens for request in requests),
        max(request.prompt_tokens + request.output_tokens for request in requests), len(distinct) * block_tokens,
        lru_hit_rate(requests, block_tokens, len(distinct) * block_tokens), requests[-1].due_seconds,
    )  # fmt: skip


def lru_hit_rate(requests: Iterable[Request], block_tokens: int, capacity_tokens: int) -> float:
    """Share of prompt tokens that a cache of so many tokens finds if requests come one after another and the longest unused blocks go first."""
    kept: OrderedDict[tuple[int, ...], None] = OrderedDict()
    hits = total = 0
    for request in requests:
        total += request.prompt_tokens
        prefixes = list(_prefixes(request))
        # The last token is always computed, so a prompt's last block is never found whole.
        found = next((n for n, prefix in enumerate(prefixes) if prefix not in kept), len(prefixes))
        hits += min(found, (request.prompt_tokens - 1) // block_tokens) * block_tokens
        for prefix in reversed(prefixes):  # so that leaves go before what they stand on
            kept[prefix] = None
            kept.move_to_end(prefix)
        while len(kept) * block_tokens > capacity_tokens:
            kept.popitem(last=False)
    return hits / total


def _prefixes(request: Request) -> Iterator[tuple[int, ...]]:
    return (request.hash_ids[: n + 1] for n in range(len(request.hash_ids)))
