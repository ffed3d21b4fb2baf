"""The kernel, and sealing, on machines with narrower vectors, which numba is told to compile for; a process each, since vectors are chosen once."""

from __future__ import annotations

import os
import platform
import subprocess
import sys
from pathlib import Path

import pytest

pytest.importorskip("torch")
pytest.importorskip("numba")

CHECK = """
from batches import assert_near, make
from kvarto.layout import Geometry
from kvarto.simd import LANES
assert LANES == {lanes}, LANES
batch = make("int4", Geometry(1, 128, 64), [300, 130], [1, 20], R=3)
assert_near(batch.attend(), batch.expected())

from sealing_cases import FEW, case, check
from kvarto.codecs import registry
from kvarto.kernels import numba_seal
for k, v, dim in (("int4", "int4", 64), ("int8", "kivi2", 72), ("fp8", "int2", 80)):
    check(case(registry[k], registry[v], Geometry(1, dim, dim), FEW), numba_seal, "cpu")
"""


@pytest.mark.skipif(platform.machine() not in ("x86_64", "AMD64"), reason="names of x86 features")
@pytest.mark.parametrize(
    ("lanes", "cpu", "features"), [(8, "haswell", "+avx,+avx2,+fma,+f16c"), (4, "generic", "+sse2")]
)
def test_narrower_vectors(lanes: int, cpu: str, features: str) -> None:
    environment = os.environ | {
        "NUMBA_CPU_NAME": cpu,
        "NUMBA_CPU_FEATURES": features,
        "PYTHONPATH": os.pathsep.join([str(Path(__file__).parent), *sys.path]),
    }
    done = subprocess.run(
        [sys.executable, "-c", CHECK.format(lanes=lanes)], env=environment, capture_output=True, text=True, check=False
    )
    assert done.returncode == 0, done.stderr
