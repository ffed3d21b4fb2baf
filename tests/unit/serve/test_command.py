"""`kvarto serve` says in one line what is wrong, before a model is loaded."""

from __future__ import annotations

import gc
import re
import socket
from collections.abc import Iterator
from pathlib import Path

import pytest

pytest.importorskip("torch")
pytest.importorskip("llguidance")
pytest.importorskip("uvicorn")

import threading

import uvicorn

from kvarto import cli, jit
from kvarto.errors import UsageError
from kvarto.serve import command
from kvarto.serve.command import DrainingServer, _settle


@pytest.fixture
def taken() -> Iterator[int]:
    with socket.create_server(("127.0.0.1", 0)) as other:
        yield other.getsockname()[1]


@pytest.mark.parametrize(
    ("words", "line"),
    [
        (["--kv", "in4"], r"codec: expected one of .*, got 'in4'; did you mean int4.*"),
        (["--also", "int4+sink7"], r"sink tokens: .*"),
        (["--memory", "much"], r"memory: expected a size such as 8GiB.*, got 'much'"),
        (["--host-memory", "much"], r"host_memory: expected a size such as 8GiB.*, got 'much'"),
        (["--disk-memory", "much"], r"disk_memory: expected a size such as 8GiB.*, got 'much'"),
        (
            ["--host", "no.such.host.invalid", "--port", "0"],
            r"host: expected an address of this machine, got no\.such.*",
        ),
        (["--port", "99999"], r"Invalid value for '--port': .*"),
        (["--probe-share", "2"], r"probe_share: expected 0 to 1, got 2\.0"),
        (["--probe-threshold", "0.1"], r"probe_threshold: expected a probe_share above 0 with it, got 0\.0"),
        (
            ["--probe-share", "1", "--probe-threshold", "0.1", "--also", "int8"],
            r"probe_threshold: expected bf16 among the formats offered, got int4, int8; add --also bf16",
        ),
        (["nope", "--port", "0"], r"model: expected one of .*"),
    ],
)
def test_a_usage_error_is_one_line(words: list[str], line: str, capsys: pytest.CaptureFixture[str]) -> None:
    assert cli.run(["serve", *words]) == 2
    err = capsys.readouterr().err
    assert re.fullmatch(f"error: {line}\n", err), err


def test_a_configuration_is_read_before_a_model_is_loaded(tmp_path: Path, capsys: pytest.CaptureFixture[str]) -> None:
    file = tmp_path / "kvarto.toml"
    for text, words, line in (
        ("[serve]\nport = 'x'", [], "serve.port: expected a valid integer, got 'x'"),
        ("[[rules]]\nkv = 'in4'", [], r"rules\[0\].kv: expected one of .*, got 'in4'; did you mean int4.*"),
        (
            "[[rules]]\nkv = 'fp8'",
            ["--kv", "int8"],
            r"rules\[0\].kv: expected a format of kv or also: int8, got 'fp8'; .*",
        ),
    ):
        file.write_text(text)
        assert cli.run(["serve", *words, "--config", str(file)]) == 2
        err = capsys.readouterr().err
        assert re.fullmatch(f"error: {re.escape(str(file))}: {line}\n", err), err


