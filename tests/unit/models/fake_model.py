"""A model small enough to cut into wheels here: pieces, downloader and converter for the tests of fetching."""

from __future__ import annotations

import hashlib
import os
import random
import signal
import time
import zipfile
from pathlib import Path

from kvarto.models import fetch
from kvarto.models.catalog import ModelEntry, Package

PARTS = 12
PIECES = [random.Random(number).randbytes(1000 + number) for number in range(PARTS)]
GGUF = b"".join(PIECES)


def entry(**changed: object) -> ModelEntry:
    fields: dict[str, object] = {
        "name": "fake",
        "packages": tuple(Package(f"fake-part{number}", "1.0") for number in range(1, PARTS + 1)),
        "member": r"fake_part\d+/data/part(?P<part>\d+)\.bin",
        "gguf_bytes": len(GGUF),
        "gguf_sha256": hashlib.sha256(GGUF).hexdigest(),
        "model_bytes": 1000,
        "licence": "MIT",
        "note": "",
    }
    return ModelEntry(**(fields | changed))  # type: ignore[arg-type]


def write_wheel(package: Package, folder: Path, members: dict[str, bytes]) -> Path:
    """A wheel that pip accepts, with the members given."""
    stem = f"{package.name.replace('-', '_')}-{package.version}"
    wheel = folder / f"{stem}-py3-none-any.whl"
    with zipfile.ZipFile(wheel, "w") as archive:
        for name, data in members.items():
            archive.writestr(name, data)
        meta = f"Metadata-Version: 2.1\nName: {package.name}\nVersion: {package.version}\n"
        archive.writestr(f"{stem}.dist-info/METADATA", meta)
        archive.writestr(f"{stem}.dist-info/WHEEL", "Wheel-Version: 1.0\nRoot-Is-Purelib: true\nTag: py3-none-any\n")
        archive.writestr(f"{stem}.dist-info/RECORD", "")
    return wheel


def members(package: Package) -> dict[str, bytes]:
    """What the wheel of `package` holds: its piece. Without leading zeros, as text part10 would sort before part9."""
    number = int(package.name.removeprefix("fake-part"))
    return {
        f"fake_part{number}/data/part{number}.bin": PIECES[number - 1],
        f"fake_part{number}/__init__.py": b"raise 1",
    }


class FakeDownloader:
    """Writes the wheel instead of downloading it, and logs each call as one line of a file, across processes too."""

    def __init__(self, log: Path, pause_seconds: float = 0.0) -> None:
        self.log, self.pause_seconds = log, pause_seconds

    def __call__(self, package: Package, folder: Path) -> Path:
        with self.log.open("a") as log:
            log.write(f"{package}\n")
        time.sleep(self.pause_seconds)
        return write_wheel(package, folder, members(package))

    @property
    def calls(self) -> list[str]:
        return self.log.read_text().splitlines() if self.log.exists() else []


def copy_converter(gguf: Path, folder: Path) -> None:
    """A conversion that only copies, so that a test can see the assembled bytes."""
    (folder / "model.safetensors").write_bytes(gguf.read_bytes())
    (folder / "config.json").write_text("{}")


def fetch_in_process(home: str, log: str) -> None:
    os.environ["KVARTO_HOME"] = home
    fetch.ensure(entry(), downloader=FakeDownloader(Path(log), 0.02), converter=copy_converter)


def die_in_process(home: str, log: str) -> None:
    """Fetch, and be killed in the middle of the conversion."""

    def converter(gguf: Path, folder: Path) -> None:
        copy_converter(gguf, folder)
        os.kill(os.getpid(), signal.SIGKILL)

    os.environ["KVARTO_HOME"] = home
    fetch.ensure(entry(), downloader=FakeDownloader(Path(log)), converter=converter)
