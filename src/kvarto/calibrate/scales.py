"""FP8 scales of keys and values in checkpoints, as llm-compressor writes them and vLLM reads them (compressed-tensors 0.20).

    model.layers.N.self_attn.k_scale, .v_scale     x ~ code * scale, scale = amax / 448; [1] for a tensor, [Hkv, 1, 1] for each attention head
    config.json: quantization_config.kv_cache_scheme   {"num_bits": 8, "type": "float", "strategy": "tensor" or "attn_head", ...}

Written to a safetensors file of their own beside the weights, which are not touched. Read from whatever file holds them. Scales that the config
promises and the weights lack are what vLLM serves as 1.0 without an error (vllm-project/vllm 54623); here that is an error.
"""

from __future__ import annotations

import json
import logging
import re
from collections.abc import Iterator
from dataclasses import dataclass
from pathlib import Path
from typing import Any, Literal

import numpy as np

from kvarto.calibrate.record import Record
from kvarto.calibrate.tensors import pack
from kvarto.errors import IntegrityError, Unsupported, UsageError
from kvarto.files import write_whole
from kvarto.jit import require
from kvarto.policy_file import LayerEntry, PolicyFile

E4M3_MAX = 448.0
FILE_NAME = "kv_scales.safetensors"
Per = Literal["tensor", "head"]
_STRATEGIES: dict[str, Per] = {"tensor": "tensor", "attn_head": "head"}
_SCALE = re.compile(r"(?:.*\.)?layers\.(\d{1,5})\.self_attn\.(?:attn\.)?(?:[kv]_proj\.)?(k|v)_scale")
_ATTENTION = re.compile(r"((?:.*\.)?layers\.)\d{1,5}\.self_attn\..*")
_INDEX = "model.safetensors.index.json"
_ATTENDING = ("full_attention", "sliding_attention")
_log = logging.getLogger(__name__)


@dataclass(frozen=True)
class Scales:
    """k[i] and v[i] are those of layer i of those that cache keys and values: one, or one for each KV head."""

    per: Per
    k: tuple[tuple[float, ...], ...]
    v: tuple[tuple[float, ...], ...]

    @classmethod
    def of(cls, record: Record, per: Per = "tensor") -> Scales:
        """amax / 448 over all calibrated tokens, those of first pages included: FP8 formats keep no sink raw. 1 where all are 0."""
        sides = []
        for side in ("k", "v"):
            amax = [layer.max(keepdims=True) if per == "tensor" else layer for layer in record.amax(side)]
            sides.append(tuple(tuple(_scale(size) for size in layer) for layer in amax))
        return cls(per, *sides)

    def policy(self, name: str, provenance: dict[str, Any]) -> PolicyFile:
        """The policy that quantizes all layers to e4m3 by these scales."""
        codec = "fp8" if self.per == "tensor" else "fp8-head"
        layers = tuple(LayerEntry(format=codec, k_scale=k, v_scale=v) for k, v in zip(self.k, self.v, strict=True))
        return PolicyFile(name=name, layers=layers, provenance=provenance)


