"""Can the model still find things? Several key-number needles at different depths of one haystack of real text, asked for one by one.

The other needles are distractors of the same form, which makes a haystack harder than with one needle. Their numbers share no first digit
and no pair of digits, so that a small model does not slip from one into another by itself. All questions fork one prefill (`forks`), and
that prefill reads quantized history, as serving does: a needle set into a clean prefill hides nearly all damage.
"""

from __future__ import annotations

import random
from collections.abc import Collection, Iterator, Sequence
from dataclasses import dataclass
from typing import Any

from kvarto.study.arms import Arm
from kvarto.study.forks import agrees, likeliest
from kvarto.study.passages import token_ids
from kvarto.study.result import NeedleCell
from kvarto.study.stage import Step

_STAGE = "needles"
_DIGITS = 4
_NAMES = ("Alice", "Robert", "Maria", "David", "Susan", "Peter", "Laura", "Kevin", "Helen", "Frank", "Julia", "Brian")
_INTRO = "Remember the secret numbers in this text."
_NEEDLE = "The secret number of {name} is {number}."
_QUESTION = "The text has ended. What is the secret number of {name}?"
_ANSWER = "The secret number of {name} is"
_MARK = "@@question@@"
_QUESTION_COST_TOKENS = 45
_LOOKED_AT = 1000


@dataclass(frozen=True)
class Haystack:
    """A prefix of about `length_tokens` with needles; for each its depth (0 to 1), and an ending whose last `answer_tokens` are the number."""

    length_tokens: int
    seed: int
    prefix: tuple[int, ...]
    depths: tuple[float, ...]
    endings: tuple[tuple[int, ...], ...]
    answer_tokens: tuple[int, ...]


def build_haystack(tokenizer: Any, prose: Sequence[str], *, length_tokens: int, needles: int, seed: int) -> Haystack:
    """`needles` needles at evenly spaced depths between paragraphs of `prose`, from a place that the seed chooses.

    The length is met to within a paragraph. The same seed gives the same names and numbers at every length.
    """
    rng = random.Random(seed)
    names, numbers = rng.sample(_NAMES, needles), _numbers(rng, needles)
    opening, closing = _frame(tokenizer)
    lines = [_NEEDLE.format(name=name, number=number) for name, number in zip(names, numbers, strict=True)]
    room = (
        length_tokens
        - len(token_ids(tokenizer, opening, special=False))
        - sum(_count(tokenizer, line) for line in lines)
    )
    body = _scatter(lines, _take(tokenizer, prose, room, start=rng.randrange(len(prose))))
    prefix = token_ids(tokenizer, opening + "\n".join(body) + "\n\n", special=not _has_template(tokenizer))
    questions = [_QUESTION.format(name=name) + closing + _ANSWER.format(name=name) for name in names]
    tokenized = [_answered(tokenizer, question, number) for question, number in zip(questions, numbers, strict=True)]
    return Haystack(
        length_tokens=length_tokens,
        seed=seed,
        prefix=tuple(prefix),
        depths=tuple((i + 0.5) / needles for i in range(needles)),
        endings=tuple(ending for ending, _ in tokenized),
        answer_tokens=tuple(tail for _, tail in tokenized),
    )


def _answered(tokenizer: Any, question: str, number: str) -> tuple[tuple[int, ...], int]:
    """The tokens of a question with its answer, and how many of them are the answer's: those that the question alone does not begin with."""
    whole, head = (token_ids(tokenizer, text, special=False) for text in (f"{question} {number}", question))
    same = next((i for i, (one, other) in enumerate(zip(whole, head, strict=False)) if one != other), len(head))
    return tuple(whole), len(whole) - same


def _frame(tokenizer: Any) -> tuple[str, str]:
    """What stands before the haystack and between question and answer: by the chat template if there is one."""
    opening = f"{_INTRO}\n\n"
    if not _has_template(tokenizer):
        return opening, "\n"
    turn = [{"role": "user", "content": opening + _MARK}]
    whole: str = tokenizer.apply_chat_template(turn, tokenize=False, add_generation_prompt=True)
    before, _, after = whole.partition(_MARK)
    return before, after


