"""What must be so before any test module, and with it Triton, is imported."""

from __future__ import annotations

import os


def _has_gpu() -> bool:
    try:
        import torch
    except ImportError:
        return False
    return torch.cuda.is_available()


if not _has_gpu():
    # Triton decides when it is imported whether its programs are compiled or interpreted.
    os.environ.setdefault("TRITON_INTERPRET", "1")