def export_scales(record: Record, folder: str | Path, per: Per = "tensor") -> Path:
    """Put the scales of a record into a Hugging Face checkpoint of the model, quantized otherwise or not. Returns the file that holds them.

    The config says compressed-tensors afterwards: transformers then wants that package to load the folder, so use a copy for vLLM.
    Raises UsageError for a folder that is no such checkpoint or has scales already, Unsupported for one quantized by another method.
    """
    folder = Path(folder).expanduser()
    config = _config(folder)
    layers = _layers(config)
    if len(layers) != len(record.layers):
        expected = f"the {len(record.layers)} layers with keys and values of {record.provenance.model}"
        raise UsageError(f"checkpoint {folder}", expected, len(layers), "export to the model that was calibrated")
    heads = _text(config).get("num_key_value_heads") or _text(config).get("num_attention_heads")
    if any(len(layer["k_amax"]) != heads for layer in record.layers):
        raise UsageError(
            f"checkpoint {folder}",
            f"{len(record.layers[0]['k_amax'])} KV heads",
            heads,
            "export to the model that was calibrated",
        )
    quantization = _quantization(folder, config)
    if theirs := sorted(
        {file.name for file, name in _names(folder) if _SCALE.fullmatch(name) and file.name != FILE_NAME}
    ):
        raise UsageError(
            f"checkpoint {folder}", "no scales of keys and values yet", theirs[0], "export to a checkpoint without them"
        )
    prefix = _prefix(folder)
    scales, tensors = Scales.of(record, per), dict[str, Any]()
    for side, values in (("k", scales.k), ("v", scales.v)):
        for layer, of_layer in zip(layers, values, strict=True):
            shape = (1,) if per == "tensor" else (len(of_layer), 1, 1)
            tensors[f"{prefix}{layer}.self_attn.{side}_scale"] = np.array(of_layer, np.float32).reshape(shape)
    note = {"format": "pt", "kvarto_record": record.sha256}
    write_whole(folder / FILE_NAME, pack(tensors, note))
    _extend_index(folder, tensors)
    config["quantization_config"] = quantization | {"kv_cache_scheme": _scheme(per)}
    write_whole(folder / "config.json", (json.dumps(config, indent=2) + "\n").encode())
    return folder / FILE_NAME


def read_scales(folder: str | Path, *, partial: bool = False) -> Scales:
    """The scales of a checkpoint. As many as its config has layers, for keys and for values; `partial`: those that lack count as 1, with a warning.

    Raises UsageError for a folder without any, IntegrityError if some are missing or mean nothing, Unsupported for other schemes.
    """
    folder = Path(folder).expanduser()
    config = _config(folder)
    layers, scheme = _layers(config), (config.get("quantization_config") or {}).get("kv_cache_scheme")
    if scheme is not None:
        _check_scheme(folder, scheme)
    found: dict[str, dict[int, tuple[float, ...]]] = {"k": {}, "v": {}}
    for file, name in _names(folder):
        if match := _SCALE.fullmatch(name):
            found[match[2]][int(match[1])] = _values(file, name)
    if not any(found.values()) and scheme is None:
        remedy = "kvarto calibrate export-scales RECORD FOLDER writes them"
        raise UsageError(f"checkpoint {folder}", "k_scale and v_scale of its layers", "none", remedy)
    _check_count(folder, layers, found, partial)
    heads = max((len(each) for side in found.values() for each in side.values()), default=1)
    sides = [tuple(found[side].get(layer, (1.0,)) for layer in layers) for side in ("k", "v")]
    return Scales("tensor" if heads == 1 else "head", *sides)


def _scale(amax: np.float32) -> float:
    """amax / 448 in float32, rounded up where the largest number would else be just beyond the largest code."""
    scale = amax / np.float32(E4M3_MAX)
    if not scale > 0:
        return 1.0
    return float(scale if scale * np.float32(E4M3_MAX) >= amax else np.nextafter(scale, np.float32(np.inf)))


def _check_count(
    folder: Path, layers: list[int], found: dict[str, dict[int, tuple[float, ...]]], partial: bool
) -> None:
    """Scales found = layers quantized."""
    missing = sorted({layer for layer in layers for side in found.values() if layer not in side})
    if not missing:
        return
    counts = ", ".join(f"{len(of)} of {side.upper()}" for side, of in found.items())
    some = ", ".join(map(str, missing[:8])) + (" ..." if len(missing) > 8 else "")
    line = f"{folder}: scales of {len(layers)} layers expected, found {counts}; layers {some} lack them"
    if not partial:
        raise IntegrityError(f"{line}; get a complete checkpoint, or take 1.0 for them with --partial")
    _log.warning("%s and get 1.0", line)


# ---- a checkpoint's files ------------------------------------------------------------------------------------------


def _config(folder: Path) -> dict[str, Any]:
    try:
        config = json.loads((folder / "config.json").read_text())
    except (OSError, ValueError, RecursionError) as error:
        reason = " ".join(str(error).split())
        raise UsageError(f"checkpoint {folder}", "a folder with config.json and safetensors weights", reason) from None
    if not isinstance(config, dict) or not isinstance(_text(config).get("num_hidden_layers"), int):
        raise UsageError(f"checkpoint {folder}", "a config.json with num_hidden_layers", "none")
    return config