@pytest.mark.parametrize("kv", ["POLICY", "mine", "int8"])
def test_rules_may_name_a_policy_as_it_was_given_or_by_its_name(
    kv: str, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    served = []
    monkeypatch.setattr(command, "serve", lambda options, config: served.append(options))
    policy, file = tmp_path / "mine.json", tmp_path / "kvarto.toml"
    policy.write_text('{"kvarto_policy": 1, "layers": ["int4", "int8"]}')
    file.write_text(f"[serve]\nkv = '{policy}'\nalso = ['int8']\n[[rules]]\nkv = '{kv.replace('POLICY', str(policy))}'")
    assert cli.run(["serve", "--config", str(file)]) == 0
    assert served[0].kv == str(policy)


def test_a_policy_file_that_is_wrong_is_said_before_a_model_is_loaded(
    tmp_path: Path, capsys: pytest.CaptureFixture[str]
) -> None:
    (tmp_path / "p.json").write_text('{"kvarto_policy": 1, "layers": ["in4"]}')
    assert cli.run(["serve", "--kv", str(tmp_path / "p.json")]) == 2
    assert re.search(r"layers\.0: codec: expected one of .*, got 'in4'; did you mean int4", capsys.readouterr().err)


def test_the_command_line_wins_over_the_file(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    served = []
    monkeypatch.setattr(command, "serve", lambda options, config: served.append((options, config)))
    file = tmp_path / "kvarto.toml"
    file.write_text(
        "[serve]\nmodel = 'm'\nkv = 'int8'\nalso = ['bf16']\nport = 1\ndrain_seconds = 5\n[[rules]]\nkv = 'bf16'"
    )
    assert cli.run(["serve", "--config", str(file), "--port", "8000", "--kv", "fp8"]) == 0
    ((options, config),) = served
    assert (options.model, options.kv, options.also, options.port, options.drain_seconds) == (
        "m",
        "fp8",
        ["bf16"],
        8000,
        5,
    )
    assert options.memory == "1GiB"
    assert len(config.rules) == 1


def test_a_taken_port(taken: int, capsys: pytest.CaptureFixture[str]) -> None:
    assert cli.run(["serve", "--port", str(taken)]) == 2
    err = capsys.readouterr().err
    assert re.fullmatch(r"error: port: expected .*, got 127\.0\.0\.1:\d+ \(Address already in use\)\n", err), err


def test_a_port_that_another_server_took_while_this_one_loaded() -> None:
    with command._bind("127.0.0.1", 0) as first, command._bind("127.0.0.1", first.getsockname()[1]) as second:
        command._listen(first, 5)
        with pytest.raises(UsageError, match=r"port: expected .*, got 127\.0\.0\.1:\d+ \(Address already in use\)"):
            command._listen(second, 5)


def test_what_is_missing_is_named(monkeypatch: pytest.MonkeyPatch, capsys: pytest.CaptureFixture[str]) -> None:
    monkeypatch.setattr(jit, "why_unavailable", lambda package: "it is not installed" if package == "uvicorn" else "")
    assert cli.run(["serve"]) == 2
    assert (
        capsys.readouterr().err
        == "error: uvicorn is not available: it is not installed; run: pip install 'kvarto[serve]'\n"
    )


class FakeEngine:
    """Its requests end when it is closed a second time."""

    running, waiting = 1, 0

    def __init__(self) -> None:
        self.closed: list[bool] = []
        self._over = threading.Event()

    def close(self, *, drain: bool, timeout_seconds: float) -> None:
        self.closed.append(drain)
        if not drain:
            self._over.set()
        assert self._over.wait(timeout_seconds)


def test_signals_drain_then_end_then_force() -> None:
    engine = FakeEngine()
    server = DrainingServer(uvicorn.Config(lambda *_: None, log_config=None), engine, 10)  # type: ignore[arg-type]
    server.handle_exit(15, None)
    assert not server.should_exit
    server.handle_exit(15, None)
    for thread in threading.enumerate():
        if thread.name == "kvarto close":
            thread.join()
    assert engine.closed == [True, False]
    assert server.should_exit
    assert not server.force_exit
    server.handle_exit(2, None)
    assert server.force_exit


def test_what_is_there_before_the_first_client_is_not_looked_through_again() -> None:
    """A model's objects would make Python look for rings of others the more rarely."""
    try:
        _settle()
        assert gc.get_freeze_count() > 100_000
        assert gc.get_count()[2] == 0
        assert len(gc.get_objects()) < gc.get_freeze_count() / 10
    finally:
        gc.unfreeze()
