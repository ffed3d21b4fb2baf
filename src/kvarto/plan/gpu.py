"""GPUs by name (gpus.toml) or as the user describes them, and sizes as people write them. No torch."""

from __future__ import annotations

import math
import re
import tomllib
from collections.abc import Mapping
from dataclasses import dataclass, replace
from functools import cache
from importlib.resources import files

from kvarto.errors import UnknownName, UsageError

_SIZE = re.compile(r"([0-9]+(?:\.[0-9]+)?)\s*([a-zA-Z]*)")
_FACTORS = {
    "": 1, "b": 1, "kb": 10**3, "mb": 10**6, "gb": 10**9, "tb": 10**12,
    "k": 1 << 10, "m": 1 << 20, "g": 1 << 30, "t": 1 << 40, "kib": 1 << 10, "mib": 1 << 20, "gib": 1 << 30, "tib": 1 << 40,
}  # fmt: skip


@dataclass(frozen=True)
class Gpu:
    """Memory in bytes, bandwidth in bytes a second, dense compute in operations a second (0: unknown). `sm`: compute capability times ten, or 0."""

    name: str
    title: str
    memory_bytes: int
    bandwidth: float
    bf16_flops: float
    fp8_flops: float = 0.0
    fp4_flops: float = 0.0
    sm: int = 0
    reported: tuple[str, ...] = ()
    source: str = "said by the user"

    def flops(self, weights_dtype: str) -> float:
        """The fastest that it could multiply weights of this dtype."""
        if weights_dtype in ("nvfp4", "mxfp4") and self.fp4_flops:
            return self.fp4_flops
        if weights_dtype in ("fp8", "int8", "nvfp4", "mxfp4") and self.fp8_flops:
            return self.fp8_flops
        return self.bf16_flops


@cache
def gpus() -> Mapping[str, Gpu]:
    """All that are known, by name."""
    data = tomllib.loads(files("kvarto.plan").joinpath("gpus.toml").read_text())
    return {
        name: Gpu(
            name, entry["title"], entry["memory_mib"] << 20, entry["bandwidth_gb_per_s"] * 1e9, entry["bf16_tflops"] * 1e12,
            entry.get("fp8_tflops", 0) * 1e12, entry.get("fp4_tflops", 0) * 1e12, entry["sm"], tuple(entry.get("reported", ())), entry["source"],
        )
        for name, entry in data.items()
    }  # fmt: skip


def find_gpu(name: str) -> Gpu:
    """By name, whatever its case. Raises UnknownName."""
    found = gpus().get(name.lower().replace("_", "-"))
    if found is None:
        raise UnknownName("--gpu", name, gpus())
    return found


def choose_gpu(name: str | None, memory: str | None, bandwidth: str | None, tflops: float | None) -> Gpu | None:
    """One by name, with what the user says instead; or one that is said wholly; None if nothing is. Raises UnknownName or UsageError."""
    changes: dict[str, float] = {}
    if memory is not None:
        changes["memory_bytes"] = parse_size(memory, "--gpu-memory")
    if bandwidth is not None:
        changes["bandwidth"] = float(parse_size(bandwidth.removesuffix("/s"), "--gpu-bandwidth"))
    if tflops is not None:
        if not math.isfinite(tflops) or tflops <= 0:
            raise UsageError("--gpu-tflops", "a number above 0", tflops)
        changes["bf16_flops"] = tflops * 1e12
    if name is not None:
        known = find_gpu(name)
        return replace(known, title=f"{known.title}, changed", **changes) if changes else known  # type: ignore[arg-type]
    if not changes:
        return None
    if "memory_bytes" not in changes or "bandwidth" not in changes:
        missing = "--gpu-memory" if "memory_bytes" not in changes else "--gpu-bandwidth"
        raise UsageError(missing, "to be said too, where no --gpu is named", "none")
    return Gpu(
        "own", "GPU of your own", int(changes["memory_bytes"]), changes["bandwidth"], changes.get("bf16_flops", 0.0)
    )


def parse_size(text: str, name: str) -> int:
    """Bytes of "80GiB", "512M" (2^20 both, as M and MiB), "3.35TB" (10^12) or a number. Raises UsageError."""
    match = _SIZE.fullmatch(text.strip())
    factor = _FACTORS.get(match[2].lower()) if match else None
    size = int(float(match[1]) * factor) if match and factor else 0
    if not 0 < size < 1 << 60:
        raise UsageError(name, "a size such as 80GiB, 512M or 3.35TB", repr(text))
    return size
