"""What kernels really took: kvarto's own benchmark of attention on a GPU (benchmarks/attention_gpu.py --json), read for `--measured`. No torch.

A format's decode points become a curve of seconds against the bytes that one layer reads. Between points it is straight in logarithms; below the
smallest one a launch takes what it took there, beyond the largest one the rate stays.
"""

from __future__ import annotations

import bisect
import math
from collections.abc import Mapping
from dataclasses import dataclass
from pathlib import Path
from typing import Any

from kvarto.errors import UsageError
from kvarto.plan.config import read_json
from kvarto.plan.written import KvFormat

BASELINE = "bf16"


@dataclass(frozen=True)
class Times:
    """Points (bytes of one layer, seconds), by bytes."""

    points: tuple[tuple[float, float], ...]

    @property
    def least_nbytes(self) -> float:
        """Of the smallest point."""
        return self.points[0][0]

    def seconds(self, nbytes: float) -> float:
        """What reading so many bytes takes."""
        sizes = [size for size, _ in self.points]
        at = bisect.bisect_left(sizes, nbytes)
        if at == 0:
            return self.points[0][1]
        if at == len(sizes):
            size, seconds = self.points[-1]
            return seconds * nbytes / size
        (low, fast), (high, slow) = self.points[at - 1 : at + 1]
        share = math.log(nbytes / low) / math.log(high / low)
        return float(fast * (slow / fast) ** share)


@dataclass(frozen=True)
class Measured:
    """`gpu`: as its driver calls it. `bandwidth`: bytes a second that were read at most. `times`: by the benchmark's names, and "bf16": the best."""

    path: str
    gpu: str
    bandwidth: float
    commit: str
    times: Mapping[str, Times]

    def series(self, kv: KvFormat) -> Times | None:
        """The curve of a format; kernels of another engine stand for its formats by name."""
        names = (BASELINE,) if kv.name == BASELINE else kv.measured
        return next((self.times[name] for name in names if name in self.times), None)


def read_measured(path: Path) -> Measured:
    """Read a benchmark. Raises UsageError if it is none."""
    name = f"--measured {path}"
    data = read_json(path, name)
    try:
        times = _curves(data["decode"])
        made = Measured(
            str(path), str(data["machine"]["gpu"]), float(data["bandwidth"]["read_gb_per_s"]) * 1e9,
            str(data["machine"].get("commit", "")), times,
        )  # fmt: skip
    except (KeyError, TypeError, ValueError, AttributeError) as error:
        got = f"{type(error).__name__} {error}"
        raise UsageError(
            name, "what benchmarks/attention_gpu.py wrote (machine, bandwidth, decode)", got[:80]
        ) from None
    if BASELINE not in times or not made.bandwidth > 0:
        raise UsageError(name, "decode times of a bf16 kernel, and a bandwidth", "none")
    return made


def _curves(decode: list[Mapping[str, Any]]) -> dict[str, Times]:
    points: dict[str, dict[float, list[float]]] = {}
    for point in decode:
        read = point["bytes_read"]
        found = {name: time for name, time in point["times"].items() if name in read}
        best = point.get("best_bf16")
        if best in found:
            found[BASELINE], read = found[best], {**read, BASELINE: read[best]}
        for name, time in found.items():
            nbytes, seconds = float(read[name]), float(time["median_ms"]) / 1e3
            if not (nbytes > 0 and 0 < seconds < math.inf):
                raise ValueError(f"{name}: {nbytes} bytes in {seconds} s")
            points.setdefault(name, {}).setdefault(nbytes, []).append(seconds)
    return {
        name: Times(tuple(sorted((nbytes, sum(taken) / len(taken)) for nbytes, taken in found.items())))
        for name, found in points.items()
    }
