"""The instructions that make levels of codes, step by step as a GPU does them: no interpreter of Triton's runs them."""

from __future__ import annotations

import re

import numpy as np
import pytest

pytest.importorskip("torch")
pytest.importorskip("triton")

from kvarto.codecs import registry
from kvarto.codecs.turbo import levels_of
from kvarto.kernels.triton_spec import curve_assembly
from kvarto.layout import Side


def run(assembly: str, word: int) -> np.ndarray:
    """float16 [2]: both halves of what PTX of lop3 (a & b | c), mov, fma and mul makes of a word."""
    registers = {"$1": word}

    def read(operand: str) -> int:
        return registers[operand] if operand in registers else int(operand, 16)

    def halves(operand: str) -> np.ndarray:
        return np.array([read(operand)], np.uint32).view(np.float16).astype(np.float64)

    for name, arguments in re.findall(r"(\w+)\.[\w.]*b32 ([^;]*);|", assembly):
        assert name in ("", "reg", "mov", "lop3"), (name, arguments)
    for line in assembly.strip("{} ").split(";"):
        kind, _, rest = line.strip().partition(" ")
        to, *operands = [operand.strip() for operand in rest.split(",")]
        if kind == "mov.b32":
            registers[to] = read(operands[0])
        elif kind == "lop3.b32":
            assert operands[3] == "0xEA"
            registers[to] = read(operands[0]) & read(operands[1]) | read(operands[2])
        elif kind in ("mul.rn.f16x2", "fma.rn.f16x2"):
            x, y, z = (*map(halves, operands), np.zeros(2))[:3]
            registers[to] = int(
                (x * y + z).astype(np.float16).view(np.uint32)[0]
            )  # one rounding: float64 is exact here
        else:
            assert kind in (".reg", ""), line
    return np.array([registers["$0"]], np.uint32).view(np.float16)


@pytest.mark.parametrize(("name", "width"), [("turbo4", 4), ("turbo3", 4), ("turbo2", 2)])
def test_every_code_in_every_field(name: str, width: int) -> None:
    codec = registry[name]
    layout, bits = codec.layout(Side.K, 64, 128), int(codec.bits)
    tile, levels = codec.tile(layout), levels_of(bits, 128)
    for field in range(8 // width):
        for code in range(1 << bits):
            other = (5 * code + 3) % (1 << bits)
            low, high = (c << (width * field) | 0xFF & ~(((1 << bits) - 1) << (width * field)) for c in (code, other))
            # All bits around the codes are set, and the word is shifted as `unpack_curved` does it.
            got = run(curve_assembly(tile, field, width), ((0xFF00 | low) | (0xFF00 | high) << 16) << 1 & 0xFFFFFFFF)
            np.testing.assert_allclose(got, levels[[code, other]], rtol=2.0**-10)
