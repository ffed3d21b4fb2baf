"""How many CPU threads to use: as many as torch takes, unless one is faster.

Where other processes keep the cores busy, threads that wait for each other lose all they gain: two can be ten times slower than one.
"""

from __future__ import annotations

import time

import torch

from kvarto.study.arms import Arm, feed

_TOKENS = 96
_RUNS = 3


def choose_threads(arm: Arm) -> int:
    """The faster of torch's number and one, tried on a short prefill."""
    most = torch.get_num_threads()
    return min({most, 1}, key=lambda threads: _seconds(arm, threads)) if most > 1 else 1


def _seconds(arm: Arm, threads: int) -> float:
    """The median of a few runs after a warm one."""
    torch.set_num_threads(threads)
    taken = []
    for _ in range(_RUNS + 1):
        begun = time.perf_counter()
        feed(arm, arm.new_cache(), range(1, 1 + _TOKENS))
        taken.append(time.perf_counter() - begun)
    return sorted(taken[1:])[_RUNS // 2]
