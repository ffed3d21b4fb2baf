"""What the compiler makes of the Hopper part of a prefill (triton_prefill_hopper.py), without a GPU: what it is there for.

`python tests/unit/kernels/test_triton_prefill_compiled.py` prints it as JSON.
"""

from __future__ import annotations

import json
import sys
from itertools import groupby
from pathlib import Path
from typing import Any

from hopper import aligned, examine, hopper, run_in_another_process

# A softmax of 64 rows by 128 keys: as many exponentials for each of 128 threads, and two for what the sums shrink by.
EXPONENTIALS = 64 + 2


def test_the_softmax_runs_while_the_tensor_cores_work(tmp_path: Path) -> None:
    printed = run_in_another_process(__file__, cache=tmp_path)
    assert printed["stack_bytes"] == 0, "registers do not hold a block"
    # Scores of the next block and values of the last one are begun; scores are waited for, then values: the exponentials stand between.
    step = [["HGMMA", 8], ["HGMMA", 8], ["wait 1", 1], ["MUFU", EXPONENTIALS], ["wait 0", 1]]
    order = printed["order"]
    found = sum(order[i : i + len(step)] == step for i in range(len(order)))
    assert found == 2, f"once for each of two teams, not {found} times: {order}"


# ---- in the other process --------------------------------------------------------------------------------------------


def _compile() -> Any:
    import triton
    from triton.experimental.gluon import language as gl
    from triton.experimental.gluon._runtime import GluonASTSource

    from kvarto.kernels import triton_prefill_hopper as program

    constants = {"HEADS": 8, "R": 4, "S": 64, "DK": 128, "DV": 128, "SINK": 1, "WINDOW": 0, "FIRST": True}
    types = {"q": "*bf16", "start": "*i32", "position": "*i32", "state": "*fp32", "k_base": "*fp32", "scale": "fp32"}
    for name, box in (("k_blocks", [program.N, 128]), ("v_blocks", [128, program.N])):
        layout = gl.NVMMASharedLayout.get_default_for(box, gl.float16)
        types[name] = f"tensordesc<fp16[{box[0]}, {box[1]}],{layout!r}>"
    signature = {
        argument: "constexpr" if argument in constants else types.get(argument, "i32")
        for argument in program.attend_whole.arg_names
    }
    source = GluonASTSource(program.attend_whole, signature, constants, aligned(signature, "q_"))
    return triton.compile(source, target=hopper(), options={"num_warps": 4, "maxnreg": program.REGISTERS})


def _order(instructions: list[tuple[int, str, str]]) -> list[list[Any]]:
    """Runs of products, exponentials and waits for products: [kind, count]. A product's first instruction begins a run."""
    kinds = []
    for _, kind, rest in instructions:
        if kind == "WARPGROUP" and "DEPBAR" in rest:
            kinds.append("wait 1" if "0x1" in rest else "wait 0")
        elif kind == "WARPGROUP":
            kinds.append("begin")
        elif kind == "HGMMA" or (kind == "MUFU" and "EX2" in rest):
            kinds.append(kind)
    return [[kind, len(list(run))] for kind, run in groupby(kinds) if kind != "begin"]


if __name__ == "__main__":
    numbers, instructions = examine(_compile().asm["cubin"])
    json.dump({"stack_bytes": numbers["STACK"], "order": _order(instructions)}, sys.stdout)
