"""What a model's keys and values look like on real text, kept in a record; FP8 scales from it; and policies that spend a budget of bits by layer.

Imported at first use, so that the package itself needs no torch.
"""

from __future__ import annotations

import importlib
from typing import TYPE_CHECKING, Any

if TYPE_CHECKING:
    from kvarto.calibrate.collect import calibrate
    from kvarto.calibrate.policy import make_policy
    from kvarto.calibrate.record import Record
    from kvarto.calibrate.scales import export_scales, read_scales

__all__ = ["Record", "calibrate", "export_scales", "make_policy", "read_scales"]

_HOMES = {
    "Record": "kvarto.calibrate.record",
    "calibrate": "kvarto.calibrate.collect",
    "export_scales": "kvarto.calibrate.scales",
    "make_policy": "kvarto.calibrate.policy",
    "read_scales": "kvarto.calibrate.scales",
}


def __getattr__(name: str) -> Any:
    if name not in _HOMES:
        raise AttributeError(f"module 'kvarto.calibrate' has no attribute {name!r}")
    return getattr(importlib.import_module(_HOMES[name]), name)