def _text(config: dict[str, Any]) -> dict[str, Any]:
    text = config.get("text_config")
    return text if isinstance(text, dict) else config


def _layers(config: dict[str, Any]) -> list[int]:
    """The numbers of the layers that cache keys and values."""
    count, kinds = _text(config)["num_hidden_layers"], _text(config).get("layer_types")
    return [i for i in range(count) if not kinds or kinds[i] in _ATTENDING]


def _quantization(folder: Path, config: dict[str, Any]) -> dict[str, Any]:
    """The quantization that is there, or none of the weights. Raises Unsupported."""
    there = config.get("quantization_config")
    if not there:
        return {
            "quant_method": "compressed-tensors",
            "format": "dense",
            "quantization_status": "compressed",
            "config_groups": {},
            "ignore": [],
        }
    if there.get("quant_method") != "compressed-tensors":
        raise Unsupported(
            f"{folder} is quantized by {there.get('quant_method')}, whose scales kvarto does not write; use compressed-tensors"
        )
    return dict(there)


def _scheme(per: Per) -> dict[str, Any]:
    """As compressed-tensors dumps its QuantizationArgs."""
    strategy = next(name for name, meaning in _STRATEGIES.items() if meaning == per)
    return {
        "num_bits": 8, "type": "float", "symmetric": True, "group_size": None, "strategy": strategy, "block_structure": None,
        "dynamic": False, "actorder": None, "scale_dtype": None, "zp_dtype": None, "observer": "minmax", "observer_kwargs": {},
    }  # fmt: skip


def _check_scheme(folder: Path, scheme: Any) -> None:
    kind = {name: scheme.get(name) for name in ("num_bits", "type", "strategy", "dynamic", "symmetric")}
    static = (
        kind["num_bits"] == 8 and kind["type"] == "float" and not kind["dynamic"] and kind["symmetric"] is not False
    )
    if not static or kind["strategy"] not in (None, *_STRATEGIES):
        said = ", ".join(f"{name} {value}" for name, value in kind.items())
        raise Unsupported(
            f"{folder}: kv_cache_scheme is {said}; kvarto reads static symmetric 8-bit floats by tensor or attn_head"
        )


def _names(folder: Path) -> Iterator[tuple[Path, str]]:
    """Every tensor of the folder, and its file."""
    safetensors = require("safetensors")
    files = sorted(folder.glob("*.safetensors"))
    if not files:
        raise UsageError(f"checkpoint {folder}", "safetensors weights", "none")
    for path in files:
        try:
            with safetensors.safe_open(path, framework="np") as file:
                names = list(file.keys())
        except (safetensors.SafetensorError, OSError) as error:
            raise IntegrityError(f"{path} is not a sound safetensors file ({error}); get the model again") from error
        yield from ((path, name) for name in names)


def _prefix(folder: Path) -> str:
    """What stands before the number of a layer in names of attention weights."""
    found = {match[1] for _, name in _names(folder) if (match := _ATTENTION.fullmatch(name))}
    if len(found) != 1:
        raise Unsupported(
            f"{folder}: its attention weights are not named like model.layers.N.self_attn; kvarto does not know where vLLM looks"
        )
    return found.pop()


def _values(file: Path, name: str) -> tuple[float, ...]:
    """Of any float dtype. Raises IntegrityError for what is no scale."""
    with require("safetensors").safe_open(file, framework="pt") as opened:
        scales = tuple(float(x) for x in opened.get_tensor(name).float().flatten())
    if not scales or not all(0 < scale < float("inf") for scale in scales):
        raise IntegrityError(
            f"{file}: {name} should be positive and finite, and is {scales[:4]}; get the checkpoint again"
        )
    return scales


def _extend_index(folder: Path, tensors: dict[str, Any]) -> None:
    """Sharded checkpoints list which file holds which tensor; what they do not list is not loaded."""
    path = folder / _INDEX
    if path.is_file():
        index = json.loads(path.read_text())
        index.setdefault("weight_map", {}).update(dict.fromkeys(tensors, FILE_NAME))
        write_whole(path, (json.dumps(index, indent=2) + "\n").encode())
