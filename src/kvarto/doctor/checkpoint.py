"""What a checkpoint says of KV scales, read without torch: config.json, and the headers of its safetensors files."""

from __future__ import annotations

import json
import re
from collections.abc import Iterator
from dataclasses import dataclass
from pathlib import Path
from typing import Any

import numpy as np

from kvarto.errors import IntegrityError, UsageError

_SCALE = re.compile(r"(?:.*\.)?layers\.(\d{1,5})\.self_attn\.(?:attn\.)?(?:[kv]_proj\.)?(k|v)_scale")
_ATTENDING = ("full_attention", "sliding_attention", "chunked_attention")
_MOST_HEADER_BYTES = 100 * 2**20
_NUMPY = {"F32": "<f4", "F16": "<f2", "BF16": "<u2", "F64": "<f8"}


@dataclass(frozen=True)
class Scales:
    """layers: those that cache keys and values; k, v: how many of them have a scale; ones: all scales are 1; promised: config.json says there are."""

    layers: int
    k: int
    v: int
    ones: bool
    promised: bool


def read_config(folder: Path) -> dict[str, Any]:
    """config.json, the text model's part of it. Raises UsageError."""
    try:
        config = json.loads((folder / "config.json").read_text())
    except (OSError, ValueError, RecursionError) as error:
        reason = " ".join(str(error).split())
        raise UsageError(f"checkpoint {folder}", "a folder with config.json", reason) from error
    text = config.get("text_config", config) if isinstance(config, dict) else None
    if not isinstance(text, dict) or not isinstance(text.get("num_hidden_layers"), int):
        raise UsageError(f"checkpoint {folder}", "a config.json with num_hidden_layers", "none")
    whole = config.get("quantization_config")
    return text if whole is None else {**text, "quantization_config": whole}


def read_scales(folder: Path) -> Scales:
    """Count them. Raises UsageError or IntegrityError."""
    config = read_config(folder)
    kinds = config.get("layer_types") or []
    layers = {i for i in range(config["num_hidden_layers"]) if i >= len(kinds) or kinds[i] in _ATTENDING}
    found: dict[str, set[int]] = {"k": set(), "v": set()}
    ones = True
    for file, name, entry, data in _tensors(folder):
        if (match := _SCALE.fullmatch(name)) and int(match[1]) in layers:
            found[match[2]].add(int(match[1]))
            ones = ones and _is_one(file, entry, data)
    promised = (config.get("quantization_config") or {}).get("kv_cache_scheme") is not None
    any_found = bool(found["k"] or found["v"])
    return Scales(len(layers), len(found["k"]), len(found["v"]), ones and any_found, promised)


def _tensors(folder: Path) -> Iterator[tuple[Path, str, dict[str, Any], int]]:
    """Every tensor: its file, name and header entry, and where the file's data begin."""
    files = sorted(folder.glob("*.safetensors"))
    if not files:
        raise UsageError(f"checkpoint {folder}", "safetensors weights", "none")
    for path in files:
        try:
            with path.open("rb") as file:
                size = int.from_bytes(file.read(8), "little")
                if not 2 <= size <= min(_MOST_HEADER_BYTES, path.stat().st_size):
                    raise ValueError(f"a header of {size} bytes")
                header = json.loads(file.read(size))
            if not isinstance(header, dict):
                raise ValueError("a header that is no object")
        except (OSError, ValueError, RecursionError) as error:
            raise IntegrityError(f"{path} is not a sound safetensors file ({error}); get the model again") from error
        for name, entry in header.items():
            if name != "__metadata__":
                yield path, name, entry, 8 + size


def _is_one(path: Path, entry: dict[str, Any], data: int) -> bool:
    try:
        begin, end = entry["data_offsets"]
        with path.open("rb") as file:
            file.seek(data + begin)
            raw = np.frombuffer(file.read(end - begin), _NUMPY[entry["dtype"]])
    except (LookupError, TypeError, ValueError, OSError) as error:
        raise IntegrityError(f"{path} is not a sound safetensors file ({error!r}); get the model again") from error
    values = (raw.astype(np.uint32) << 16).view(np.float32) if entry["dtype"] == "BF16" else raw
    return bool((values == 1).all())
