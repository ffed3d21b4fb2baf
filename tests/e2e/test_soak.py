"""A short soak; the long one is `make soak`."""

from __future__ import annotations

import subprocess
import sys
from pathlib import Path

import pytest

pytest.importorskip("torch")
pytest.importorskip("transformers")
pytest.importorskip("uvicorn")
pytest.importorskip("llguidance")
pytest.importorskip("httpx")

pytestmark = [pytest.mark.slow, pytest.mark.timeout(1800)]

PROGRAM = Path(__file__).parents[1] / "soak.py"


def test_hundreds_of_requests_with_little_memory() -> None:
    command = [sys.executable, str(PROGRAM), "--requests", "600", "--references", "80", "--seed", "1"]
    done = subprocess.run(command, capture_output=True, text=True, check=False)
    assert done.returncode == 0, done.stdout + done.stderr[-2000:]
