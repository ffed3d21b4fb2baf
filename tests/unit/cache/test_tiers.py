"""Blocks outside the arena: budgets, order, restarts, and everything that can go wrong with files."""

from __future__ import annotations

import os
import signal
import subprocess
import sys
import time
from collections.abc import Callable
from pathlib import Path
from typing import Any

import pytest

from kvarto.cache import tiers
from kvarto.cache.tiers import DiskTier, HostTier, Key, Tiers
from kvarto.errors import UsageError


def key(number: int) -> Key:
    return number.to_bytes(32, "big"), "g0sealed"


def wait_for(condition: Callable[[], bool]) -> None:
    end = time.monotonic() + 20
    while not condition():
        assert time.monotonic() < end, "it never came true"
        time.sleep(0.01)


def written(disk: DiskTier) -> None:
    wait_for(lambda: not disk._pending)


# ---- host memory -----------------------------------------------------------------------------------------------------


def test_host_memory_keeps_what_was_used_last() -> None:
    host = HostTier(30)
    assert host.put(key(1), b"x" * 10) == []
    host.put(key(2), b"y" * 10)
    host.put(key(3), b"z" * 10)
    assert host.get(key(1)) == b"x" * 10
    assert host.put(key(4), b"w" * 10) == [(key(2), b"y" * 10)]
    assert [number for number in range(1, 5) if key(number) in host] == [1, 3, 4]
    assert host.used_bytes == 30
    assert host.put(key(5), b"v" * 31)[-1] == (key(5), b"v" * 31)
    assert host.used_bytes == 0


def test_what_leaves_host_memory_goes_to_files_and_comes_back(tmp_path: Path) -> None:
    both = Tiers(HostTier(20), DiskTier(tmp_path, 1000))
    for number in range(5):
        both.put(key(number), bytes([number]) * 10)
    assert all(both.get(key(number)) == bytes([number]) * 10 for number in range(5))
    assert both.hits["disk"] >= 3
    assert both.get(key(9)) is None
    both.close()
    later = Tiers(None, DiskTier(tmp_path, 1000))
    assert all(later.get(key(number)) == bytes([number]) * 10 for number in range(5)), (
        "closing writes what is in memory"
    )
    later.close()


# ---- files -----------------------------------------------------------------------------------------------------------


def test_files_outlive_the_engine_and_the_least_used_go_first(tmp_path: Path) -> None:
    disk = DiskTier(tmp_path, 35)
    for number in range(3):
        disk.put(key(number), bytes([number]) * 10)
    written(disk)
    assert disk.get(key(0)) == bytes(10)
    disk.put(key(3), b"d" * 10)
    written(disk)
    assert [number for number in range(4) if key(number) in disk] == [0, 2, 3]
    assert disk.used_bytes == 30
    for i, number in enumerate((3, 2, 0)):  # clocks may be coarse
        os.utime(disk._path(key(number)), (i, i))
    disk.close()
    smaller = DiskTier(tmp_path, 20)
    assert [number for number in range(4) if key(number) in smaller] == [0, 2]
    assert len(list(tmp_path.glob("??/*.kvb"))) == 2
    smaller.close()


def test_a_clock_that_is_set_back_does_not_make_what_is_used_now_look_old(tmp_path: Path) -> None:
    disk = DiskTier(tmp_path, 1000)
    for number in range(3):
        disk.put(key(number), b"x" * 10)
    disk.close()
    for number, days in ((0, 30), (1, 1)):  # they were used while the clock was ahead
        then = time.time() + days * 86_400
        os.utime(disk._path(key(number)), (then, then))
    disk = DiskTier(tmp_path, 1000)
    assert disk.get(key(2)) is not None
    disk.put(key(3), b"x" * 10)
    disk.close()
    smaller = DiskTier(tmp_path, 20)
    assert [number for number in range(4) if key(number) in smaller] == [2, 3]
    smaller.close()


