"""What a study ran on and with, for its provenance."""

from __future__ import annotations

import os
import platform
import subprocess
from importlib.metadata import PackageNotFoundError, version
from pathlib import Path

_PACKAGES = ("torch", "transformers", "numba", "numpy", "scipy", "tokenizers")


def cpu_name() -> str:
    """The processor as the system calls it."""
    try:
        lines = Path("/proc/cpuinfo").read_text().splitlines()
    except OSError:
        lines = []
    names = [line.partition(":")[2].strip() for line in lines if line.startswith("model name")]
    return names[0] if names else platform.processor() or platform.machine()


def cores() -> int:
    """Cores that this process may use."""
    return len(os.sched_getaffinity(0)) if hasattr(os, "sched_getaffinity") else os.cpu_count() or 1


def system_name() -> str:
    """Operating system and Python."""
    return f"{platform.system()} {platform.release()}, Python {platform.python_version()}"


def library_versions() -> dict[str, str]:
    """Versions of the libraries that decide the numbers."""
    found = {}
    for package in _PACKAGES:
        try:
            found[package] = version(package)
        except PackageNotFoundError:
            continue
    return found


def commit() -> str | None:
    """The commit of our own checkout, with "+" if it was changed since; None outside of one."""
    folder = Path(__file__).parent
    head = _git(folder, "rev-parse", "--short=12", "HEAD")
    # An installed package may lie inside someone else's repository: only a tracked file of ours makes it our checkout.
    if not head or not _git(folder, "ls-files", Path(__file__).name):
        return None
    return head + ("+" if _git(folder, "status", "--porcelain", "--untracked-files=no") else "")


def _git(folder: Path, *arguments: str) -> str:
    try:
        done = subprocess.run(["git", *arguments], cwd=folder, capture_output=True, text=True, check=False, timeout=10)
    except (OSError, subprocess.SubprocessError):
        return ""
    return done.stdout.strip() if done.returncode == 0 else ""
