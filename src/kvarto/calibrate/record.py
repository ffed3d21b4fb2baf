"""The record: what calibration found out about a model's keys and values, as one safetensors file. Numpy, no torch.

`layers.N.NAME` are float32 arrays, for layer N of those that cache keys and values; [Hkv] for each KV head, [Hkv, D] for each channel:

    k_amax v_amax                     [Hkv]     largest magnitude
    k_sink_amax v_sink_amax           [Hkv]     the same over the first page of each window, which nothing else looks at
    k_percentiles v_percentiles       [Hkv, 4]  of magnitudes: PERCENTILES, to one part in 64
    k_mean v_mean                     [Hkv, D]  means
    k_square v_square                 [Hkv, D]  means of squares
    k_low k_high v_low v_high         [Hkv, D]  LOW and HIGH percentiles: what lies beyond counts as outlier
    q_square                          [Hkv, Dk] means over tokens of the squares of queries, summed over the R heads of the group
    pre_k_mean pre_k_square ...       the same of keys before RoPE; absent where `pre_rope` of the metadata says why
    v_output                          [Hkv, Dv] sums over the group's heads of the squared norms of the columns of W_o; absent without an o_proj
    k_fisher v_fisher pre_k_fisher    [Hkv, D]  means over tokens of squared gradients of the loss, nats summed over a window; only on demand
    rope_angles rope_scale            [r / 2], [1]  radians a token by which RoPE turns pairs, and what it scales keys by; absent if it does more
    pre_k_levels_N v_levels_N         [2^N]   levels of N = 2, 3, 4 bits for normalised numbers (calibrate/nuq.py); with gradients only
    pre_k_drawn_N v_drawn_N           [2^N]   the same, drawn to the mean and variance of what they stand for

The first page of each window, where attention sinks sit, is kept out of all statistics but its own, as KVQuant leaves out the first token
(arXiv 2401.18079). A value's sink amax matters to formats that keep no sink raw, FP8 among them.
"""

from __future__ import annotations

import hashlib
import json
import re
from collections.abc import Mapping
from dataclasses import dataclass
from pathlib import Path
from typing import Any

import numpy as np
from pydantic import BaseModel, ConfigDict, Field, ValidationError

from kvarto.calibrate.tensors import Array, pack, unpack
from kvarto.errors import IntegrityError, UsageError
from kvarto.files import write_whole

PERCENTILES = (99.0, 99.5, 99.9, 99.99)
LOW, HIGH = 0.5, 99.5
VERSION = 1
_IDENTITY = re.compile("[0-9a-f]{64}")
_KEY = "kvarto_record"
_MOST_BYTES = 1 << 30


class Provenance(BaseModel):
    """What a record was made from. `date` is the only thing that two runs on the same inputs do not share.

    identity            of the model (`models.identity`)
    text_sha256         of the documents (`models.texts.fingerprint`); `documents`: how many were read, `source`: what they were asked for as
    tokens              of which statistics were made; `sink_tokens`: those kept apart; `window_tokens`: of a window
    threshold_tokens    tokens of which `low` and `high` were taken; fewer than `tokens` in long records
    fisher_tokens       0 if there are no Fisher weights
    pre_rope            "" if there are statistics before RoPE, else why not
    """

    model_config = ConfigDict(strict=True, extra="forbid", frozen=True)

    model: str
    identity: str
    source: str
    text_sha256: str
    documents: int = Field(ge=1)
    tokens: int = Field(ge=1)
    sink_tokens: int = Field(ge=0)
    window_tokens: int = Field(ge=1)
    threshold_tokens: int = Field(ge=1)
    fisher_tokens: int = Field(ge=0)
    pre_rope: str
    dtype: str
    versions: dict[str, str]
    date: str


