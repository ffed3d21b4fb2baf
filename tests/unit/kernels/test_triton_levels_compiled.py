"""What the compiler makes of the packed kernel for slabs with tables (triton_levels.py) for a Hopper GPU, without one.

Its loop looks up every code: that many loads there are, and the bytes of the codes themselves are to come many at a time. Registers do not hold all
constants of a page; how many go to memory is bounded here. The numbers are of Triton 3.7, some tenths more than there are.

`python tests/unit/kernels/test_triton_levels_compiled.py FORMAT...` prints them as JSON.
"""

from __future__ import annotations

import json
import sys
from collections import Counter
from pathlib import Path
from typing import Any

import pytest
from hopper import aligned, examine, hopper, run_in_another_process
from test_triton_compiled import _main_loop

D, S, WARPS, REGISTERS = 128, 64, 8, 128
STACK_BYTES = 600
INSTRUCTIONS = {"kvquant4": 1800, "kvquant3": 2400}
# Of a thread: a look-up for each of its codes of both sides; beside them all that a page has to be read of.
LOOK_UPS = 2 * S * D // (32 * WARPS)
OTHER_LOADS = 40
_OLDER = tuple(map(int, pytest.importorskip("triton").__version__.split(".")[:2])) < (3, 7)


@pytest.mark.skipif(_OLDER, reason="the numbers are of Triton 3.7")
def test_what_the_compiler_makes_of_look_ups(tmp_path: Path) -> None:
    printed = run_in_another_process(__file__, *INSTRUCTIONS, cache=tmp_path)
    for name, limit in INSTRUCTIONS.items():
        got = printed[name]
        assert got["registers"] <= REGISTERS
        assert got["stack_bytes"] <= STACK_BYTES, f"{name}: {got['stack_bytes']} bytes of registers in memory"
        assert LOOK_UPS <= got["loads"] <= LOOK_UPS + OTHER_LOADS, f"{name}: {got['loads']} loads"
        assert got["tensor_core"] >= 1, f"{name}: products without tensor cores"
        assert got["instructions"] <= limit, f"{name}: {got['instructions']} instructions"


# ---- in the other process --------------------------------------------------------------------------------------------


def _compile(name: str) -> Any:
    """As a decode step of 4 query heads for each of 8 KV heads launches it on an H200."""
    import triton
    from triton.compiler import ASTSource

    from kvarto.codecs import registry
    from kvarto.kernels.triton_decode import attend_packed
    from kvarto.layout import Geometry, PageLayout, Side
    from kvarto.testing import specimen

    k, v = (specimen(registry[name], side, D) for side in Side)
    layout = PageLayout(Geometry(8, D, D), k.layout(Side.K, S, D), v.layout(Side.V, S, D))
    constants = {
        "K": k.tile(layout.k), "V": v.tile(layout.v), "PAGE_NBYTES": layout.nbytes,
        "K_NBYTES": layout.k.nbytes, "PAIR_NBYTES": layout.pair_nbytes, "BFLOAT16": True, "HEADS": 8, "R": 4, "S": S,
        "DK": D, "DV": D, "N": 8, "SINK": 1, "WINDOW": 0, "SLIDING": 0, "SOFTCAP": False, "ENTRIES": 64, "TURNS": 1,
        "AHEAD": False,
    }  # fmt: skip
    types = dict.fromkeys(("start", "position", "table", "plan"), "*i32")
    types |= dict.fromkeys(("out", "lse", "k_told", "v_told", "phases"), "*fp32")
    types |= {"q": "*bf16", "pages": "*u8", "turns": "*i64", "scale": "fp32", "softcap": "fp32"}
    signature = {
        argument: "constexpr" if argument in constants else types.get(argument, "i32")
        for argument in attend_packed.arg_names
    }
    source = ASTSource(attend_packed, signature, constants, aligned(signature, "q_", "k_told_", "v_told_"))
    options = {"num_warps": WARPS, "num_stages": 1, "maxnreg": REGISTERS}
    return triton.compile(source, target=hopper(), options=options)


def _numbers(cubin: bytes) -> dict[str, int]:
    numbers, instructions = examine(cubin)
    counts = Counter(_main_loop(instructions))
    return {
        "registers": numbers["REG"], "stack_bytes": numbers["STACK"], "tensor_core": counts["HMMA"] + counts["HGMMA"],
        "loads": counts["LDG"], "instructions": counts.total(),
    }  # fmt: skip


if __name__ == "__main__":
    print(json.dumps({name: _numbers(_compile(name).asm["cubin"]) for name in sys.argv[1:]}))
