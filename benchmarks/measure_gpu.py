"""How GPU benchmarks measure: CUDA graphs, a cold L2, contenders in turn within every repeat; and facts about the machine.

A graph holds a few calls of a contender, with a read of a large buffer before each, as a model reads its weights between two layers: it leaves
L2 full of other, clean data. (`triton.testing.do_bench_cudagraph` leaves the last call's data there.) The reads' own time, taken from a graph
that holds nothing else, in the same repeat, is subtracted.
"""

from __future__ import annotations

import json
import platform
import subprocess
import sys
import time
from collections.abc import Callable, Collection, Iterable
from contextlib import nullcontext, suppress
from importlib.metadata import PackageNotFoundError, version
from pathlib import Path
from typing import Any, TypeVar

import torch
import triton
import triton.language as tl
from torch import Tensor

from kvarto import __version__
from measure import Samples, commit, cpu_name

T = TypeVar("T")
HAS_GPU = torch.cuda.is_available()
DEVICE = "cuda" if HAS_GPU else "cpu"
_COLD_BYTES = 1 << 28 if HAS_GPU else 1 << 10  # several times any L2
_READS = 20
_TARGET_MS = 4.0
_MOST_CALLS = 20


@triton.jit  # type: ignore[untyped-decorator]
def _sum_block(numbers, out, COUNT: tl.constexpr):  # type: ignore[no-untyped-def]
    """out[i] = the sum of the i-th COUNT numbers, int32."""
    block = tl.program_id(0).to(tl.int64)
    tl.store(out + block, tl.sum(tl.load(numbers + block * COUNT + tl.arange(0, COUNT)), axis=0))


