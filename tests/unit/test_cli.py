"""The command line as users meet it: one line for every error, the right exit code, names that can be read."""

from __future__ import annotations

import os
import re
import subprocess
import sys
from pathlib import Path

import pytest

from kvarto import cli
from kvarto.errors import KvartoError
from kvarto.models.catalog import CATALOG, DEFAULT_MODEL


def kvarto(*words: str, stdout: int = subprocess.PIPE, **environment: str) -> subprocess.CompletedProcess[str]:
    code = "from kvarto.cli import main; main()"
    return subprocess.run(
        [sys.executable, "-c", code, *words],
        stdout=stdout,
        stderr=subprocess.PIPE,
        text=True,
        env=os.environ | environment,
        check=False,
    )


def fail_with(error: BaseException, monkeypatch: pytest.MonkeyPatch) -> None:
    def app(*_: object, **__: object) -> None:
        raise error

    monkeypatch.setattr(cli, "app", app)


@pytest.mark.parametrize(
    ("words", "line"),
    [
        (["nope"], "No such command 'nope'; see: kvarto --help"),
        (["--nope"], "No such option: --nope; see: kvarto --help"),
        (["study", "--threads", "many"], "Invalid value for '--threads': .*; see: kvarto study --help"),
        (["study", "--formats"], "Option '--formats' requires an argument"),
        (["models", "remove"], "Missing argument 'name'; see: kvarto models remove --help"),
        (["models", "fetch", "[/red]:smile:"], r"model: expected one of .*, got '\[/red\]:smile:'; see the list: .*"),
        (["models", "fetch", "smollm2-135m"], "model: .*; did you mean smollm2-135m-instruct.*"),
    ],
)
def test_a_usage_error_is_one_line(words: list[str], line: str, capsys: pytest.CaptureFixture[str]) -> None:
    assert cli.run(words) == 2
    out, err = capsys.readouterr()
    assert out == ""
    assert re.fullmatch(f"error: {line}\n", err), err


@pytest.mark.parametrize(
    ("error", "code", "line"),
    [
        (KvartoError("[bold]a\n  b[/nope]"), 2, "error: [bold]a b[/nope]\n"),
        (ZeroDivisionError("x\ny"), 70, "error: internal error: ZeroDivisionError: x y; run again with --debug .*\n"),
        (PermissionError(13, "Permission denied", "/x"), 2, "error: /x: Permission denied\n"),
        (KeyboardInterrupt(), 130, ""),
        (BrokenPipeError(), 141, ""),
    ],
)
def test_every_error_has_a_line_and_a_code(
    error: BaseException, code: int, line: str, monkeypatch: pytest.MonkeyPatch, capsys: pytest.CaptureFixture[str]
) -> None:
    fail_with(error, monkeypatch)
    assert cli.run([]) == code
    err = capsys.readouterr().err
    assert err == line or re.fullmatch(line, err), err


def test_a_long_line_is_not_wrapped(monkeypatch: pytest.MonkeyPatch, capsys: pytest.CaptureFixture[str]) -> None:
    monkeypatch.setenv("COLUMNS", "40")
    fail_with(KvartoError("word " * 50), monkeypatch)
    cli.run([])
    assert capsys.readouterr().err.count("\n") == 1


@pytest.mark.parametrize("words", [["--debug", "models", "remove", "nope"], ["models", "remove", "nope", "--debug"]])
def test_debug_shows_the_traceback_wherever_it_stands(words: list[str], capsys: pytest.CaptureFixture[str]) -> None:
    assert cli.run(words) == 2
    err = capsys.readouterr().err
    assert err.startswith("Traceback")
    assert err.splitlines()[-1].startswith("error: model: ")


def test_debug_is_in_the_help(capsys: pytest.CaptureFixture[str]) -> None:
    assert cli.run([]) == 0
    shown = capsys.readouterr().out
    assert "--debug" in shown
    assert "codecs" in shown


@pytest.mark.parametrize("command", [["models"], ["codecs"]])
def test_names_are_whole_on_80_columns(
    command: list[str], monkeypatch: pytest.MonkeyPatch, capsys: pytest.CaptureFixture[str]
) -> None:
    monkeypatch.setenv("COLUMNS", "80")
    assert cli.run(command) == 0
    shown = capsys.readouterr().out
    for name in CATALOG if command == ["models"] else cli.registry:
        assert re.search(rf"^ {re.escape(name)} ", shown, re.MULTILINE), name
    assert max(map(len, shown.splitlines())) <= 80
    assert "…" not in shown