@dataclass(frozen=True)
class Record:
    """`layers[i]` has the arrays of layer i by name (see the module)."""

    provenance: Provenance
    layers: tuple[Mapping[str, Array], ...]

    @property
    def sha256(self) -> str:
        """Of all that it says but the date: equal for equal inputs."""
        return _digest(self.provenance, self._flat())

    def amax(self, side: str) -> list[Array]:
        """Largest magnitudes of "k" or "v" by layer, float32 [Hkv], the first page included."""
        return [np.maximum(layer[f"{side}_amax"], layer[f"{side}_sink_amax"]) for layer in self.layers]

    def save(self, path: str | Path) -> None:
        """Write the file. Raises UsageError if that cannot be done."""
        head = {"version": VERSION, "layers": len(self.layers), "sha256": self.sha256, **self.provenance.model_dump()}
        write_whole(Path(path), pack(self._flat(), {_KEY: json.dumps(head)}))

    @classmethod
    def load(cls, path: str | Path, *, model: Any = None) -> Record:
        """Read a file. `model`: a LoadedModel or an identity that the record must be of; None for any.

        Raises IntegrityError for a file that is damaged or no record, UsageError for one of another model.
        """
        path = Path(path).expanduser()
        head, arrays = _read(path)
        count, digest = head.pop("layers"), head.pop("sha256")
        try:
            provenance = Provenance.model_validate(head)
        except ValidationError as error:
            first = error.errors(include_url=False)[0]
            where = ".".join(str(part) for part in first["loc"])
            raise IntegrityError(
                f"{path} is no sound record ({where}: {first['msg'].lower()}); calibrate again"
            ) from None
        if digest != _digest(provenance, arrays):
            raise IntegrityError(f"{path} is damaged: its checksum is another; calibrate again")
        wanted = getattr(model, "identity", model)
        if isinstance(model, str) and not _IDENTITY.fullmatch(model):
            raise UsageError("model", "a LoadedModel, or an identity of 64 hexadecimal digits", repr(model))
        if wanted is not None and wanted != provenance.identity:
            expected = f"one of {getattr(model, 'name', 'the model')} ({wanted[:12]})"
            got = f"one of {provenance.model} ({provenance.identity[:12]})"
            raise UsageError(f"record {path}", expected, got, "calibrate this model: kvarto calibrate MODEL -o RECORD")
        layers: list[dict[str, Array]] = [{} for _ in range(count)]
        for name, array in arrays.items():
            _, number, statistic = name.split(".")
            layers[int(number)][statistic] = array
        return cls(provenance, tuple(layers))

    def _flat(self) -> dict[str, Array]:
        return {
            f"layers.{i}.{name}": np.ascontiguousarray(array)
            for i, layer in enumerate(self.layers)
            for name, array in layer.items()
        }


def _digest(provenance: Provenance, arrays: Mapping[str, Array]) -> str:
    digest = hashlib.sha256(json.dumps(provenance.model_dump(exclude={"date"}), sort_keys=True).encode())
    for name in sorted(arrays):
        digest.update(f"{name} {arrays[name].shape}\n".encode() + np.ascontiguousarray(arrays[name]).tobytes())
    return digest.hexdigest()


def _read(path: Path) -> tuple[dict[str, Any], dict[str, Array]]:
    """Metadata and arrays, of which only the structure is checked."""
    if not path.is_file():
        raise UsageError("record", "an existing file", path, "kvarto calibrate MODEL -o RECORD writes one")
    if path.stat().st_size > _MOST_BYTES:
        raise UsageError(f"record {path}", f"at most {_MOST_BYTES} bytes", path.stat().st_size)
    try:
        metadata, arrays = unpack(path.read_bytes())
        head = json.loads(metadata[_KEY]) if _KEY in metadata else None
    except OSError as error:
        raise UsageError("record", "a file that can be read", f"{path} ({error.strerror})") from error
    except (ValueError, RecursionError) as error:
        reason = " ".join(str(error).split())[:200]
        raise IntegrityError(f"{path} is cut off, or no record ({reason}); calibrate again") from error
    if head is None:
        raise IntegrityError(f"{path} is a safetensors file, but no record of kvarto; calibrate again")
    if not isinstance(head, dict) or head.pop("version", None) != VERSION:
        raise IntegrityError(f"{path} is a record of another version of kvarto; calibrate again")
    count = head.get("layers")
    names = [name.split(".") for name in arrays]
    sound = type(count) is int and all(
        len(each) == 3 and each[0] == "layers" and each[1].isdecimal() and int(each[1]) < count for each in names
    )
    if not sound or "sha256" not in head:
        raise IntegrityError(f"{path} is no sound record; calibrate again")
    return head, arrays
