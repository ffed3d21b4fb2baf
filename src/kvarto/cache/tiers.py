"""Where blocks go that leave the engine's memory: host memory, then files. Bytes by key; no torch, and nothing is known of what the bytes mean.

A key says what the bytes are (a digest of everything that they depend on, and a label); so whoever asks with the same key gets the same bytes, after
a restart too. Nothing is promised: a tier may have forgotten anything, and then it is computed again.
"""

from __future__ import annotations

import fcntl
import logging
import os
import queue
import re
import threading
import time
from collections import OrderedDict
from collections.abc import Callable, Sequence
from functools import partial
from pathlib import Path
from typing import IO

from kvarto.errors import UsageError

_log = logging.getLogger(__name__)

Key = tuple[bytes, str]
_SUFFIX, _PART = ".kvb", ".part"
_NAME = re.compile(r"([0-9a-f]{64})-([a-z0-9]{1,16})\.kvb")
# Bytes that wait to be written at most; what comes beyond is not kept.
_MOST_PENDING_BYTES = 256 << 20
# After a write that failed (a full disk) nothing is written for so long.
_PAUSE_SECONDS = 30.0


class HostTier:
    """The most recently used blocks in host memory, `budget_bytes` of them."""

    def __init__(self, budget_bytes: int) -> None:
        self.budget_bytes, self.used_bytes = budget_bytes, 0
        self._blocks: OrderedDict[Key, bytes] = OrderedDict()

    def __contains__(self, key: Key) -> bool:
        return key in self._blocks

    def get(self, key: Key) -> bytes | None:
        """The bytes, which are now the most recently used, or None."""
        if key in self._blocks:
            self._blocks.move_to_end(key)
        return self._blocks.get(key)

    def put(self, key: Key, data: bytes) -> list[tuple[Key, bytes]]:
        """Keep them. Returns what had to leave for that, which may be the block itself."""
        self.forget(key)
        self._blocks[key] = data
        self.used_bytes += len(data)
        gone = []
        while self.used_bytes > self.budget_bytes:
            old, lost = self._blocks.popitem(last=False)
            self.used_bytes -= len(lost)
            gone.append((old, lost))
        return gone

    def forget(self, key: Key) -> None:
        """Nobody may have them any more."""
        if (data := self._blocks.pop(key, None)) is not None:
            self.used_bytes -= len(data)

    def take_all(self) -> list[tuple[Key, bytes]]:
        """Everything, least recently used first; nothing stays."""
        blocks = list(self._blocks.items())
        self._blocks.clear()
        self.used_bytes = 0
        return blocks


class DiskTier:
    """Blocks as files in a folder that one engine has for itself, `budget_bytes` of them, the least recently used ones dropped first.

    A file is written by a thread, to another name first, so that none is ever seen half-written. What waits to be written can be read already.
    Raises UsageError if the folder cannot be used, or another engine has it.
    """

    def __init__(self, folder: Path, budget_bytes: int) -> None:
        self.folder, self.budget_bytes, self.used_bytes, self.failures = folder, budget_bytes, 0, 0
        self._lock_file = _lock(folder)
        self._lock = threading.Lock()
        self._written = threading.Condition(self._lock)
        self._files: OrderedDict[Key, int] = OrderedDict()
        self._newest_ns = 0
        self._pending: dict[Key, bytes] = {}
        self._pending_bytes = 0
        self._paused_until = 0.0
        self._closed = False
        self._queue: queue.SimpleQueue[Key | None] = queue.SimpleQueue()
        self._scan()
        self._writer = threading.Thread(target=self._write_all, name="kvarto disk tier", daemon=True)
        self._writer.start()

    def __contains__(self, key: Key) -> bool:
        with self._lock:
            return key in self._pending or key in self._files

    def get(self, key: Key) -> bytes | None:
        """The bytes, which are now the most recently used, or None."""
        with self._lock:
            if key in self._pending:
                return self._pending[key]
            if key not in self._files:
                return None
            self._files.move_to_end(key)
        try:
            path = self._path(key)
            with open(path, "rb") as file:
                data = file.read()
            self._stamp(path)
        except OSError:
            self.forget(key)
            return None
        return data

    def put(self, key: Key, data: bytes, *, wait: bool = False) -> None:
        """Keep them, unless writing failed a moment ago, or too many wait to be written and one should not wait for that."""
        with self._lock:
            if self._closed or key in self._files or key in self._pending or len(data) > self.budget_bytes:
                return
            if wait:
                self._written.wait_for(lambda: self._has_room_for(data) or self._is_paused or self._closed)
            if self._closed or self._is_paused or not self._has_room_for(data):
                return
            self._pending[key] = data
            self._pending_bytes += len(data)
        self._queue.put(key)

    @property
    def _is_paused(self) -> bool:
        return time.monotonic() < self._paused_until

    def _has_room_for(self, data: bytes) -> bool:
        return not self._pending or self._pending_bytes + len(data) <= _MOST_PENDING_BYTES

    def forget(self, key: Key) -> None:
        """Nobody may have them any more."""
        with self._lock:
            self._drop(key)

    def close(self) -> None:
        """Write what waits, and let others have the folder; nothing is kept any more. Once more does no harm."""
        with self._lock:
            self._closed = True
            self._written.notify_all()
        self._queue.put(None)
        self._writer.join()
        self._lock_file.close()

    def _path(self, key: Key) -> str:
        """No Path, which would put the name into Python's table of interned strings; that one never shrinks, and grows by those that went."""
        digest, label = key[0].hex(), key[1]
        return os.path.join(self.folder, digest[:2], f"{digest}-{label}{_SUFFIX}")

    def _stamp(self, path: str) -> None:
        """The newest of all, so that the next engine knows what was used last, also where clocks were set back."""
        with self._lock:
            self._newest_ns = newest = max(time.time_ns(), self._newest_ns + 1)
        os.utime(path, ns=(newest, newest))

    def _scan(self) -> None:
        """What an earlier engine left; half-written files go."""
        found = []
        for path in self.folder.glob("??/*"):
            if path.suffix == _PART:
                path.unlink(missing_ok=True)
            elif match := _NAME.fullmatch(path.name):
                status = path.stat()
                found.append((status.st_mtime_ns, (bytes.fromhex(match[1]), match[2]), status.st_size))
        for modified, key, size in sorted(found):
            self._files[key] = size
            self.used_bytes += size
            self._newest_ns = modified
        self._make_room(0)

    def _write_all(self) -> None:
        while (key := self._queue.get()) is not None:
            with self._lock:
                data = self._pending.get(key)
            if data is not None:  # else it was forgotten meanwhile
                self._write(key, data)

    def _write(self, key: Key, data: bytes) -> None:
        path = self._path(key)
        part = path.removesuffix(_SUFFIX) + _PART
        try:
            os.makedirs(os.path.dirname(path), exist_ok=True)
            with self._lock:
                self._make_room(len(data))
            _write_bytes(part, data)
            self._stamp(part)
            os.replace(part, path)
        except OSError as error:
            self.failures += 1
            self._paused_until = time.monotonic() + _PAUSE_SECONDS
            _log.warning(
                "blocks are not kept in %s for %.0f s: %s", self.folder, _PAUSE_SECONDS, error.strerror or error
            )
            _remove(part)
            stored = False
        else:
            stored = True
        with self._lock:
            self._written.notify_all()
            if self._pending.pop(key, None) is None:  # forgotten while it was written
                _remove(path)
                return
            self._pending_bytes -= len(data)
            if stored:
                self._files[key] = len(data)
                self.used_bytes += len(data)

    def _make_room(self, nbytes: int) -> None:
        while self._files and self.used_bytes + nbytes > self.budget_bytes:
            self._drop(next(iter(self._files)))

    def _drop(self, key: Key) -> None:
        if (data := self._pending.pop(key, None)) is not None:
            self._pending_bytes -= len(data)
        if (size := self._files.pop(key, None)) is not None:
            self.used_bytes -= size
            _remove(self._path(key))


