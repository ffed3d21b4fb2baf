"""What the compiler makes of the packed kernel for a Hopper GPU, without one: Triton brings the assembler and the disassembler.

The kernel is fast because packed rows become tensor-core operands in registers, two numbers an instruction. Nothing fails when a compiler puts a
trip through shared memory in between or takes halves apart again, it only gets slower. Here it fails. The numbers are of Triton 3.6 and 3.7.

A name with a + is the program whose slabs are copied to shared memory ahead: all that it reads of a page, it reads from there.
`python tests/unit/kernels/test_triton_compiled.py FORMAT[+]...` prints them as JSON.
"""

from __future__ import annotations

import json
import re
import sys
from collections import Counter
from collections.abc import Iterator
from dataclasses import asdict, dataclass
from pathlib import Path
from typing import Any

from hopper import aligned, examine, hopper, run_in_another_process

REGISTERS = 168
STACK_BYTES = 160


@dataclass(frozen=True)
class Expected:
    """Of the loop over pages, D = 128: tensor-core instructions, and at most so many of shared memory and in all (a tenth or so more than there are).

    Query parts, probabilities and sums over lanes go through shared memory in any case: a few instructions a page, not one a row.
    """

    tensor_core: int
    shared: int
    instructions: int


EXPECTED = {
    "int4+": Expected(76, 90, 1150),
    "int2+": Expected(80, 90, 1100),
    "kivi2+": Expected(72, 80, 1300),
    "int4": Expected(76, 32, 1200),
    "int8": Expected(72, 32, 950),  # 8 more than fp8: a key channel's zero, once a page
    "fp8": Expected(64, 32, 1050),
    "turbo4+": Expected(64, 60, 2350),
    "turbo3": Expected(64, 115, 2700),  # Triton 3.6 takes some rows through shared memory, 3.7 does not.
}


@dataclass(frozen=True)
class Compiled:
    """What was compiled. `tensor_core`, `shared`, `copies` (by the bulk engine) and `instructions` count those of the loop over pages."""

    registers: int
    stack_bytes: int
    tensor_core: int
    shared: int
    copies: int
    instructions: int


def test_what_the_compiler_makes_of_the_packed_kernel(tmp_path: Path) -> None:
    """One test of all formats, so that test processes that share the work compile them once."""
    printed = run_in_another_process(__file__, *EXPECTED, cache=tmp_path)
    compiled = {name: Compiled(**numbers) for name, numbers in printed.items()}
    faults = [f"{name}: {fault}" for name in EXPECTED for fault in _faults(name, compiled[name])]
    assert not faults, "\n".join(faults)


def _faults(name: str, got: Compiled) -> Iterator[str]:
    expected, copies = EXPECTED[name], 2 if name.endswith("+") else 0
    if got.registers > REGISTERS or got.stack_bytes > STACK_BYTES:
        yield f"registers do not hold a page: {got.registers} of them and {got.stack_bytes} bytes in memory"
    if got.tensor_core != expected.tensor_core:
        yield f"{got.tensor_core} tensor-core instructions, not {expected.tensor_core}"
    if got.shared > expected.shared:
        yield f"rows take another trip through shared memory: {got.shared} instructions, not up to {expected.shared}"
    if got.copies != copies:
        yield f"{got.copies} copies of slabs, not {copies}"
    if got.instructions > expected.instructions:
        yield f"halves are taken apart, or worse: {got.instructions} instructions, not up to {expected.instructions}"


# ---- in the other process --------------------------------------------------------------------------------------------


def _compile(name: str) -> Any:
    """The packed kernel as a decode step of 4 query heads for each of 8 KV heads, D = 128, launches it on an H200."""
    import triton
    from triton.compiler import ASTSource

    from kvarto.formats import parse_format
    from kvarto.kernels.triton_decode import attend_packed
    from kvarto.layout import Geometry

    chosen = parse_format(name.removesuffix("+"))
    layout = chosen.layout(Geometry(8, 128, 128))
    constants = {
        "K": chosen.k.tile(layout.k), "V": chosen.v.tile(layout.v), "PAGE_NBYTES": layout.nbytes,
        "K_NBYTES": layout.k.nbytes, "PAIR_NBYTES": layout.pair_nbytes, "BFLOAT16": True, "HEADS": 8, "R": 4, "S": 64,
        "DK": 128, "DV": 128, "N": 8, "SINK": 1, "WINDOW": 0, "SLIDING": 0, "SOFTCAP": False, "ENTRIES": 64, "TURNS": 1,
        "AHEAD": name.endswith("+"),
    }  # fmt: skip
    types = dict.fromkeys(("start", "position", "table", "plan"), "*i32")
    types |= {"q": "*bf16", "pages": "*u8", "out": "*fp32", "lse": "*fp32", "scale": "fp32", "softcap": "fp32"}
    signature = {
        argument: "constexpr" if argument in constants else types.get(argument, "i32")
        for argument in attend_packed.arg_names
    }
    source = ASTSource(attend_packed, signature, constants, aligned(signature, "q_"))
    options = {"num_warps": 1, "num_stages": 1, "maxnreg": REGISTERS}
    return triton.compile(source, target=hopper(), options=options)


def _examine(cubin: bytes) -> Compiled:
    numbers, instructions = examine(cubin)
    counts = Counter(_main_loop(instructions))
    return Compiled(
        numbers["REG"],
        numbers["STACK"],
        counts["HMMA"],
        sum(counts[kind] for kind in ("LDS", "LDSM", "STS", "STSM")),
        counts["UBLKCP"],
        counts.total(),
    )


def _main_loop(instructions: list[tuple[int, str, str]]) -> list[str]:
    """The kinds of instructions (HMMA, LDS ...) between the target of the widest backward branch and the branch: the loop over pages.

    What stands behind the program's end is no part of it: there an unlucky wait goes on and then branches back.
    """
    loops = [
        (address - int(target[1], 16), int(target[1], 16), address)
        for address, kind, rest in instructions
        if kind == "BRA" and (target := re.search(r"0x([0-9a-f]+)", rest)) and int(target[1], 16) < address
    ]
    end = max(address for address, kind, _ in instructions if kind == "EXIT")
    _, first, last = max(loop for loop in loops if loop[2] < end)
    return [kind for address, kind, _ in instructions if first <= address <= last]


if __name__ == "__main__":
    print(json.dumps({name: asdict(_examine(_compile(name).asm["cubin"])) for name in sys.argv[1:]}))
