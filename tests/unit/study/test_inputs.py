"""What a study asks: passages, haystacks, prompts, and how answers are scored. With a tokenizer that reads one word a token."""

from __future__ import annotations

import json
import re

import pytest

pytest.importorskip("torch")

import torch

from kvarto.errors import UsageError
from kvarto.formats import parse_policy
from kvarto.models.texts import Document
from kvarto.study.command import command_line
from kvarto.study.fidelity import Sums
from kvarto.study.forks import agrees
from kvarto.study.json_check import SCHEMA, build_extractions, score
from kvarto.study.needles import build_haystack
from kvarto.study.options import FULL, QUICK, StudyOptions, candidates, margins, split_formats, within
from kvarto.study.passages import cut_passages, paragraphs
from kvarto.study.result import Margins

LETTERS = str.maketrans("0123456789", "abcdefghij")
PROSE = [
    f"Paragraph {i} is about nothing in particular, but it is long enough to be taken for prose." for i in range(40)
]


class Words:
    """Every word, digit and line end is a token; ids are given as words are met."""

    chat_template = None

    def __init__(self) -> None:
        self.words: list[str] = []

    def __call__(self, text: str, **_: object) -> dict[str, list[int]]:
        found = re.findall(r"\d|[^\s\d]+|\n", text)
        self.words += [word for word in dict.fromkeys(found) if word not in self.words]
        return {"input_ids": [self.words.index(word) for word in found]}

    def decode(self, ids: object) -> str:
        return " ".join(self.words[i] for i in ids)


class Chat(Words):
    chat_template = "yes"

    def apply_chat_template(self, turns, **_):
        return f"<user> {turns[0]['content']} <assistant> "


def documents(*words: int) -> list[Document]:
    return [
        Document(f"d{i}", " ".join(str(j).translate(LETTERS) for j in range(count))) for i, count in enumerate(words)
    ]


def test_passages_come_from_different_documents_where_there_are_enough():
    found = cut_passages(documents(100, 30, 51, 80), Words(), count=3, tokens=50, seed=0)
    assert found.whole_documents
    assert {passage.name for passage in found.passages} == {"d0", "d2", "d3"}
    assert all(len(passage.tokens) == 51 for passage in found.passages)


def test_passages_of_one_document_when_there_are_too_few():
    found = cut_passages(documents(160), Words(), count=3, tokens=50, seed=0)
    assert not found.whole_documents
    assert {passage.name for passage in found.passages} == {"d0", "d0[1]", "d0[2]"}
    assert len({passage.tokens for passage in found.passages}) == 3


def test_too_little_text_is_an_error_with_a_remedy():
    with pytest.raises(UsageError, match="give more or longer text with --text"):
        cut_passages(documents(60), Words(), count=3, tokens=50, seed=0)
    with pytest.raises(UsageError, match="paragraphs"):
        paragraphs([Document("d", "short\n\nalso short")])


@pytest.mark.parametrize("tokenizer", [Words(), Chat()])
@pytest.mark.parametrize("length", [400, 700])
def test_haystack_holds_every_needle_at_its_depth(tokenizer, length):
    built = build_haystack(tokenizer, PROSE, length_tokens=length, needles=8, seed=3)
    text = tokenizer.decode(built.prefix)
    assert length - 40 < len(built.prefix) <= length + 8
    places = []
    for ending, tail in zip(built.endings, built.answer_tokens, strict=True):
        number = tokenizer.decode(ending[-tail:])
        assert re.fullmatch(r"\d \d \d \d", number)
        places.append(text.index(number) / len(text))
        assert number not in tokenizer.decode(ending[:-tail])
    assert places == sorted(places)
    assert places == pytest.approx(built.depths, abs=0.12)


def test_numbers_of_one_haystack_share_no_first_digit_and_no_pair():
    for seed in range(20):
        tokenizer = Words()
        built = build_haystack(tokenizer, PROSE, length_tokens=400, needles=8, seed=seed)
        numbers = [tokenizer.decode(e[-4:]).replace(" ", "") for e in built.endings]
        pairs = [number[i : i + 2] for number in numbers for i in range(3)]
        assert len({number[0] for number in numbers}) == 8
        assert len(set(pairs)) == len(pairs)