class Tiers:
    """Host memory above files, either of which may be missing. Counts what was found where, and what was kept."""

    def __init__(self, host: HostTier | None = None, disk: DiskTier | None = None) -> None:
        self.host, self.disk = host, disk
        self.hits = {"host": 0, "disk": 0}
        self.kept_bytes = self.found_bytes = self.refused = 0

    def __contains__(self, key: Key) -> bool:
        return (self.host is not None and key in self.host) or (self.disk is not None and key in self.disk)

    def get(self, key: Key) -> bytes | None:
        """The bytes from the nearest tier that has them."""
        if self.host is not None and (data := self.host.get(key)) is not None:
            self.hits["host"] += 1
            self.found_bytes += len(data)
            return data
        if self.disk is not None and (data := self.disk.get(key)) is not None:
            self.hits["disk"] += 1
            self.found_bytes += len(data)
            if self.host is not None:
                self._put_aside(self.host.put(key, data))
            return data
        return None

    def put(self, key: Key, data: bytes) -> None:
        """Keep them in the nearest tier; what leaves that goes into the next."""
        self.kept_bytes += len(data)
        self._put_aside([(key, data)] if self.host is None else self.host.put(key, data))

    def _put_aside(self, leaving: list[tuple[Key, bytes]]) -> None:
        for key, data in leaving:
            if self.disk is not None:
                self.disk.put(key, data)

    def refuse(self, key: Key) -> None:
        """They were not what the key promises."""
        self.refused += 1
        for tier in (self.host, self.disk):
            if tier is not None:
                tier.forget(key)

    def close(self, last: Sequence[tuple[Key, int, Callable[[], bytes]]] = ()) -> None:
        """Files keep what was used last, as much as they have room for: `last` (keys, bytes, what gives them) in its order, behind host memory."""
        if self.disk is None:
            return
        held: list[tuple[Key, int, Callable[[], bytes]]] = []
        if self.host is not None:
            held = [(key, len(data), partial(bytes, data)) for key, data in self.host.take_all()]
        room, kept = self.disk.budget_bytes, list[tuple[Key, Callable[[], bytes]]]()
        for key, nbytes, give in reversed([*held, *last]):
            room -= nbytes
            if room < 0:
                break
            kept.append((key, give))
        for key, give in reversed(kept):  # so that files are dropped in the order in which they were used
            self.disk.put(key, give(), wait=True)
        self.disk.close()


def _lock(folder: Path) -> IO[bytes]:
    try:
        folder.mkdir(parents=True, exist_ok=True)
        file = (folder / "lock").open("wb")
    except OSError as error:
        raise UsageError("offload folder", "one that can be written to", f"{folder}: {error.strerror}") from None
    try:
        fcntl.flock(file, fcntl.LOCK_EX | fcntl.LOCK_NB)
    except OSError:
        file.close()
        raise UsageError(
            "offload folder", "one that no other engine uses", str(folder), "give each engine its own"
        ) from None
    return file


def _write_bytes(path: str, data: bytes) -> None:
    with open(path, "wb") as file:
        file.write(data)


def _remove(path: str) -> None:
    try:
        os.unlink(path)
    except FileNotFoundError:
        pass
    except OSError as error:
        _log.warning("%s cannot be removed: %s", path, error.strerror)
