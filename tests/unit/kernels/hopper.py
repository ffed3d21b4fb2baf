"""Compiling Triton programs for a Hopper GPU without one: Triton brings the assembler and the disassembler."""

from __future__ import annotations

import json
import os
import re
import subprocess
import sys
import tempfile
from importlib.util import find_spec
from pathlib import Path
from typing import Any

import pytest

_LINE = re.compile(r"/\*([0-9a-f]{4,5})\*/\s+(?:@!?U?P\w+\s+)?([A-Z0-9]+)(.*?);")


def run_in_another_process(script: str, *arguments: str, cache: Path) -> Any:
    """What `script` prints as JSON: whether programs are interpreted is decided when Triton is imported. With `cache` empty they are compiled anew.

    Skips the test that asks where nothing can be compiled.
    """
    for package in ("torch", "triton"):
        if find_spec(package) is None:
            pytest.skip(f"{package} is not installed")
    for tool in ("ptxas", "cuobjdump"):
        if not _tool(tool).exists():
            pytest.skip(f"this triton brings no {tool}")
    environment = {name: value for name, value in os.environ.items() if name != "TRITON_INTERPRET"}
    environment["TRITON_CACHE_DIR"] = str(cache)
    done = subprocess.run(
        [sys.executable, script, *arguments], env=environment, capture_output=True, text=True, check=False
    )
    assert done.returncode == 0, done.stderr
    return json.loads(done.stdout)


def examine(cubin: bytes) -> tuple[dict[str, int], list[tuple[int, str, str]]]:
    """(REG and STACK, instructions as (address, kind, rest))."""
    with tempfile.NamedTemporaryFile(suffix=".cubin") as file:
        file.write(cubin)
        file.flush()
        usage, assembly = (
            subprocess.run([_tool("cuobjdump"), option, file.name], capture_output=True, text=True, check=True).stdout
            for option in ("-res-usage", "-sass")
        )
    numbers = {key: int(number) for key, number in re.findall(r"(REG|STACK):(\d+)", usage)}
    return numbers, [(int(address, 16), kind, rest) for address, kind, rest in _LINE.findall(assembly)]


def hopper() -> Any:
    """The target to compile for."""
    from triton.backends.compiler import GPUTarget

    return GPUTarget("cuda", 90, 32)


def aligned(signature: dict[str, str], *also: str) -> dict[tuple[int], list[list[Any]]]:
    """What a launch finds out about its arguments: pointers, and those that begin with one of `also`, are multiples of 16."""
    return {
        (i,): [["tt.divisibility", 16]]
        for i, (argument, kind) in enumerate(signature.items())
        if kind.startswith("*") or argument.startswith(also)
    }


def _tool(name: str) -> Path:
    spec = find_spec("triton")
    assert spec is not None
    assert spec.origin is not None
    return Path(spec.origin).parent / "backends" / "nvidia" / "bin" / name
