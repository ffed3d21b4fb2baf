"""The whole study: on a tiny random model for how it runs, on the embedded model for what it finds."""

from __future__ import annotations

import json
import os
import shutil
import signal
import subprocess
import sys
import tempfile
import time
from collections.abc import Callable, Sequence
from dataclasses import dataclass, replace
from functools import cache
from pathlib import Path

import jsonschema
import pytest

pytest.importorskip("torch")

import tiny
from tokenizers import Regex, Tokenizer, models, pre_tokenizers
from torch import Tensor
from transformers import PreTrainedTokenizerFast

from kvarto.codecs import affine, registry
from kvarto.codecs.base import Codec, assemble, extract, from_tile, to_tile
from kvarto.codecs.packing import pack, unpack
from kvarto.errors import NotFinite, UnknownName, Unsupported, UsageError
from kvarto.formats import Format, parse_policy
from kvarto.layout import FieldSpec, Side, SlabLayout
from kvarto.models.load import LoadedModel, load
from kvarto.study.arms import baseline_arm, candidate_arm, feed
from kvarto.study.command import exit_code
from kvarto.study.files import write_files
from kvarto.study.forks import likeliest
from kvarto.study.json_check import build_extractions, write, write_from_drafts
from kvarto.study.options import Budget, StudyOptions
from kvarto.study.result import StudyResult
from kvarto.study.run import run_study

BROWSER = next(
    (path for name in ("chromium", "chromium-browser", "google-chrome") if (path := shutil.which(name))), None
)
TINY = Budget(
    "tiny", documents=3, document_tokens=256, needle_lengths=(600,), needles=4, needle_seeds=2, json_prompts=3,
    speed_contexts=(128,), prefill_tokens=32, decode_steps=2,
)  # fmt: skip


