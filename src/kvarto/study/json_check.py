"""Does the model still write what a program can read? Short extraction prompts with a JSON schema, answered greedily.

Three steps, each requiring the one before: the output parses, follows the schema, and has the right values. The baseline's output serves
the others as a draft: where every token of it is also their likeliest, greedy decoding would write the same, and nothing is decoded; where
not, they go on by themselves from the first token that differs. So the result is that of greedy decoding, at a fraction of the time.
"""

from __future__ import annotations

import json
import random
from collections.abc import Collection, Iterator, Sequence
from dataclasses import dataclass
from typing import Any

import torch
from jsonschema import Draft202012Validator
from torch import Tensor
from transformers import StoppingCriteria, StoppingCriteriaList

from kvarto.study.arms import Arm
from kvarto.study.forks import agrees, likeliest
from kvarto.study.passages import token_ids
from kvarto.study.result import JsonItem
from kvarto.study.stage import Step

_STAGE = "json"
_MOST_TOKENS = 48
_BATCH = 12
_STEP_COST_TOKENS = 30

_HEAD = "Each text is an order. Write it as JSON.\n\n"
_TEXTS = (
    "{customer} ordered {quantity} {item}, to be sent to {city}.",
    "Please ship {quantity} {item} to {customer} in {city}.",
    "{customer} from {city} wants to buy {quantity} {item}.",
    "An order of {quantity} {item} came from {customer} in {city}.",
)
_SHOWN: tuple[dict[str, Any], ...] = (
    {"customer": "Omar", "quantity": 28, "item": "lamps", "city": "Lima"},
    {"customer": "Nora", "quantity": 3, "item": "clocks", "city": "Oslo"},
    {"customer": "Hugo", "quantity": 14, "item": "spoons", "city": "Tokyo"},
    {"customer": "Brian", "quantity": 60, "item": "coats", "city": "Cairo"},
)
_CUSTOMERS = ("Maria", "Tom", "Julia", "Peter", "Anna", "Victor", "Simon", "Clara", "Robert", "Laura", "Kevin", "Helen")
_ITEMS = ("chairs", "books", "pens", "cups", "plates", "boxes", "mirrors", "bags", "hats", "keys", "tables", "shirts")
_CITIES = ("Paris", "Rome", "Dublin", "Vienna", "Madrid", "Berlin", "Boston", "London", "Sydney", "Chicago")

SCHEMA = {
    "type": "object",
    "properties": {
        "customer": {"type": "string"},
        "quantity": {"type": "integer", "minimum": 1},
        "item": {"type": "string"},
        "city": {"type": "string"},
    },
    "required": ["customer", "quantity", "item", "city"],
    "additionalProperties": False,
}
_VALIDATOR = Draft202012Validator(SCHEMA)


@dataclass(frozen=True)
class Extraction:
    """One prompt: examples and a sentence to extract from, its tokens, and the object that is right."""

    sentence: str
    tokens: tuple[int, ...]
    expected: dict[str, Any]


def build_extractions(tokenizer: Any, *, count: int, seed: int) -> list[Extraction]:
    """`count` prompts with the same examples; none of the values asked for stands in an example."""
    rng = random.Random(seed)
    head = _HEAD + "".join(_shown(text, order) for text, order in zip(_TEXTS, _SHOWN, strict=True))
    made = []
    for i in range(count):
        order = {
            "customer": rng.choice(_CUSTOMERS),
            "quantity": rng.randrange(2, 60),
            "item": rng.choice(_ITEMS),
            "city": rng.choice(_CITIES),
        }
        sentence = _TEXTS[i % len(_TEXTS)].format(**order)
        made.append(Extraction(sentence, tuple(token_ids(tokenizer, f"{head}Text: {sentence}\nJSON:")), order))
    return made


def _shown(text: str, order: dict[str, Any]) -> str:
    return f"Text: {text.format(**order)}\nJSON: {json.dumps(order)}\n\n"


def score(extraction: Extraction, output: str) -> JsonItem:
    """Judge the first line of what a model wrote."""
    text = output.strip().partition("\n")[0].strip()
    try:
        found = json.loads(text)
        valid = True
    except ValueError:
        found, valid = None, False
    follows = valid and _VALIDATOR.is_valid(found)
    return JsonItem(
        prompt=extraction.sentence,
        output=text,
        valid=valid,
        follows_schema=follows,
        right_values=follows and found == extraction.expected,
    )


def write(arm: Arm, tokenizer: Any, prompts: Sequence[Sequence[int]], most_tokens: Sequence[int]) -> list[list[int]]:
    """Greedy continuations up to a line's end, prompts left-padded into one batch. Row i is cut to `most_tokens[i]` new tokens."""
    width, device = max(map(len, prompts)), arm.model.device
    ids = torch.zeros((len(prompts), width), dtype=torch.long)
    mask = torch.zeros_like(ids)
    for row, (row_ids, row_mask) in enumerate(zip(ids, mask, strict=True)):
        row_ids[width - len(prompts[row]) :] = torch.tensor(prompts[row])
        row_mask[width - len(prompts[row]) :] = 1
    out = arm.model.generate(
        ids.to(device), attention_mask=mask.to(device), cache=arm.new_cache(), do_sample=False, num_beams=1,
        max_new_tokens=max(most_tokens), stopping_criteria=StoppingCriteriaList([_LineEnd(tokenizer)]), pad_token_id=_padding_id(tokenizer),
    )  # fmt: skip
    rows: list[list[int]] = out[:, width:].cpu().tolist()
    return [_cut(tokenizer, row[:most]) for row, most in zip(rows, most_tokens, strict=True)]


