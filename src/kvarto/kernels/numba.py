"""The CPU kernel: reads packed bytes, online softmax in float32, all cores, no dense copy of the history. Needs numba and a codec's tile reader.

It uses as many threads as torch does (`torch.set_num_threads`), and may be called from several Python threads at once.
"""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass
from functools import cache
from typing import TYPE_CHECKING, Any

import numpy as np

from kvarto.jit import compile_kernel, torch, why_unavailable
from kvarto.kernels.base import PageSet, Partial, Queries, SlabReader, Support, attend_each
from kvarto.kernels.team import run_team
from kvarto.layout import PageLayout
from kvarto.rule import Rule

if TYPE_CHECKING:
    from torch import Tensor


class NumbaKernel:
    """See the module docstring."""

    name = "numba"

    def supports(self, layout: PageLayout, k: SlabReader, v: SlabReader, device: str) -> Support:
        """Pages on the CPU whose codecs both have a tile reader."""
        if device != "cpu":
            return Support(f"it runs on the CPU, not on {device}")
        if reason := why_unavailable("numba"):
            return Support(f"numba: {reason}; run: pip install 'kvarto[engine]'")
        for side, reader in (("K", k), ("V", v)):
            if reader.numba is None:
                return Support(f"the {side} codec has no tile reader for numba")
        return Support()

    def attend(
        self,
        queries: Queries,
        sets: Sequence[PageSet],
        rule: Rule,
        *,
        scale: float,
        softcap: float | None,
        sinks: Tensor | None = None,
    ) -> Partial:
        """See `base.Kernel.attend`."""
        return attend_each(lambda pages: _attend_set(queries, pages, rule, scale, softcap), sets, sinks)


def _attend_set(queries: Queries, pages: PageSet, rule: Rule, scale: float, softcap: float | None) -> Partial:
    """One set."""
    compiled, geometry, (T, Hq, _) = _compiled(), pages.layout.geometry, queries.q.shape
    read_k, read_v = pages.k.numba, pages.v.numba
    assert read_k is not None and read_v is not None, "attend without supports"  # noqa: PT018
    q = pages.k.rotate(queries.q.float()).contiguous()
    table, start, position = (x.contiguous() for x in (pages.table, queries.start, queries.position))
    out, lse = q.new_zeros((T, Hq, geometry.v_dim)), q.new_full((T, Hq), -torch.inf)
    # From here on there are only addresses.
    assert q.dtype == torch.float32, q.dtype
    assert {x.dtype for x in (table, start, position)} == {torch.int32}
    assert pages.pages.stride(1) == 1
    assert Hq % geometry.heads == 0, (Hq, geometry)
    job = np.zeros(1, compiled.record)
    job[0] = (
        *(x.data_ptr() for x in (q, out, lse, table, start, position, pages.pages)), read_k.address, read_v.address,
        *_told(pages.k), *_told(pages.v),
        pages.pages.stride(0), pages.layout.k.nbytes, pages.layout.v.nbytes,
        *table.shape, geometry.heads, Hq // geometry.heads, geometry.page_tokens, geometry.k_dim, geometry.v_dim,
        rule.sink_pages, rule.window_pages, -1 if rule.sliding_tokens is None else rule.sliding_tokens, pages.raw,
        *[0] * 8, scale, softcap or 0.0,
    )  # fmt: skip
    pointer = job.ctypes.data
    run_team(compiled.plan, pointer, 1)
    tile_count, split_count, partial_rows = (
        int(job[name][0]) for name in ("tile_count", "split_count", "partial_rows")
    )
    if split_count:
        arrays: dict[str, Any] = {
            "tiles": np.empty((tile_count, compiled.tile_fields), np.int64),
            "splits": np.empty((split_count, compiled.split_fields), np.int64),
            "partials": np.empty(partial_rows * (geometry.v_dim + 2), np.float32),
            "counters": np.zeros(1 + tile_count * geometry.heads, np.int64),
        }
        for name, array in arrays.items():
            job[name] = array.ctypes.data
        run_team(compiled.plan, pointer, 1)
        run_team(compiled.work, pointer, min(torch.get_num_threads(), split_count * geometry.heads))
    return Partial(pages.v.unrotate(out), lse)


def _told(reader: SlabReader) -> tuple[int, int]:
    """Address of a reader's constants, which live as long as it does, and bytes from head to head; zeros if it has none."""
    told = reader.constants
    return (0, 0) if told is None else (told.ctypes.data, told.strides[0] if len(told) > 1 else 0)


@dataclass(frozen=True)
class _Compiled:
    """The kernel as C functions, by address, and what they take; `keep` is what must not be collected."""

    plan: int
    work: int
    record: Any
    tile_fields: int
    split_fields: int
    keep: Any


@cache
def _compiled() -> _Compiled:
    """Compiled once for all codecs and geometries; numba is imported only here."""
    from kvarto.kernels.numba_kernel import plan, work
    from kvarto.kernels.numba_pages import JOB, SPLIT_FIELDS, TILE_FIELDS

    functions = compile_kernel(plan, JOB), compile_kernel(work, JOB)
    return _Compiled(functions[0].address, functions[1].address, JOB, TILE_FIELDS, SPLIT_FIELDS, functions)