@dataclass(frozen=True)
class Symmetric(Codec):
    """Round to 15 steps of the largest magnitude of each token: the obvious 4-bit codec, which ruins keys. For tests only."""

    def fields(self, side: Side, page_tokens: int, dim: int) -> Sequence[FieldSpec]:
        rows, columns = (page_tokens, dim) if side is Side.K else (dim, page_tokens)
        return [("codes", "uint8", (rows, columns // 2)), ("scale", "float16", (page_tokens,))]

    def encode(self, x: Tensor, layout: SlabLayout) -> Tensor:
        scale = (x.abs().amax(-1, keepdim=True) / 7).clamp(min=1e-4).half()
        codes = affine.quantize(x, scale, -8 * scale.float(), 16)
        return assemble(layout, **pack(to_tile(codes, layout.side), 4), scale=scale.squeeze(-1))

    def decode(self, slabs: Tensor, layout: SlabLayout) -> Tensor:
        codes = from_tile(unpack({"codes": extract(slabs, layout, "codes")}, 4), layout.side)
        return (codes.float() - 8) * extract(slabs, layout, "scale").float().unsqueeze(-1)


NAIVE = Symmetric("symmetric4", 4, "tests")


@dataclass(frozen=True)
class Breaking(Symmetric):
    """Fails at its first page."""

    def encode(self, x: Tensor, layout: SlabLayout) -> Tensor:
        raise NotFinite("keys: broken on purpose")


class Watcher:
    """A Progress that may interrupt after so many steps."""

    def __init__(self, stop_after: int | None = None) -> None:
        self.steps = 0
        self.total = self.cost = 0
        self.stop_after = stop_after

    def plan(self, total_cost_tokens: int) -> None:
        self.total = total_cost_tokens

    def begin(self, stage: str, label: str) -> None:
        if self.steps == self.stop_after:
            raise KeyboardInterrupt

    def done(self, cost_tokens: int) -> None:
        self.steps += 1
        self.cost += cost_tokens

    def say(self, message: str) -> None:
        return


@cache
def tiny_model() -> LoadedModel:
    """A random Llama that reads one character a token."""
    characters = ["<pad>", "<bos>", "<unk>", *(chr(code) for code in (10, *range(32, 127)))]
    tokenizer = Tokenizer(models.WordLevel({character: i for i, character in enumerate(characters)}, unk_token="<unk>"))
    tokenizer.pre_tokenizer = pre_tokenizers.Split(Regex(r"[\s\S]"), behavior="isolated")
    return LoadedModel(
        model=tiny.model("llama"),
        tokenizer=PreTrainedTokenizerFast(tokenizer_object=tokenizer, unk_token="<unk>", pad_token="<pad>"),
        name="tiny",
        identity="0" * 64,
        folder=Path("nowhere"),
    )


def tiny_study(*formats: str | Format, watcher: Watcher | None = None, **changed: object) -> StudyResult:
    options = StudyOptions(formats=formats, budget=replace(TINY, **changed), threads=1)
    return run_study(options, watcher, loaded=tiny_model())


def test_every_part_is_there_and_follows_the_schema():
    watcher = Watcher()
    result = tiny_study("int8", "int4", watcher=watcher)
    assert [arm.name for arm in result.arms] == ["fp32", "A/A control", "int8", "int4"]
    for arm in result.candidates:
        assert (len(arm.fidelity.documents), len(arm.needles), len(arm.json_items)) == (3, 8, 3)
        assert [memory.context_tokens for memory in arm.memory] == [128]
        assert arm.verdict is not None
    assert result.control.fidelity.kl_nats.mean < 1e-6
    assert max(arm.fidelity.path_difference for arm in result.candidates) < 1e-3
    assert watcher.cost == watcher.total
    jsonschema.validate(json.loads(result.model_dump_json()), StudyResult.model_json_schema())


def test_the_same_seed_gives_the_same_study():
    once, again = (tiny_study("int4", speed_contexts=()) for _ in range(2))
    assert once.arms == again.arms


@pytest.mark.parametrize("stop_after", [0, 5, 12, 17])
def test_an_interrupted_study_keeps_what_is_done_alike_for_all(stop_after):
    result = tiny_study("int8", "int4", watcher=Watcher(stop_after))
    assert result.interrupted
    assert exit_code(result) == 130
    read = {len(arm.fidelity.documents) if arm.fidelity else 0 for arm in result.candidates}
    assert read == {min(stop_after // 4, 3)}
    assert len({len(arm.needles) for arm in (result.baseline, *result.candidates)}) == 1
    assert result.recommendation.status == "inconclusive"


def test_a_format_that_breaks_fails_alone():
    result = tiny_study("int8", Format(Breaking("breaking", 4, "tests"), NAIVE))
    good, bad = result.candidates
    assert bad.verdict.status == "fail"
    assert "broken on purpose" in bad.broken
    assert len(good.fidelity.documents) == 3
    assert good.broken is None


def test_formats_that_the_model_refuses_are_skipped_unless_asked_for(monkeypatch):
    monkeypatch.setattr(type(registry["int4"]), "refuses", lambda *_: "no rotation here")
    result = tiny_study(documents=2, needle_seeds=1, json_prompts=0, speed_contexts=())
    assert {"int4", "int2"} <= {each.name for each in result.skipped}
    with pytest.raises(Unsupported, match="no rotation here"):
        tiny_study("int4")


def test_checked_drafts_give_what_greedy_decoding_gives():
    loaded = tiny_model()
    prompts = [each.tokens for each in build_extractions(loaded.tokenizer, count=4, seed=0)]
    arms = [baseline_arm(loaded.model), candidate_arm(loaded.model, parse_policy("int2"), None)]
    base, other = (write(arm, loaded.tokenizer, prompts, [48] * 4) for arm in arms)
    assert base != other
    assert write_from_drafts(arms[1], loaded.tokenizer, prompts, base) == other
    assert write_from_drafts(arms[1], loaded.tokenizer, prompts, other) == other


def test_forks_see_what_each_would_see_alone():
    loaded, prefix, endings = tiny_model(), range(3, 90), [(5, 9, 12), (8,), (40, 41, 42, 43, 44)]
    for arm in (baseline_arm(loaded.model), candidate_arm(loaded.model, parse_policy("int4"), None)):
        for best, ending in zip(likeliest(arm, prefix, endings), endings, strict=True):
            alone = feed(arm, arm.new_cache(), [*prefix, *ending], scored=len(ending)).argmax(dim=-1)
            assert best.tolist() == alone.tolist()


@pytest.mark.parametrize("chunk", [1, 7, 64, None])
@pytest.mark.parametrize("scored", [1, 30, 100])
def test_feeding_in_chunks_keeps_the_scored_tokens(chunk, scored):
    model = tiny_model().model
    whole, parts = baseline_arm(model), replace(baseline_arm(model), chunk_tokens=chunk)
    got, expected = (feed(arm, arm.new_cache(), range(3, 93), scored=min(scored, 90)) for arm in (parts, whole))
    assert got.shape == expected.shape
    assert tiny.relative(got, expected) < 1e-4


@pytest.mark.parametrize(
    ("make", "error"),
    [
        (lambda: tiny_study("int44"), UnknownName),
        (lambda: tiny_study("int4", document_tokens=100), UsageError),
        (lambda: run_study(StudyOptions(text="nonsense"), loaded=tiny_model()), UnknownName),
        (lambda: run_study(StudyOptions(kernel="nonsense"), loaded=tiny_model()), UnknownName),
        (lambda: run_study(StudyOptions(model="smollm3")), UnknownName),
        (lambda: StudyOptions(threads=0), UsageError),
    ],
)
def test_a_bad_request_is_refused_before_the_work(make: Callable[[], object], error):
    with pytest.raises(error):
        make()


# ---- the embedded model --------------------------------------------------------------------------------------------

SMALL = Budget(
    "small", documents=3, document_tokens=288, needle_lengths=(320,), needles=8, needle_seeds=3, json_prompts=4,
    speed_contexts=(),
)  # fmt: skip


@cache
def small_study() -> StudyResult:
    options = StudyOptions(formats=("int8", Format(NAIVE, NAIVE)), budget=SMALL, threads=1)
    return run_study(options, loaded=load("default"))


@pytest.mark.model
@pytest.mark.xdist_group("study")
def test_the_obvious_4_bit_codec_fails_and_int8_passes():
    result = small_study()
    int8, naive = result.candidates
    assert (int8.verdict.status, naive.verdict.status) == ("pass", "fail"), (int8.verdict, naive.verdict)
    assert naive.fidelity.kl_nats.mean > 0.02
    assert int8.fidelity.kl_nats.mean < 0.001
    assert result.recommendation.format == "int8"
    assert result.control.fidelity.kl_nats.mean < 1e-6
    assert sum(cell.found for cell in result.baseline.needles) >= 16
    assert sum(item.right_values for item in result.baseline.json_items) >= 3


@pytest.mark.model
@pytest.mark.xdist_group("study")
def test_what_prefill_measures_is_what_decode_serves():
    assert all(arm.fidelity.path_difference < 2e-3 for arm in small_study().candidates)


@pytest.mark.model
@pytest.mark.xdist_group("study")
def test_ctrl_c_writes_what_was_done_and_says_so(tmp_path):
    command = [
        sys.executable,
        "-m",
        "kvarto.cli",
        "study",
        "--formats",
        "int8",
        "--threads",
        "1",
        "--out",
        str(tmp_path),
    ]
    with subprocess.Popen(command, stderr=subprocess.PIPE, text=True, env=os.environ | {"COLUMNS": "100"}) as process:
        for line in process.stderr:
            if "fidelity" in line:
                break
        time.sleep(2)
        process.send_signal(signal.SIGINT)
        said = process.stderr.read()
    assert process.returncode == 130, said
    assert "interrupted: what was done is in the report" in said
    assert StudyResult.model_validate_json((tmp_path / "study.json").read_text()).interrupted
    assert "Interrupted" in (tmp_path / "report.html").read_text()


@pytest.mark.model
@pytest.mark.xdist_group("study")
@pytest.mark.browser
@pytest.mark.parametrize("width", [1280, 420])
def test_the_report_in_a_browser(width, tmp_path):
    if BROWSER is None:
        pytest.skip("no Chromium on PATH: make browser installs it")
    write_files(small_study(), tmp_path)
    picture = tmp_path / "report.png"
    with tempfile.TemporaryDirectory() as profile:
        flags = ["--headless", "--no-sandbox", "--disable-gpu", "--no-first-run", "--disable-background-networking"]
        flags += [f"--user-data-dir={profile}", f"--window-size={width},2400", "--hide-scrollbars"]
        subprocess.run(
            [BROWSER, *flags, f"--screenshot={picture}", (tmp_path / "report.html").as_uri()],
            check=True, capture_output=True, timeout=120,
        )  # fmt: skip
    assert picture.read_bytes().startswith(b"\x89PNG")
    assert picture.stat().st_size > 20_000