def test_what_waits_to_be_written_can_be_read_and_forgotten(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    disk = DiskTier(tmp_path, 1000)
    with monkeypatch.context() as patch:
        patch.setattr(disk, "_write", lambda *_: time.sleep(0.01))
        disk.put(key(1), b"a")
        assert disk.get(key(1)) == b"a"
        disk.forget(key(1))
        assert key(1) not in disk
        assert disk._pending_bytes == 0
    disk.put(key(2), b"b")
    written(disk)
    disk.forget(key(2))
    assert disk.get(key(2)) is None
    assert list(tmp_path.glob("??/*")) == []
    disk.close()


def test_a_file_that_somebody_removed_is_forgotten(tmp_path: Path) -> None:
    disk = DiskTier(tmp_path, 1000)
    disk.put(key(1), b"a")
    written(disk)
    Path(disk._path(key(1))).unlink()
    assert disk.get(key(1)) is None
    assert (key(1) in disk, disk.used_bytes) == (False, 0)
    disk.close()


def test_a_full_disk_loses_nothing_that_was_there(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch, caplog: pytest.LogCaptureFixture
) -> None:
    disk = DiskTier(tmp_path, 1000)
    disk.put(key(1), b"a" * 10)
    written(disk)

    def full(path: str, data: bytes) -> None:
        Path(path).write_bytes(data[: len(data) // 2])
        raise OSError(28, "No space left on device")

    with monkeypatch.context() as patch:
        patch.setattr(tiers, "_write_bytes", full)
        disk.put(key(2), b"b" * 10)
        written(disk)
    assert disk.get(key(1)) == b"a" * 10
    assert disk.get(key(2)) is None
    assert (disk.failures, disk.used_bytes) == (1, 10)
    assert "blocks are not kept" in caplog.text
    assert "No space left on device" in caplog.text
    assert [path.suffix for path in tmp_path.glob("??/*")] == [".kvb"]
    disk.put(key(3), b"c")
    assert key(3) not in disk, "it pauses after a failure"
    disk._paused_until = 0.0
    disk.put(key(3), b"c")
    written(disk)
    assert disk.get(key(3)) == b"c"
    disk.close()


def test_a_slow_disk_does_not_fill_the_memory(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(tiers, "_MOST_PENDING_BYTES", 25)
    disk = DiskTier(tmp_path, 1000)
    write = disk._write

    def slow(*arguments: Any) -> None:
        time.sleep(0.05)
        write(*arguments)

    monkeypatch.setattr(disk, "_write", slow)
    for number in range(6):
        disk.put(key(number), b"x" * 10)
    assert disk._pending_bytes <= 20
    for number in range(6, 10):
        disk.put(key(number), b"y" * 10, wait=True)
    disk.close()
    kept = len(list(tmp_path.glob("??/*.kvb")))
    assert 6 <= kept < 10


def test_a_folder_is_one_engines_own(tmp_path: Path) -> None:
    disk = DiskTier(tmp_path, 1000)
    with pytest.raises(UsageError, match="offload folder: expected one that no other engine uses"):
        DiskTier(tmp_path, 1000)
    disk.close()
    DiskTier(tmp_path, 1000).close()
    (tmp_path / "file").touch()
    with pytest.raises(UsageError, match="offload folder: expected one that can be written to"):
        DiskTier(tmp_path / "file", 1000)


_WRITER = """
import sys
from pathlib import Path
from kvarto.cache.tiers import DiskTier
disk, told = DiskTier(Path(sys.argv[1]), 1 << 30), False
for number in range(100_000):
    disk.put((number.to_bytes(32, "big"), "g0sealed"), bytes([number % 251]) * 300_000, wait=True)
    if number >= 20 and len(disk._files) > 5 and not told:
        print("going", flush=True)
        told = True
"""


def test_after_kill_9_every_file_is_whole(tmp_path: Path) -> None:
    for _ in range(3):
        with subprocess.Popen(
            [sys.executable, "-c", _WRITER, str(tmp_path)], stdout=subprocess.PIPE, text=True
        ) as process:
            assert process.stdout is not None
            assert process.stdout.readline() == "going\n"
            time.sleep(0.02)
            process.send_signal(signal.SIGKILL)
        disk = DiskTier(tmp_path, 1 << 30)
        numbers = [number for number in range(100_000) if key(number) in disk]
        assert len(numbers) > 5
        for number in numbers:
            assert disk.get(key(number)) == bytes([number % 251]) * 300_000
        assert not list(tmp_path.glob("??/*.part"))
        disk.close()


def test_closing_keeps_what_was_used_last_and_may_be_done_twice(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr(tiers, "_MOST_PENDING_BYTES", 25)
    both = Tiers(HostTier(100), DiskTier(tmp_path, 55))
    for number in range(4):
        both.put(key(number), bytes([number]) * 10)
    both.close([(key(number), 10, lambda number=number: bytes([number]) * 10) for number in range(4, 7)])  # type: ignore[misc]
    both.put(key(8), b"late" * 40)
    both.close([(key(9), 10, lambda: bytes(10))])
    later = DiskTier(tmp_path, 55)
    assert [number for number in range(10) if key(number) in later] == [2, 3, 4, 5, 6]
    later.close()
