"""How benchmarks measure: contenders in turn within every repeat, what neighbours took of the cores, and facts about the machine."""

from __future__ import annotations

import os
import platform
import statistics
import subprocess
import time
from collections.abc import Callable, Sequence
from dataclasses import dataclass
from pathlib import Path
from typing import Any

import psutil
import torch

from kvarto import __version__


@dataclass(frozen=True)
class Samples:
    """Milliseconds of one layer's step, one for each repeat."""

    milliseconds: list[float]
    others_share: float = 0.0  # What other processes took of the cores, at most.

    @property
    def median(self) -> float:
        return statistics.median(self.milliseconds)

    @property
    def quartiles(self) -> tuple[float, float, float]:
        low, median, high = statistics.quantiles(self.milliseconds, n=4)
        return low, median, high

    def as_json(self) -> dict[str, float]:
        low, median, high = self.quartiles
        return {"median_ms": median, "quartile_low_ms": low, "quartile_high_ms": high, "min_ms": min(self.milliseconds)}


def ratios(slow: Samples, fast: Samples) -> tuple[float, float, float]:
    """(lower quartile, median, upper quartile) of slow / fast within a repeat."""
    each = [a / b for a, b in zip(slow.milliseconds, fast.milliseconds, strict=True)]
    low, median, high = statistics.quantiles(each, n=4)
    return low, median, high


class Neighbours:
    """What other processes take of this machine's cores: a repeat that they disturb says little."""

    QUIET = 0.03

    def __init__(self, patience_seconds: float, ours: Sequence[psutil.Process] = ()) -> None:
        """`ours`: processes besides this one that belong to what is measured."""
        self._patience_seconds, self._processes = patience_seconds, (psutil.Process(), *ours)
        self._mark()

    def _mark(self) -> None:
        times, own = psutil.cpu_times(), [process.cpu_times() for process in self._processes]
        idle = times.idle + getattr(times, "iowait", 0.0)
        self._at, self._others = time.monotonic(), sum(times) - idle - sum(each.user + each.system for each in own)

    def share(self) -> float:
        """Of all cores, since the last call."""
        at, others = self._at, self._others
        self._mark()
        return max(0.0, self._others - others) / (self._at - at) / (os.cpu_count() or 1)

    def wait(self) -> None:
        """Until they are quiet, or patience (of all waits together) is over."""
        while self._patience_seconds > 0:
            self.share()
            time.sleep(0.5)
            self._patience_seconds -= 0.5
            if self.share() < self.QUIET:
                return
        self.share()


def interleave(
    contenders: dict[str, list[Callable[[], Any]]], repeats: int, neighbours: Neighbours | None = None
) -> dict[str, Samples]:
    """Mean time of the calls (one for each layer) of every contender, all in turn in every repeat, after one round that is not counted.

    Of up to three times as many repeats those are kept that other processes disturbed least.
    """
    rounds: list[tuple[float, dict[str, float]]] = []
    for repeat in range(3 * repeats + 1):
        if neighbours:
            neighbours.wait()
        times = {}
        turn = repeat % len(contenders)  # Nobody is always the first, or always behind the same one.
        for name, layers in [*contenders.items()][turn:] + [*contenders.items()][:turn]:
            begin = time.perf_counter()
            for step in layers:
                step()
            times[name] = (time.perf_counter() - begin) * 1e3 / len(layers)
        if repeat:
            rounds.append((neighbours.share() if neighbours else 0.0, times))
        if sum(share < Neighbours.QUIET for share, _ in rounds) == repeats:
            break
    rounds.sort(key=lambda item: item[0])
    share = rounds[min(repeats, len(rounds)) - 1][0]
    return {name: Samples([times[name] for _, times in rounds[:repeats]], share) for name in contenders}


def bandwidth() -> dict[str, float]:
    """GB/s: bytes read by a sum, and bytes read and written by a copy, over 256 MiB."""
    source = torch.ones(2**26)
    target = torch.empty_like(source)
    nbytes = source.numel() * source.element_size()
    times = interleave({"sum": [lambda: source.sum()], "copy": [lambda: target.copy_(source)]}, 9)
    return {
        "read_gb_per_s": nbytes / min(times["sum"].milliseconds) / 1e6,
        "copy_gb_per_s": 2 * nbytes / min(times["copy"].milliseconds) / 1e6,
    }


def last_level_cache_bytes() -> int:
    """Of the CPU, as Linux tells it; else 32 MiB."""
    sizes = [path.read_text().strip() for path in Path("/sys/devices/system/cpu/cpu0/cache").glob("index*/size")]
    return max((int(size.removesuffix("K")) * 1024 for size in sizes if size.endswith("K")), default=2**25)


def commit() -> str:
    """The revision that is measured, with a mark if files differ from it."""
    root = Path(__file__).parent
    try:
        done = subprocess.run(
            ["git", "describe", "--always", "--dirty", "--abbrev=12"],
            cwd=root,
            check=True,
            capture_output=True,
            text=True,
        )
    except (OSError, subprocess.CalledProcessError):
        return "unknown"
    return done.stdout.strip()


def cpu_name() -> str:
    """As Linux tells it, else what Python knows."""
    try:
        lines = Path("/proc/cpuinfo").read_text().splitlines()
    except OSError:
        return platform.processor()
    return next(
        (line.split(":", 1)[1].strip() for line in lines if line.startswith("model name")), platform.processor()
    )


def machine() -> dict[str, Any]:
    import numba

    from kvarto.simd import LANES

    return {
        "cpu": cpu_name(), "cores": os.cpu_count(), "vector_lanes": LANES, "last_level_cache_bytes": last_level_cache_bytes(),
        "load_before": os.getloadavg()[0], "threads": torch.get_num_threads(), "python": platform.python_version(), "torch": torch.__version__,
        "numba": numba.__version__, "kvarto": __version__, "commit": commit(),
    }  # fmt: skip
