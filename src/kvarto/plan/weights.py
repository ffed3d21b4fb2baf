"""What the weights of a model weigh, by the checkpoint's own quantization or as if in another dtype, and what a step reads of them. No torch.

Quantized checkpoints keep embedding and head in 16 bits, and gpt-oss all but its experts.
"""

from __future__ import annotations

import json
import struct
from dataclasses import dataclass
from pathlib import Path

from kvarto.errors import Unsupported, UsageError
from kvarto.plan.config import Config
from kvarto.plan.parameters import Parameters, count

_MOST_HEADER_BYTES = 256 << 20
BYTES = {
    "fp32": 4.0,
    "bf16": 2.0,
    "fp16": 2.0,
    "fp8": 1.0,
    "int8": 1.0,
    "int4": 0.5 + 2.5 / 128,
    "nvfp4": 0.5625,
    "mxfp4": 0.53125,
}
"""Bytes a parameter: int4 in groups of 128 with a 16-bit scale and a 4-bit zero, as AWQ and GPTQ; nvfp4 16 to an fp8 scale; mxfp4 32."""


@dataclass(frozen=True)
class Weights:
    """Parameters and what they weigh: `inner_bytes` for each one of attention and dense, `expert_bytes` for experts, 2 for embedding and head."""

    parameters: Parameters
    dtype: str
    inner_bytes: float
    expert_bytes: float
    outer_bytes: float = 2.0
    nbytes_known: int | None = None

    @property
    def nbytes(self) -> int:
        """All weights."""
        if self.nbytes_known is not None:
            return self.nbytes_known
        p = self.parameters
        outer = (p.embedding + p.head) * self.outer_bytes
        return round(outer + (p.attention + p.dense) * self.inner_bytes + p.routed * self.expert_bytes)

    def read_nbytes(self, batch: int) -> float:
        """What a decode step of a batch reads of them: experts as far as the batch meets them."""
        p = self.parameters
        head = (p.head or p.embedding) * self.outer_bytes
        met = p.experts_met(batch) * p.expert_layers * p.expert * self.expert_bytes
        return head + (p.attention + p.dense) * self.inner_bytes + met


def weights_of(config: Config, dtype: str | None) -> Weights:
    """By the checkpoint's own quantization, or as if in `dtype`. Raises Unsupported if the formulas do not cover the architecture."""
    parameters = count(config.fields)
    if dtype is not None:
        return as_dtype(parameters, dtype)
    own, only_experts = _own_dtype(config)
    outer = 4.0 if own == "fp32" else 2.0
    inner = outer if only_experts else BYTES[own]
    known = safetensors_nbytes(config.folder) if config.folder else None
    if known is not None:
        measured = f"the config; bytes of the checkpoint in {config.folder}"
        parameters = Parameters(**vars(parameters) | {"source": measured})
        # Read in proportion to what really lies there.
        made = Weights(parameters, own, inner, BYTES[own], outer)
        scale = known / made.nbytes
        return Weights(parameters, own, inner * scale, BYTES[own] * scale, outer * scale, known)
    return Weights(parameters, own, inner, BYTES[own], outer)


def as_dtype(parameters: Parameters, dtype: str) -> Weights:
    """All inner matrices in one dtype. Raises UsageError for one that is not known."""
    if dtype not in BYTES:
        raise UsageError("--weights", f"one of {', '.join(BYTES)}", repr(dtype))
    return Weights(parameters, dtype, BYTES[dtype], BYTES[dtype], 4.0 if dtype == "fp32" else 2.0)


def safetensors_nbytes(folder: Path) -> int | None:
    """Bytes of the tensors in a folder of safetensors, by their headers; None if there are none that can be read."""
    total = 0
    paths = sorted(folder.glob("*.safetensors"))
    for path in paths:
        try:
            with path.open("rb") as file:
                (length,) = struct.unpack("<Q", file.read(8))
                if length > _MOST_HEADER_BYTES:
                    return None
                header = json.loads(file.read(length))
            total += sum(
                entry["data_offsets"][1] - entry["data_offsets"][0]
                for name, entry in header.items()
                if name != "__metadata__"
            )
        except (OSError, ValueError, struct.error, KeyError, TypeError, AttributeError):
            return None
    return total or None


# ---- dtypes ------------------------------------------------------------------------------------------------------------

_TORCH = {"float32": "fp32", "float16": "fp16", "bfloat16": "bf16"}


def _own_dtype(config: Config) -> tuple[str, bool]:
    """(The checkpoint's dtype by its config; whether only the experts are in it). Raises Unsupported for a quantization that is not known."""
    said = config.whole.get("quantization_config") or config.fields.data.get("quantization_config")
    if not isinstance(said, dict):
        name = str(config.fields.data.get("dtype") or config.fields.data.get("torch_dtype") or "bfloat16").removeprefix(
            "torch."
        )
        if name not in _TORCH:
            raise Unsupported(f"{config.name}: weights of dtype {name[:40]} are not known; say --weights")
        return _TORCH[name], False
    method = str(said.get("quant_method", "")).lower()
    words = json.dumps(said).lower()
    if method == "mxfp4":
        return "mxfp4", True
    if "nvfp4" in words:
        return "nvfp4", False
    if method in ("fp8", "fbgemm_fp8", "fp8_e4m3") or (
        method in ("modelopt", "compressed-tensors") and '"fp8' in words
    ):
        return "fp8", False
    if method in ("awq", "gptq") and said.get("bits", said.get("w_bit", 4)) == 4:
        return "int4", False
    if method == "compressed-tensors" and '"num_bits": 4' in words:
        return "int4", False
    if method == "compressed-tensors" and '"num_bits": 8' in words:
        return ("fp8" if '"type": "float"' in words else "int8"), False
    raise Unsupported(
        f"{config.name}: weights quantized by {method[:40] or 'nobody named'} are not known; say --weights"
    )