class Reader:
    """Reads a buffer of its own from memory, as fast as the GPU can."""

    def __init__(self, nbytes: int) -> None:
        self._count = min(16384, nbytes // 4)
        self._numbers = torch.zeros(nbytes // 4, dtype=torch.int32, device=DEVICE)
        self._sums = torch.zeros(nbytes // 4 // self._count, dtype=torch.int32, device=DEVICE)

    def __call__(self) -> None:
        _sum_block[(len(self._sums),)](self._numbers, self._sums, COUNT=self._count, num_warps=8)


class Replay:
    """Some calls of `call`, each after `before`, as one CUDA graph; or one after another, if a graph cannot hold them (`graphed` False)."""

    def __init__(self, call: Callable[[], Any], before: Callable[[], Any] | None, calls: int) -> None:
        self.calls, self.graphed = calls, HAS_GPU
        self._call, self._before = call, before
        self._run = self._all
        if HAS_GPU:
            self._capture()

    def milliseconds(self) -> float:
        """Of one call, `before` included."""
        if not HAS_GPU:
            before = time.perf_counter()
            self._run()
            return (time.perf_counter() - before) * 1e3 / self.calls
        begin, end = (torch.cuda.Event(enable_timing=True) for _ in range(2))
        begin.record()
        self._run()
        end.record()
        end.synchronize()
        return float(begin.elapsed_time(end)) / self.calls

    def _all(self) -> None:
        for _ in range(self.calls):
            if self._before is not None:
                self._before()
            self._call()

    def _capture(self) -> None:
        graph = torch.cuda.CUDAGraph()
        try:
            with torch.cuda.graph(graph):
                self._all()
        except RuntimeError:  # something in it asks the host; its time then includes that
            torch.cuda.synchronize()
            self.graphed = False
            self._all()
            torch.cuda.synchronize()
            return
        self._graph, self._run = graph, graph.replay


def measure(
    contenders: dict[str, Callable[[], Any]], repeats: int, fragile: Collection[str] = ()
) -> tuple[dict[str, Samples], set[str]]:
    """(Milliseconds of a call of each, in turn within every repeat; the names that no graph could hold). Of `fragile` contenders those that fail
    are left out.
    """
    read = Reader(_COLD_BYTES)
    read()
    reads = Replay(read, None, _READS)
    replays: dict[str, Replay] = {}
    for name, call in contenders.items():
        with suppress(RuntimeError) if name in fragile else nullcontext():
            replays[name] = Replay(call, read, _calls(call))
    times: dict[str, list[float]] = {name: [] for name in replays}
    for repeat in range(repeats + 1):
        cold = reads.milliseconds()
        turn = repeat % max(1, len(replays))  # Nobody is always the first, or always behind the same one.
        for name, replay in [*replays.items()][turn:] + [*replays.items()][:turn]:
            spent = replay.milliseconds() - cold
            if repeat:  # the first round warms up
                times[name].append(max(spent, 1e-6))
    loose = {name for name, replay in replays.items() if not replay.graphed}
    return {name: Samples(each) for name, each in times.items()}, loose


def _calls(call: Callable[[], Any]) -> int:
    """How many calls take about `_TARGET_MS`, after one that compiles; where the host is slower than the device, fewer."""
    if not HAS_GPU:
        return 1
    call()
    begin, end = (torch.cuda.Event(enable_timing=True) for _ in range(2))
    begin.record()
    for _ in range(3):
        call()
    end.record()
    end.synchronize()
    return min(_MOST_CALLS, max(2, round(3 * _TARGET_MS / max(float(begin.elapsed_time(end)), 1e-3))))


def bandwidth() -> dict[str, float]:
    """GB/s: bytes read by the faster of two sums, and bytes read and written by a copy, over buffers of 4 GiB."""
    nbytes = 1 << 32 if HAS_GPU else 1 << 16
    source = torch.zeros(nbytes // 4, device=DEVICE)
    target = torch.empty_like(source)
    calls: dict[str, Callable[[], Any]] = {
        "sum": lambda: source.sum(),
        "read": Reader(nbytes),
        "copy": lambda: target.copy_(source),
    }
    times, _ = measure(calls, 9)
    return {
        "read_gb_per_s": nbytes / min(times["sum"].median, times["read"].median) / 1e6,
        "copy_gb_per_s": 2 * nbytes / times["copy"].median / 1e6,
    }


# ---- compiling beforehand --------------------------------------------------------------------------------------------


def warm_each(tasks: Iterable[T], options: Callable[[T], list[str]], seconds: float) -> dict[T, str]:
    """Run this program once more for each task, with its own arguments and those of `options`, all at once, so that caches on disk are filled.

    Returns the tasks that failed or took longer than `seconds`, and why.
    """
    command, begin = [sys.executable, *sys.argv], time.monotonic()
    running = {
        task: subprocess.Popen([*command, *options(task)], stdout=subprocess.DEVNULL, stderr=subprocess.PIPE, text=True)
        for task in tasks
    }
    failed: dict[T, str] = {}
    for task, process in running.items():
        try:
            _, errors = process.communicate(timeout=max(0.1, begin + seconds - time.monotonic()))
        except subprocess.TimeoutExpired:
            process.kill()
            process.communicate()
            failed[task] = f"not ready in {seconds:.0f} s"
            continue
        if process.returncode:
            failed[task] = (errors.strip() or f"exit code {process.returncode}").splitlines()[-1][:200]
    return failed


# ---- the machine -----------------------------------------------------------------------------------------------------


def machine(revision: str | None) -> dict[str, Any]:
    """Hardware, driver and versions; `revision`: the commit, where the tree that is measured does not know its own."""
    packages = ("torch", "triton", "transformers", "flashinfer-python", "vllm", "flash-attn-3")
    return {
        "gpu": torch.cuda.get_device_name() if HAS_GPU else "none", "driver": _smi("driver_version"), "sm_clock_max": _smi("clocks.max.sm"),
        "power_limit": _smi("power.limit"), "cuda": torch.version.cuda, "cpu": cpu_name(), "python": platform.python_version(),
        **{name: found for name in packages if (found := _version(name))}, "kvarto": __version__, "commit": revision or commit(),
    }  # fmt: skip


def _version(package: str) -> str | None:
    with suppress(PackageNotFoundError):
        return version(package)
    return None


def _smi(field: str) -> str:
    """What nvidia-smi says of the first GPU."""
    command = ["nvidia-smi", f"--query-gpu={field}", "--format=csv,noheader", "--id=0"]
    try:
        return subprocess.run(command, check=True, capture_output=True, text=True, timeout=30).stdout.strip()
    except (OSError, subprocess.SubprocessError):
        return "unknown"


def randperm(count: int) -> Tensor:
    """int32 [count] on the device: page ids in random order."""
    return torch.randperm(count, device=DEVICE).int()


def write(report: dict[str, Any], path: Path) -> None:
    """All at once: who reads the file never sees half of it."""
    path.parent.mkdir(parents=True, exist_ok=True)
    part = path.with_name(path.name + ".part")
    part.write_text(json.dumps(report, indent=1) + "\n")
    part.replace(path)
