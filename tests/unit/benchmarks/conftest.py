"""Benchmarks are programs beside the package: their folder is on the path when they run, and so it is here."""

from __future__ import annotations

import sys
from pathlib import Path

sys.path.insert(0, str(Path(__file__).parents[3] / "benchmarks"))
