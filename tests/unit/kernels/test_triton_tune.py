"""Tunings of the GPU kernel: where they come from, and that a file which is not ours does no harm."""

from __future__ import annotations

import json
from collections.abc import Iterator
from pathlib import Path

import pytest

from kvarto.errors import UsageError
from kvarto.formats import parse_format
from kvarto.kernels import triton_tune
from kvarto.kernels.triton_tune import CANDIDATES, Tuning, key_of, trial, tune, tuning_for
from kvarto.layout import Geometry

H200, OTHER = "NVIDIA H200", "NVIDIA Imaginary 1"
LAYOUT = parse_format("int4").layout(Geometry(8, 128, 128))
DEFAULT = Tuning(168, True)
FAST = {Tuning(168, True): 3.0, Tuning(168, False): 3.5, Tuning(128, True): 2.0, Tuning(255, False): 4.0}


@pytest.fixture(autouse=True)
def folder(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> Iterator[Path]:
    monkeypatch.setenv("KVARTO_HOME", str(tmp_path / "home"))
    triton_tune._kept.cache_clear()
    yield tmp_path / "home"
    triton_tune._kept.cache_clear()


def test_programs_of_a_multiprocessor() -> None:
    assert [tuning.programs for tuning in CANDIDATES] == [12, 12, 16, 8]


@pytest.mark.parametrize("name", ["int4", "int3", "int2", "kivi2", "int8", "fp8"])
def test_the_shipped_table_has_what_was_measured(name: str) -> None:
    assert key_of(H200, LAYOUT, name, name) in triton_tune._shipped()
    assert tuning_for(H200, LAYOUT, name, name) == {"int8": Tuning(255, False), "fp8": Tuning(168, False)}.get(
        name, DEFAULT
    )


def test_what_nobody_measured_gets_the_default() -> None:
    assert tuning_for(OTHER, LAYOUT, "int4", "int4") == DEFAULT


def test_the_fastest_is_kept_for_other_processes(folder: Path) -> None:
    assert tune(OTHER, LAYOUT, "int4", "int4", FAST.__getitem__) == Tuning(128, True)
    triton_tune._kept.cache_clear()  # as another process begins
    assert tuning_for(OTHER, LAYOUT, "int4", "int4") == Tuning(128, True)
    assert [path.name for path in folder.iterdir()] == ["tuned-gpu.json"]


def test_what_was_measured_on_this_machine_comes_before_the_shipped_table() -> None:
    tune(H200, LAYOUT, "int4", "int4", FAST.__getitem__)
    assert tuning_for(H200, LAYOUT, "int4", "int4") == Tuning(128, True)


def test_a_tuning_is_of_one_gpu_geometry_and_pair_of_codecs() -> None:
    tune(OTHER, LAYOUT, "int4", "int8", FAST.__getitem__)
    small, short = (
        parse_format("int4").layout(geometry) for geometry in (Geometry(8, 64, 128), Geometry(8, 128, 128, 32))
    )
    assert tuning_for(OTHER, LAYOUT, "int4", "int8") == Tuning(128, True)
    assert tuning_for(OTHER, LAYOUT, "int8", "int4") == DEFAULT
    assert tuning_for(H200, LAYOUT, "int4", "int8") == DEFAULT
    assert tuning_for(OTHER, small, "int4", "int8") == DEFAULT
    assert tuning_for(OTHER, short, "int4", "int8") == DEFAULT


def test_tunings_add_up_and_the_last_one_counts() -> None:
    tune(OTHER, LAYOUT, "int4", "int4", FAST.__getitem__)
    tune(OTHER, LAYOUT, "int8", "int8", FAST.__getitem__)
    tune(OTHER, LAYOUT, "int8", "int8", lambda tuning: -FAST[tuning] + 5.0)
    assert tuning_for(OTHER, LAYOUT, "int4", "int4") == Tuning(128, True)
    assert tuning_for(OTHER, LAYOUT, "int8", "int8") == Tuning(255, False)


def test_noise_does_not_decide() -> None:
    assert tune(OTHER, LAYOUT, "int4", "int4", lambda tuning: 1.0 if tuning == DEFAULT else 0.995) == DEFAULT


def test_candidates_that_cannot_run() -> None:
    assert tune(
        OTHER, LAYOUT, "int4", "int4", lambda tuning: 1.0 if tuning.registers == 255 else float("inf")
    ) == Tuning(255, False)
    with pytest.raises(UsageError, match="at least one candidate"):
        tune(OTHER, LAYOUT, "int8", "int8", lambda _tuning: float("inf"))
    assert tuning_for(OTHER, LAYOUT, "int8", "int8") == DEFAULT


def test_measuring_runs_what_is_on_trial() -> None:
    seen = []

    def measure(tuning: Tuning) -> float:
        with trial(tuning):
            seen.append(tuning_for(H200, LAYOUT, "int4", "int4"))
        return FAST[tuning]

    tune(OTHER, LAYOUT, "int4", "int4", measure)
    assert seen == list(CANDIDATES)
    assert tuning_for(H200, LAYOUT, "int4", "int4") == DEFAULT


ENTRY = {"registers": 128, "ahead": True}
KEY = key_of(OTHER, LAYOUT, "int4", "int4")


@pytest.mark.parametrize(
    "text",
    [
        "",
        "{",
        "[1]",
        json.dumps({"tunings": {KEY: ENTRY}}),
        json.dumps({"format": "kvarto GPU tunings 9", "tunings": {KEY: ENTRY}}),
        json.dumps({"format": "kvarto GPU tunings 2", "tunings": [ENTRY]}),
        json.dumps({"format": "kvarto GPU tunings 2", "tunings": {KEY: 128}}),
        json.dumps({"format": "kvarto GPU tunings 2", "tunings": {KEY: {"registers": 128}}}),
        json.dumps({"format": "kvarto GPU tunings 2", "tunings": {KEY: ENTRY | {"registers": 512}}}),
        json.dumps({"format": "kvarto GPU tunings 2", "tunings": {KEY: ENTRY | {"registers": "128"}}}),
        json.dumps({"format": "kvarto GPU tunings 2", "tunings": {KEY: ENTRY | {"ahead": 1}}}),
    ],
)
def test_a_broken_or_foreign_file_is_ignored_with_one_warning(folder: Path, text: str) -> None:
    folder.mkdir()
    (folder / "tuned-gpu.json").write_text(text)
    with pytest.warns(RuntimeWarning, match=r"GPU tunings are not used: .*tuned-gpu.json: .*; delete it") as warned:
        got = [tuning_for(OTHER, LAYOUT, "int4", "int4") for _ in range(3)]
    assert got == [DEFAULT] * 3
    assert len(warned) == 1


def test_a_broken_file_is_replaced(folder: Path) -> None:
    folder.mkdir()
    (folder / "tuned-gpu.json").write_bytes(b"\xff\xfe")
    with pytest.warns(RuntimeWarning, match="GPU tunings are not used"):
        tune(OTHER, LAYOUT, "int4", "int4", FAST.__getitem__)
    assert tuning_for(OTHER, LAYOUT, "int4", "int4") == Tuning(128, True)


def test_a_folder_that_cannot_be_written(folder: Path) -> None:
    folder.write_text("in the way")
    with pytest.warns(RuntimeWarning) as warned:
        assert tune(OTHER, LAYOUT, "int4", "int4", FAST.__getitem__) == Tuning(128, True)
    assert "set KVARTO_HOME" in str(warned[-1].message)
