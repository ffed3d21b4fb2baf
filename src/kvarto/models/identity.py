"""What a model is, as one hash: enough to tell two checkpoints apart in a second, however large they are.

The hash covers the configuration and, for every tensor, its name, type, shape and three samples of its bytes. It does
not depend on how the tensors are spread over files, nor on the version of transformers that wrote them. It is
provenance, not a seal: a few bytes changed between the samples go unseen.
"""

from __future__ import annotations

import hashlib
import json
from collections.abc import Iterator
from pathlib import Path
from typing import Any, BinaryIO, NamedTuple

from kvarto.errors import IntegrityError

SAMPLE_BYTES = 1024
_HEADER_LIMIT_BYTES = 100_000_000
_FILE_LIMIT_BYTES = 1 << 60  # no file is larger, and no seek fails below it
# Written by whoever saved the folder; they say nothing about what the model computes.
_NOT_THE_MODEL = frozenset(("transformers_version", "_name_or_path", "_model_name_or_path"))


class _Tensor(NamedTuple):
    name: str
    kind: str
    file: Path
    start: int
    size_bytes: int


def identify(folder: Path) -> str:
    """SHA-256 (hexadecimal) of the config and sampled weights of a Hugging Face folder; IntegrityError if damaged."""
    try:
        config = json.loads((folder / "config.json").read_text())
        if not isinstance(config, dict):
            raise ValueError("it is no object")
    except (ValueError, RecursionError) as error:
        raise IntegrityError(f"config.json is not a JSON object ({error}); get the model again") from error
    digest = hashlib.sha256(json.dumps(_without_noise(config), sort_keys=True).encode())
    for tensor in sorted(tensor for file in folder.glob("*.safetensors") for tensor in _tensors(file)):
        digest.update(f"{tensor.name} {tensor.kind} {tensor.size_bytes}\n".encode(errors="surrogatepass"))
        with tensor.file.open("rb") as source:
            for sample in _samples(source, tensor):
                digest.update(sample)
    return digest.hexdigest()


def _without_noise(config: dict[str, Any]) -> dict[str, Any]:
    return {key: value for key, value in config.items() if key not in _NOT_THE_MODEL}


def _tensors(file: Path) -> Iterator[_Tensor]:
    """The tensors of a safetensors file from its header: eight bytes of length, then JSON, then the data."""
    try:
        with file.open("rb") as source:
            header_bytes = int.from_bytes(source.read(8), "little")
            if header_bytes > _HEADER_LIMIT_BYTES:
                raise ValueError("the header is too long")
            header = json.loads(source.read(header_bytes))
        for name, entry in header.items():
            if name != "__metadata__":
                begin, end = _offsets(name, entry)
                yield _Tensor(name, f"{entry['dtype']} {entry['shape']}", file, 8 + header_bytes + begin, end - begin)
    except (ValueError, KeyError, TypeError, AttributeError, RecursionError) as error:
        raise IntegrityError(f"{file.name} is not a sound safetensors file ({error}); get the model again") from error


def _offsets(name: str, entry: dict[str, Any]) -> tuple[int, int]:
    """Where a tensor begins and ends in the data. How long the data is, `_samples` finds out."""
    begin, end = entry["data_offsets"]
    if not (type(begin) is type(end) is int and 0 <= begin <= end < _FILE_LIMIT_BYTES):
        raise ValueError(f"{name[:80]} lies at {begin!r:.30} to {end!r:.30}")
    return begin, end


def _samples(source: BinaryIO, tensor: _Tensor) -> Iterator[bytes]:
    """The beginning, the middle and the end of a tensor's bytes; all of them when it is small."""
    count = min(SAMPLE_BYTES, tensor.size_bytes)
    for start in (0, (tensor.size_bytes - count) // 2, tensor.size_bytes - count):
        source.seek(tensor.start + start)
        sample = source.read(count)
        if len(sample) != count:
            raise IntegrityError(f"{tensor.file.name} is cut off; get the model again")
        yield sample
