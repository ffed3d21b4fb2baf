"""The report and the terminal's tables from made-up results: whole, self-contained, and with the numbers in them."""

from __future__ import annotations

import io
import json
import re
from html.parser import HTMLParser

import jsonschema
import pytest
from rich.console import Console
from synthetic import candidate, fidelity, json_items, needles, study

from kvarto.errors import UsageError
from kvarto.study.files import require_writable, write_files
from kvarto.study.render import picture, render
from kvarto.study.report import html
from kvarto.study.result import StudyResult

VOID = {"meta", "rect", "line", "circle", "br"}


@pytest.fixture(scope="module")
def result() -> StudyResult:
    bad = candidate(
        "int2", 2.75, fidelity=fidelity([0.03, 0.04, 0.035, 0.03]), needles=needles([False] * 20 + [True] * 12),
        json_items=json_items([False] * 6 + [True] * 2),
    )  # fmt: skip
    return study(candidate("int8", 8.5), candidate("int4", 4.75), bad)


class Balanced(HTMLParser):
    def __init__(self) -> None:
        super().__init__()
        self.open: list[str] = []

    def handle_starttag(self, tag, attrs):
        if tag not in VOID:
            self.open.append(tag)

    def handle_startendtag(self, tag, attrs):
        return

    def handle_endtag(self, tag):
        assert self.open.pop() == tag


def test_html_is_balanced(result):
    parser = Balanced()
    parser.feed(html(result))
    parser.close()
    assert parser.open == []


def test_html_needs_nothing_from_outside(result):
    text = html(result).replace('xmlns="http://www.w3.org/2000/svg"', "")
    assert not re.search(r"https?:|//[a-z]|@import|url\(|<script|<link|<img", text)


def test_html_has_the_numbers(result):
    text = html(result)
    for shown in (
        "Use int4: 4.75 bits per number",
        "0.0011 [",
        "32/32",
        "12/32",
        "2/8",
        "builtin",
        "0123456789ab",
        "kvarto study --quick",
    ):
        assert shown in text, shown
    assert text.count('class="card"') == 3
    assert "2026-11-30" in text


def test_html_escapes_what_it_did_not_write(result):
    text = html(result)
    assert "A &lt;fast&gt; CPU" in text
    assert "oops &lt;b&gt;" in text
    assert "oops <b>" not in text


def test_heatmaps_stand_side_by_side_for_each_candidate(result):
    assert html(result).count(' needles found"') == 6


@pytest.mark.parametrize(
    "measured", [{"needles": ()}, {"json_items": ()}, {"speed": (), "memory": ()}, {"fidelity": None}]
)
def test_what_is_missing_is_left_out(measured):
    result = study(candidate("int4", 4.75, **measured), interrupted=True)
    assert "Interrupted" in html(result)
    Console(width=132, quiet=True).print(render(result))


def test_tables_on_the_terminal(result):
    console = Console(width=140, record=True, file=io.StringIO())
    console.print(render(result))
    text = console.export_text()
    for shown in ("KL nats", "0.0011 [", "noise floor", "fail", "grew MB", "Use int4", "128K"):
        assert shown in text, shown
    assert max(map(len, text.splitlines())) <= 140


def test_picture_loads_no_font(result):
    drawn = picture(result)
    assert drawn.startswith("<svg")
    assert "url(http" not in drawn.replace('"', "")
    assert "@font-face" not in drawn


def test_json_follows_its_schema_and_reads_back(result):
    text = result.model_dump_json()
    jsonschema.validate(json.loads(text), StudyResult.model_json_schema())
    assert StudyResult.model_validate_json(text) == result


def test_files_are_whole_and_alone(result, tmp_path):
    paths = write_files(result, tmp_path)
    assert sorted(path.name for path in tmp_path.iterdir()) == sorted(path.name for path in paths)
    assert StudyResult.model_validate_json((tmp_path / "study.json").read_text()) == result


def test_an_unwritable_folder_is_found_first(tmp_path):
    (tmp_path / "file").write_text("")
    with pytest.raises(UsageError, match="--out: expected a folder that can be written to"):
        require_writable(tmp_path / "file" / "below")