class _LineEnd(StoppingCriteria):  # type: ignore[misc]
    """Ends each row by itself at the end of its first line."""

    def __init__(self, tokenizer: Any) -> None:
        self.tokenizer = tokenizer

    def __call__(self, input_ids: Tensor, scores: Tensor, **_: Any) -> Tensor:
        """bool [B] of input_ids [B, T]."""
        return torch.tensor(
            [_ends(self.tokenizer, token) for token in input_ids[:, -1].tolist()], device=input_ids.device
        )


def _padding_id(tokenizer: Any) -> int:
    ids = (tokenizer.pad_token_id, tokenizer.eos_token_id)
    return int(next((i for i in ids if i is not None), 0))


def _cut(tokenizer: Any, row: Sequence[int]) -> list[int]:
    """Up to the token that ends the line or the text: what follows is padding."""
    end = next((i for i, token in enumerate(row) if _ends(tokenizer, token)), len(row))
    return list(row[: end + 1])


def _ends(tokenizer: Any, token: int) -> bool:
    return token == tokenizer.eos_token_id or "\n" in tokenizer.decode([token])


def write_from_drafts(
    arm: Arm, tokenizer: Any, prompts: Sequence[Sequence[int]], drafts: Sequence[Sequence[int]]
) -> list[list[int]]:
    """What `write` gives, found by checking drafts in one forward and writing only on from where one differs."""
    shared = _shared_prefix(prompts)
    endings = [(*prompt[shared:], *draft) for prompt, draft in zip(prompts, drafts, strict=True)]
    best = likeliest(arm, prompts[0][:shared], endings)
    outputs, unfinished = [], []
    for i, (row, ending, draft) in enumerate(zip(best, endings, drafts, strict=True)):
        same = agrees(row, ending, len(draft))
        output = list(draft[:same])
        if same < len(draft):
            output.append(int(row[len(ending) - len(draft) + same - 1]))
            if len(output) < _MOST_TOKENS and not _ends(tokenizer, output[-1]):
                unfinished.append(i)
        outputs.append(output)
    if unfinished:
        begun = [(*prompts[i], *outputs[i]) for i in unfinished]
        room = [_MOST_TOKENS - len(outputs[i]) for i in unfinished]
        for i, rest in zip(unfinished, write(arm, tokenizer, begun, room), strict=True):
            outputs[i] += rest
    return outputs


def _shared_prefix(prompts: Sequence[Sequence[int]]) -> int:
    """How many tokens all prompts begin with, but at least one is left to each."""
    most = min(map(len, prompts)) - 1
    return next((i for i in range(most) if len({prompt[i] for prompt in prompts}) > 1), most)


class JsonStage:
    """Runs the prompts in batches, the baseline first, for its output is the draft of the others. `arms` begins with the baseline."""

    def __init__(self, arms: Sequence[Arm], tokenizer: Any, extractions: Sequence[Extraction]) -> None:
        self.arms, self.tokenizer = arms, tokenizer
        self.batches = [extractions[first : first + _BATCH] for first in range(0, len(extractions), _BATCH)]
        self._outputs: dict[tuple[int, str], list[list[int]]] = {}

    def steps(self) -> Iterator[Step]:
        """One for each batch and arm."""
        for i, batch in enumerate(self.batches):
            for arm in self.arms:
                cost = sum(len(each.tokens) for each in batch) if arm is self.arms[0] else len(batch) * 70
                decodes = _MOST_TOKENS if arm is self.arms[0] else 0
                label = f"batch {i + 1} of {len(self.batches)}, {arm.name}"
                yield Step(_STAGE, label, cost + decodes * _STEP_COST_TOKENS, self._writer(arm, i), arm)

    def _writer(self, arm: Arm, i: int) -> Any:
        def run() -> None:
            prompts = [each.tokens for each in self.batches[i]]
            if arm is self.arms[0]:
                outputs = write(arm, self.tokenizer, prompts, [_MOST_TOKENS] * len(prompts))
            else:
                outputs = write_from_drafts(arm, self.tokenizer, prompts, self._outputs[i, self.arms[0].name])
            self._outputs[i, arm.name] = outputs

        return run

    def results(self, broken: Collection[str]) -> dict[str, tuple[JsonItem, ...]]:
        """By arm, over the batches that every arm has written but those named in `broken`."""
        whole = [arm.name for arm in self.arms if arm.name not in broken]
        done = [i for i in range(len(self.batches)) if all((i, name) in self._outputs for name in whole)]
        return {arm.name: tuple(self._items(done, arm.name)) for arm in self.arms}

    def _items(self, done: Sequence[int], arm: str) -> Iterator[JsonItem]:
        for i in done:
            for extraction, output in zip(self.batches[i], self._outputs.get((i, arm), ()), strict=False):
                yield score(extraction, self.tokenizer.decode(output, skip_special_tokens=True))
