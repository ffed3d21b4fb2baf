"""How the packed launch of the GPU kernel is compiled: for each GPU, geometry and pair of codecs. No torch, no triton.

A tuning is looked up in `tuned-gpu.json` of the cache folder (what `tune` measured on this machine), then in the table that we ship
(triton_table.json, what we measured), else it is the table's default. Nothing is tuned by itself: a serving process never measures.
benchmarks/tune_gpu.py does:

    def measure(tuning: Tuning) -> float:
        with trial(tuning):
            return milliseconds_of(lambda: kernel.attend(...))

    tune(torch.cuda.get_device_name(), layout, k.name, v.name, measure)
"""

from __future__ import annotations

import json
import math
import tempfile
import warnings
from collections.abc import Callable, Iterator, Sequence
from contextlib import contextmanager
from dataclasses import asdict, dataclass
from functools import cache
from pathlib import Path
from typing import Any

from kvarto.errors import UsageError
from kvarto.home import home
from kvarto.layout import PageLayout

_FORMAT = "kvarto GPU tunings 2"
_DEFAULT = "*"
# A quarter of a multiprocessor has so many registers, and 32 threads a warp, which is a program.
_QUARTER_REGISTERS = 16384
_WARP_THREADS = 32
# What is less than this share faster is noise.
_NOISE = 0.01


@dataclass(frozen=True)
class Tuning:
    """Registers of a thread at most, and whether slabs that allow it are copied to shared memory ahead of their use (triton_shared.py)."""

    registers: int
    ahead: bool

    @property
    def programs(self) -> int:
        """Programs of one warp that run at once on a multiprocessor, as far as registers bound them."""
        return 4 * (_QUARTER_REGISTERS // (self.registers * _WARP_THREADS))


CANDIDATES = (Tuning(168, True), Tuning(168, False), Tuning(128, True), Tuning(255, False))
"""What `tune` tries."""


def tuning_for(gpu: str, layout: PageLayout, k_name: str, v_name: str) -> Tuning:
    """How to compile the packed launch on the GPU of this name, for pages whose K and V codecs have these names. Cheap: read once in a process."""
    if _on_trial:
        return _on_trial[-1]
    key = key_of(gpu, layout, k_name, v_name)
    return _kept().get(key) or _shipped().get(key) or _shipped()[_DEFAULT]


def tune(
    gpu: str,
    layout: PageLayout,
    k_name: str,
    v_name: str,
    measure: Callable[[Tuning], float],
    candidates: Sequence[Tuning] = CANDIDATES,
) -> Tuning:
    """Measure the candidates, keep the fastest in the cache folder, and return it; the first one unless another is clearly faster.

    measure  runs the kernel and returns milliseconds, infinity if it cannot run so

    Raises UsageError if no candidate could be measured.
    """
    times = {candidate: measure(candidate) for candidate in candidates}
    best = min(times, key=times.__getitem__)
    if not math.isfinite(times[best]):
        raise UsageError("measure", "milliseconds of at least one candidate", sorted(times.values()))
    if times[candidates[0]] <= times[best] * (1 + _NOISE):
        best = candidates[0]
    _keep(key_of(gpu, layout, k_name, v_name), best)
    return best


def key_of(gpu: str, layout: PageLayout, k_name: str, v_name: str) -> str:
    """What a tuning is of, as the tables write it."""
    geometry = layout.geometry
    return f"{gpu}, D {geometry.k_dim}/{geometry.v_dim}, S {geometry.page_tokens}, {k_name}/{v_name}"


_on_trial: list[Tuning] = []


@contextmanager
def trial(tuning: Tuning) -> Iterator[None]:
    """Within it `tuning_for` gives this tuning, whatever is asked for. For benchmarks: in all threads, and not within a captured graph's replay."""
    _on_trial.append(tuning)
    try:
        yield
    finally:
        _on_trial.pop()


# ---- files -----------------------------------------------------------------------------------------------------------


@cache
def _shipped() -> dict[str, Tuning]:
    return _parse(Path(__file__).with_name("triton_table.json").read_text())


@cache
def _kept() -> dict[str, Tuning]:
    """What is in the cache folder; nothing, with a warning, if the file is none of ours."""
    return _read(_path())


def _path() -> Path:
    return home() / "tuned-gpu.json"


def _read(path: Path) -> dict[str, Tuning]:
    try:
        return _parse(path.read_text())
    except FileNotFoundError:
        return {}
    except (OSError, ValueError) as error:
        warnings.warn(f"GPU tunings are not used: {path}: {error}; delete it", RuntimeWarning, stacklevel=3)
        return {}


def _parse(text: str) -> dict[str, Tuning]:
    """The tunings of a file. Raises ValueError if it is none of ours."""
    table = json.loads(text)
    if not isinstance(table, dict) or table.get("format") != _FORMAT or not isinstance(table.get("tunings"), dict):
        raise ValueError(f"not a file of the format {_FORMAT!r}")
    return {key: _tuning(key, entry) for key, entry in table["tunings"].items()}


def _tuning(key: str, entry: Any) -> Tuning:
    if not isinstance(entry, dict) or entry.keys() != {"registers", "ahead"}:
        raise ValueError(f"{key!r}: expected registers and ahead, got {entry!r}")
    registers, ahead = entry["registers"], entry["ahead"]
    # What the compiler takes; `type`, because True is an int.
    if type(registers) is not int or type(ahead) is not bool or not 24 <= registers <= 255:
        raise ValueError(f"{key!r}: expected 24 to 255 registers and ahead true or false, got {entry!r}")
    return Tuning(registers, ahead)


def _keep(key: str, tuning: Tuning) -> None:
    """Add one to the file, which is replaced as a whole: a reader sees the old one or the new one. Of two writers at once the last one stays."""
    path = _path()
    tunings = _read(path) | {key: tuning}
    text = json.dumps(
        {"format": _FORMAT, "tunings": {name: asdict(tunings[name]) for name in sorted(tunings)}}, indent=2
    )
    try:
        path.parent.mkdir(parents=True, exist_ok=True)
        with tempfile.NamedTemporaryFile("w", dir=path.parent, prefix=path.name, delete=False) as file:
            file.write(text + "\n")
        Path(file.name).replace(path)
    except OSError as error:
        warnings.warn(
            f"the GPU tuning is not kept: {path}: {error.strerror}; set KVARTO_HOME", RuntimeWarning, stacklevel=3
        )
    _kept.cache_clear()
