"""Arrays of float32 as safetensors bytes, written and read with numpy alone: eight bytes of length, a JSON header of that length, then the data."""

from __future__ import annotations

import json
import math
from collections.abc import Mapping
from typing import Any

import numpy as np
from numpy.typing import NDArray

Array = NDArray[np.float32]
_METADATA = "__metadata__"
_ALIGNMENT = 8


def pack(arrays: Mapping[str, Array], metadata: Mapping[str, str]) -> bytes:
    """The file, arrays in the order of their names."""
    header: dict[str, Any] = {_METADATA: dict(metadata)}
    parts, end = [], 0
    for name in sorted(arrays):
        data = np.ascontiguousarray(arrays[name], "<f4").tobytes()
        header[name] = {"dtype": "F32", "shape": list(arrays[name].shape), "data_offsets": [end, end + len(data)]}
        parts.append(data)
        end += len(data)
    text = json.dumps(header).encode()
    text += b" " * (-len(text) % _ALIGNMENT)
    return b"".join([len(text).to_bytes(8, "little"), text, *parts])


def unpack(data: bytes) -> tuple[dict[str, str], dict[str, Array]]:
    """(Metadata, arrays). Raises ValueError for bytes that are not such a file, whole and with float32 alone."""
    length = int.from_bytes(data[:8], "little")
    if len(data) < 8 or length > len(data) - 8:
        raise ValueError("it ends within its header")
    header = json.loads(data[8 : 8 + length])
    if not isinstance(header, dict):
        raise ValueError("its header is no object")
    metadata, body = header.pop(_METADATA, {}), data[8 + length :]
    if not isinstance(metadata, dict) or not all(isinstance(value, str) for value in metadata.values()):
        raise ValueError("its metadata are no texts")
    return metadata, {name: _array(name, entry, body) for name, entry in header.items()}


def _array(name: str, entry: Any, body: bytes) -> Array:
    if not isinstance(entry, dict) or entry.get("dtype") != "F32":
        raise ValueError(f"{name[:80]} is not float32")
    shape, offsets = entry.get("shape", ()), entry.get("data_offsets", ())
    if not (_sizes(shape) and _sizes(offsets) and len(offsets) == 2):
        raise ValueError(f"{name[:80]} has no shape or place")
    begin, end = offsets
    if not begin <= end <= len(body) or end - begin != 4 * math.prod(shape):
        raise ValueError(f"{name[:80]} is not all there")
    return np.frombuffer(body[begin:end], "<f4").astype(np.float32).reshape(shape)


def _sizes(value: Any) -> bool:
    return isinstance(value, list) and all(type(each) is int and 0 <= each < 1 << 48 for each in value)