def test_the_same_seed_hides_the_same_needles_at_every_length():
    tokenizer = Words()
    short, long = (build_haystack(tokenizer, PROSE, length_tokens=n, needles=4, seed=7) for n in (300, 600))
    assert short.endings == long.endings
    assert short.prefix != long.prefix


def test_agreement_counts_up_to_the_first_other_token():
    ending = (5, 6, 7, 8, 9)
    assert agrees(torch.tensor([6, 7, 8, 9, 0]), ending, 3) == 3
    assert agrees(torch.tensor([6, 7, 0, 9, 0]), ending, 3) == 1
    assert agrees(torch.tensor([6, 0, 8, 9, 0]), ending, 3) == 0


def test_extractions_ask_for_nothing_that_was_shown():
    made = build_extractions(Words(), count=8, seed=0)
    assert len({each.sentence for each in made}) == 8
    shown = {"Omar", "Nora", "Hugo", "Brian", "Lima", "Oslo"}
    assert all(shown.isdisjoint(map(str, each.expected.values())) for each in made)
    assert all(set(each.expected) == set(SCHEMA["required"]) for each in made)


@pytest.mark.parametrize(
    ("change", "steps"),
    [
        (lambda right: json.dumps(right) + "\nText: more", (True, True, True)),
        (lambda right: json.dumps(right | {"city": "Elsewhere"}), (True, True, False)),
        (lambda right: json.dumps(right | {"quantity": "many"}), (True, False, False)),
        (lambda right: json.dumps({"customer": "Tom"}), (True, False, False)),
        (lambda right: json.dumps(right)[:-1], (False, False, False)),
        (lambda right: "", (False, False, False)),
        (lambda right: "7", (True, False, False)),
    ],
)
def test_json_is_scored_step_by_step(change, steps):
    extraction = build_extractions(Words(), count=1, seed=0)[0]
    item = score(extraction, change(extraction.expected))
    assert (item.valid, item.follows_schema, item.right_values) == steps


def test_sums_are_those_of_the_definition():
    torch.manual_seed(0)
    p, q = (torch.randn(150, 32).log_softmax(-1) for _ in range(2))
    targets = torch.randint(32, (150,))
    sums = Sums()
    sums.add(p[:100], q[:100], targets[:100])
    sums.add(p[100:], q[100:], targets[100:])
    assert sums.positions == 150
    assert sums.kl_nats == pytest.approx(
        float(torch.nn.functional.kl_div(q, p, log_target=True, reduction="sum")), rel=1e-5
    )
    assert sums.nll_nats == pytest.approx(float(torch.nn.functional.nll_loss(q, targets, reduction="sum")), rel=1e-6)
    assert sums.top1_matches == int((p.argmax(-1) == q.argmax(-1)).sum())


def test_formats_are_split_at_commas_but_not_within_skip():
    text = "int8, int4+skip=0,1,-1+window64,int8/int4"
    assert split_formats(text) == ("int8", "int4+skip=0,1,-1+window64", "int8/int4")
    assert [str(parse_policy(each)) for each in split_formats(text)]
    assert split_formats("") == ()


def test_quick_tries_the_headline_codecs_and_full_all():
    quick, full = ({str(p) for p in candidates(StudyOptions(budget=budget))} for budget in (QUICK, FULL))
    assert {"int8", "int4"} <= quick < full


def test_a_budget_shrinks_to_what_a_model_can_hold():
    found = within(QUICK, 1040)
    assert (found.document_tokens, found.needle_lengths, found.speed_contexts) == (512, (512,), ())
    assert within(QUICK, None) == QUICK


def test_margins_out_of_range_are_usage_errors():
    with pytest.raises(UsageError, match="kl_nats"):
        margins(-1, 1.02, 0.15)


def test_command_line_repeats_the_run():
    options = StudyOptions(
        model="my model", formats=("int4+skip=0,1", "int8"), seed=3, threads=2, margins=Margins(kl_nats=0.02)
    )
    expected = (
        "kvarto study 'my model' --formats int4+skip=0,1,int8 --quick --text builtin --seed 3 --threads 2 --max-kl 0.02"
    )
    assert command_line(options) == expected
    assert command_line(StudyOptions()) == "kvarto study --quick --text builtin --seed 0"
