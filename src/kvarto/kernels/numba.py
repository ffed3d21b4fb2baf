"""The CPU kernel: reads packed bytes, online softmax in float32, all cores, no dense copy of the history. Needs numba and a codec's tile reader.

It uses as many threads as torch does (`torch.set_num_threads`), and may be called from several Python threads at once.
"""

from __future__ import annotations

import numpy as np

from kvarto.jit import available, torch
from kvarto.kernels.base import PageSet, Partial, Queries, Rule, SlabReader, Support
from kvarto.kernels.team import run_team
from kvarto.layout import PageLayout


class NumbaKernel:
    """See the module docstring."""

    name = "numba"

    def supports(self, layout: PageLayout, k: SlabReader, v: SlabReader, device: str) -> Support:
        """Pages on the CPU whose codecs both have a tile reader."""
        if device != "cpu":
            return Support(f"it runs on the CPU, not on {device}")
        if not available("numba"):
            return Support("numba is not installed; run: pip install 'kvarto[engine]'")
        for side, reader in (("K", k), ("V", v)):
            if reader.numba is None:
                return Support(f"the {side} codec has no tile reader for numba")
        return Support()

    def attend(self, queries: Queries, pages: PageSet, rule: Rule, *, scale: float, softcap: float | None) -> Partial:
        """See `base.Kernel.attend`."""
        from kvarto.kernels.numba_kernel import SPLIT_FIELDS, TILE_FIELDS, compiled
        from kvarto.kernels.numba_pages import JOB

        geometry, (T, Hq, _) = pages.layout.geometry, queries.q.shape
        q = pages.k.rotate(queries.q).contiguous()
        table, start, position = (x.contiguous() for x in (pages.table, queries.start, queries.position))
        out, lse = q.new_zeros((T, Hq, geometry.v_dim)), q.new_full((T, Hq), -torch.inf)
        addresses = (x.data_ptr() for x in (q, out, lse, table, start, position, pages.pages))
        job = np.zeros(1, JOB)
        job[0] = (
            *addresses, pages.k.numba.address, pages.v.numba.address, pages.pages.stride(0), pages.layout.k.nbytes, pages.layout.v.nbytes,
            *table.shape, geometry.heads, Hq // geometry.heads, geometry.page_tokens, geometry.k_dim, geometry.v_dim,
            rule.sink_pages, rule.window_pages, -1 if rule.sliding_tokens is None else rule.sliding_tokens, pages.raw,
            *[0] * 8, scale, softcap or 0.0,
        )  # fmt: skip
        plan, work = compiled()
        pointer = job.ctypes.data
        run_team(plan.address, pointer, 1)
        tiles = np.empty((int(job["tile_count"][0]), TILE_FIELDS), np.int64)
        splits = np.empty((int(job["split_count"][0]), SPLIT_FIELDS), np.int64)
        partials = np.empty(int(job["partial_rows"][0]) * (geometry.v_dim + 2), np.float32)
        counters = np.zeros(1 + len(tiles) * geometry.heads, np.int64)
        for name, array in (("tiles", tiles), ("splits", splits), ("partials", partials), ("counters", counters)):
            job[name] = array.ctypes.data
        run_team(plan.address, pointer, 1)
        run_team(work.address, pointer, min(torch.get_num_threads(), len(splits) * geometry.heads))
        return Partial(pages.v.unrotate(out), lse)
