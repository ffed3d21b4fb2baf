"""Decode steps on a GPU without the host's part: all launches of a step, recorded once as a CUDA graph and replayed.

A graph is of a `Shape`: rows rounded up to one of a few numbers, page tables to a power of two. It is recorded on a step of padding alone when such
a step comes for the first time; then a step sends its plan, in one piece, and replays. What cannot be recorded runs as
before: prefill, steps of several policies at once, pages that Triton does not read and seal, and shapes whose recording has failed, once.
"""

from __future__ import annotations

import logging
import time
from collections.abc import Sequence
from dataclasses import dataclass
from typing import TYPE_CHECKING, Any

from kvarto.engine.forward import Forward, Result
from kvarto.engine.memory import Memory
from kvarto.engine.plan import Shape, StepPlan
from kvarto.engine.scheduler import Work
from kvarto.engine.step import Step
from kvarto.jit import torch

if TYPE_CHECKING:
    from torch.cuda import CUDAGraph, Stream

_log = logging.getLogger(__name__)
_ROWS = (1, 2, 4, 8, 12, 16, 24, 32, 48, 64)
_ROWS_STEP = 32  # above them
_LEAST_COLUMNS = 64
# Each has logits of its own, beside the memory for keys and values.
_MOST_RECORDINGS = 64


@dataclass(frozen=True)
class _Recording:
    """A graph, the step that it replays and where its results are."""

    graph: CUDAGraph
    step: Step
    result: Result


class Graphs:
    """For one engine. `why_not` says why nothing is recorded, or None; `failed` are shapes whose recording failed, and is not tried again."""

    def __init__(self, forward: Forward, memory: Memory, device: torch.device, aside: Stream | None) -> None:
        self._forward, self._memory, self._device, self._aside = forward, memory, device, aside
        self._recordings: dict[Shape, _Recording] = {}
        self._pool: Any = None  # of all graphs together: only one runs at a time
        self.replays, self.failed = 0, set[Shape]()
        self.why_not: str | None = None
        if device.type != "cuda":
            self.why_not = f"graphs are of a GPU, this is {device.type}"
        elif not any(self._is_replayable(policy) for policy in range(len(memory.offers))):
            self.why_not = "Triton does not both read and seal the pages of any format"

    def shape_of(self, works: Sequence[Work]) -> Shape | None:
        """The shape in which a step can be replayed, or None if it cannot."""
        if self.why_not is not None or not all(work.count == 1 and work.samples and not work.scored for work in works):
            return None
        policies = {work.request.policy for work in works}
        if len(policies) > 1 or not self._is_replayable(*policies):
            return None
        columns = max(work.request.holding.columns(1) for work in works)
        shape = Shape(policies.pop(), _rows(len(works)), _power_of_2(max(columns, _LEAST_COLUMNS)))
        return None if shape in self.failed else shape

    @property
    def recorded(self) -> dict[Shape, CUDAGraph]:
        """The graphs that there are, in the order in which they were recorded."""
        return {shape: recording.graph for shape, recording in self._recordings.items()}

    def _is_replayable(self, policy: int) -> bool:
        return all(layer.pages.replayable for layer in self._memory.offers[policy].layers)

    def run(self, plan: StepPlan) -> Result | None:
        """Replay a plan that was made for a shape. None if that could not be recorded: the plan can be run as any other."""
        assert plan.shape is not None, "a plan without a shape"
        if plan.shape not in self._recordings and not self._record(plan.shape):
            return None
        recording = self._recordings[plan.shape]
        recording.step.refill(plan)
        recording.graph.replay()
        self.replays += 1
        return recording.result

    def _record(self, shape: Shape) -> bool:
        """On padding alone, so that what is computed beforehand leaves nothing behind."""
        begin = time.monotonic()
        step = Step(self._memory, self._memory.plan([], shape=shape), self._device, self._aside)
        try:
            stream = torch.cuda.Stream(self._device)
            stream.wait_stream(torch.cuda.current_stream(self._device))
            with torch.cuda.stream(stream):
                self._forward.run(step)  # compiles
                self._forward.run(step)
            torch.cuda.current_stream(self._device).wait_stream(stream)
            graph = torch.cuda.CUDAGraph()
            self._pool = self._pool or torch.cuda.graph_pool_handle()
            # What other threads do with the device meanwhile must not end the recording.
            with torch.cuda.graph(graph, pool=self._pool, capture_error_mode="thread_local"):
                result = self._forward.run(step)
        except RuntimeError as error:
            torch.cuda.synchronize(self._device)  # a device that is lost fails again here
            self.failed.add(shape)
            _log.warning("decode steps of %s are not replayed as CUDA graphs, and take longer: %s", shape, error)
            return False
        if len(self._recordings) >= _MOST_RECORDINGS:
            del self._recordings[next(iter(self._recordings))]
        self._recordings[shape] = _Recording(graph, step, result)
        _log.info("recorded a decode step of %d rows in %.1f s", shape.rows, time.monotonic() - begin)
        return True


def _rows(count: int) -> int:
    return next((rows for rows in _ROWS if rows >= count), -(-count // _ROWS_STEP) * _ROWS_STEP)


def _power_of_2(least: int) -> int:
    return 1 << (least - 1).bit_length()