def test_models_remove_says_what_it_removed(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch, capsys: pytest.CaptureFixture[str]
) -> None:
    monkeypatch.setenv("KVARTO_HOME", str(tmp_path))
    folder = tmp_path / "models" / DEFAULT_MODEL
    folder.mkdir(parents=True)
    for said in (f"removed {folder}\n", f"nothing to remove: {folder} does not exist\n"):
        assert cli.run(["models", "remove", "default"]) == 0
        assert capsys.readouterr().out == said
        assert not folder.exists()


def test_a_home_that_means_nothing(monkeypatch: pytest.MonkeyPatch, capsys: pytest.CaptureFixture[str]) -> None:
    monkeypatch.setenv("KVARTO_HOME", "~nosuchuser")
    assert cli.run(["codecs"]) == 2
    assert "KVARTO_HOME: expected a folder, got ~nosuchuser; set it" in capsys.readouterr().err


@pytest.mark.skipif(not Path("/dev/full").exists(), reason="no /dev/full")
def test_a_full_disk_is_one_line() -> None:
    with Path("/dev/full").open("w") as full:
        result = kvarto("codecs", "--json", stdout=full.fileno())
    assert (result.returncode, result.stderr) == (2, "error: cannot write: No space left on device\n")


@pytest.mark.parametrize("words", [["models"], ["models", "--json"]])
def test_a_reader_that_is_gone_is_no_error(words: list[str]) -> None:
    read_end, write_end = os.pipe()
    os.close(read_end)
    result = kvarto(*words, stdout=write_end)
    os.close(write_end)
    assert (result.returncode, result.stderr) == (141, "")


def test_a_broken_numba_is_as_none(tmp_path: Path) -> None:
    (tmp_path / "numba").mkdir()
    (tmp_path / "numba" / "__init__.py").write_text("raise ImportError('needs another\\nnumpy')")
    for command in ("codecs", "models"):
        result = kvarto(command, PYTHONPATH=str(tmp_path))
        assert (result.returncode, result.stderr) == (0, "")
        assert "numba" not in result.stdout
    code = """
from kvarto.jit import require
from kvarto.errors import BackendUnavailable
from kvarto.kernels.numba import NumbaKernel
print(NumbaKernel().supports(None, None, None, "cpu").reason)
try:
    require("numba")
except BackendUnavailable as error:
    print(error)
"""
    result = subprocess.run(
        [sys.executable, "-c", code],
        capture_output=True,
        text=True,
        check=True,
        env=os.environ | {"PYTHONPATH": str(tmp_path)},
    )
    reason = "it does not import here (ImportError: needs another numpy); run: pip install 'kvarto[engine]'"
    assert result.stdout.splitlines() == [f"numba: {reason}", f"numba is not available: {reason}"]


CODEC = "from kvarto.codecs.bf16 import Raw\n"


@pytest.mark.parametrize(
    ("source", "line"),
    [
        ("import nosuchthing", "expected theirs to import, got ModuleNotFoundError: No module named 'nosuchthing'"),
        ("1 / 0", "expected theirs to import, got ZeroDivisionError: division by zero"),
        ("", "expected a module with a tuple CODECS, got theirs with none"),
        ("CODECS = 'int9'", "expected a module with a tuple CODECS, got theirs with str"),
        ("CODECS = ('int9',)", "expected Codec objects with a name, got 'int9'"),
        (CODEC + "CODECS = (Raw,)", "expected Codec objects with a name, got <class 'kvarto.codecs.bf16.Raw'>"),
        (CODEC + "CODECS = (Raw(9, 16, 'x', dtype='bfloat16'),)", "expected Codec objects with a name, got .*"),
        (CODEC + "CODECS = (Raw('mine', 16, 'x', dtype='bfloat16'),)", ""),
    ],
)
def test_a_plug_in_that_does_not_fit_is_named(tmp_path: Path, source: str, line: str) -> None:
    (tmp_path / "theirs.py").write_text(source)
    info = tmp_path / "their_codecs-1.0.dist-info"
    info.mkdir()
    (info / "METADATA").write_text("Metadata-Version: 2.1\nName: their-codecs\nVersion: 1.0\n")
    (info / "entry_points.txt").write_text("[kvarto.codecs]\nint9 = theirs\n")
    result = kvarto("codecs", PYTHONPATH=str(tmp_path))
    if not line:
        assert (result.returncode, result.stderr) == (0, "")
        assert "mine" in result.stdout
        return
    expected = f"error: entry point 'int9' of kvarto.codecs: {line}; repair or uninstall their-codecs\n"
    assert result.returncode == 2
    assert re.fullmatch(expected, result.stderr), result.stderr