def _has_template(tokenizer: Any) -> bool:
    return getattr(tokenizer, "chat_template", None) is not None


def _count(tokenizer: Any, line: str) -> int:
    return len(token_ids(tokenizer, line + "\n", special=False))


def _numbers(rng: random.Random, count: int) -> list[str]:
    """Numbers without a repeated digit, of which no two share the first digit or a pair of neighbouring digits."""
    numbers: list[str] = []
    while len(numbers) < count:
        number = "".join(rng.sample("0123456789", _DIGITS))
        if number[0] != "0" and not any(number[0] == other[0] or _pairs(number) & _pairs(other) for other in numbers):
            numbers.append(number)
    return numbers


def _pairs(number: str) -> set[str]:
    return {number[i : i + 2] for i in range(len(number) - 1)}


def _take(tokenizer: Any, prose: Sequence[str], room_tokens: int, *, start: int) -> list[tuple[str, int]]:
    """Paragraphs from `start` on, round and round, those that still fit into the room; with their tokens."""
    taken: list[tuple[str, int]] = []
    held = 0
    for i in range(start, start + max(_LOOKED_AT, len(prose))):
        line = prose[i % len(prose)]
        tokens = _count(tokenizer, line)
        if held + tokens <= room_tokens:
            taken.append((line, tokens))
            held += tokens
    return taken


def _scatter(needles: Sequence[str], body: Sequence[tuple[str, int]]) -> list[str]:
    """Needles between the paragraphs, the i-th where (i + 1/2) / n of their tokens lie before it, to within a paragraph."""
    total = sum(tokens for _, tokens in body)
    lines: list[str] = []
    placed = held = 0
    for line, tokens in body:
        while placed < len(needles) and (placed + 0.5) / len(needles) * total < held + tokens / 2:
            lines.append(needles[placed])
            placed += 1
        lines.append(line)
        held += tokens
    return [*lines, *needles[placed:]]


def found_needles(arm: Arm, haystack: Haystack) -> list[bool]:
    """For each needle whether greedy decoding gives its whole number."""
    best = likeliest(arm, haystack.prefix, haystack.endings)
    return [
        agrees(row, ending, tail) == tail
        for row, ending, tail in zip(best, haystack.endings, haystack.answer_tokens, strict=True)
    ]


class NeedleStage:
    """Runs the haystacks one after another, every arm in turn. `arms` begins with the baseline."""

    def __init__(self, arms: Sequence[Arm], haystacks: Sequence[Haystack]) -> None:
        self.arms, self.haystacks = arms, haystacks
        self._found: dict[tuple[int, str], list[bool]] = {}

    def steps(self) -> Iterator[Step]:
        """One for each haystack and arm."""
        for i, haystack in enumerate(self.haystacks):
            cost = len(haystack.prefix) + _QUESTION_COST_TOKENS * len(haystack.endings)
            for arm in self.arms:
                label = f"{haystack.length_tokens} tokens ({i + 1} of {len(self.haystacks)}), {arm.name}"
                yield Step(_STAGE, label, cost, self._search(arm, i), arm)

    def _search(self, arm: Arm, i: int) -> Any:
        def search() -> None:
            self._found[i, arm.name] = found_needles(arm, self.haystacks[i])

        return search

    def results(self, broken: Collection[str]) -> dict[str, tuple[NeedleCell, ...]]:
        """By arm, over the haystacks that every arm has searched but those named in `broken`."""
        whole = [arm.name for arm in self.arms if arm.name not in broken]
        done = [i for i in range(len(self.haystacks)) if all((i, name) in self._found for name in whole)]
        return {
            arm.name: tuple(cell for i in done if (i, arm.name) in self._found for cell in self._cells(i, arm.name))
            for arm in self.arms
        }

    def _cells(self, i: int, arm: str) -> Iterator[NeedleCell]:
        haystack = self.haystacks[i]
        for depth, found in zip(haystack.depths, self._found[i, arm], strict=True):
            yield NeedleCell(length_tokens=haystack.length_tokens, depth=depth, seed=haystack.seed, found=found)
