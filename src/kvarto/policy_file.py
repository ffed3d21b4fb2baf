"""A policy as a file: a format for each layer, and where that comes from. Plain data: what the formats mean, formats.py knows. No torch.

    {
      "kvarto_policy": 1,
      "name": "smollm2-3.25",
      "layers": ["int3", "int8/int4+sink64", {"format": "fp8-head", "k_scale": [0.11, 0.2], "v_scale": [0.01, 0.02]}],
      "record": {"path": "smollm2.record", "sha256": "9f1c..."},
      "provenance": {"model": "smollm2-135m-instruct", "identity": "77ab...", "budget_bits": 3.25}
    }

or the same as TOML. `layers` has an entry for each layer that caches keys and values: a format as text, or a table that adds scales to an fp8
codec, one for the layer or one for each KV head, or constants to a kvquant codec (`kvarto calibrate --format` writes those). All else says where the
policy comes from; only `kvarto_policy` and `layers` must be there.
A policy is known by its name and the SHA-256 of its file, so two files are never taken for each other.
"""

from __future__ import annotations

import hashlib
import json
import re
import tomllib
from dataclasses import dataclass
from pathlib import Path
from typing import Annotated, Any, Literal

from pydantic import BaseModel, BeforeValidator, ConfigDict, Field, ValidationError

from kvarto.errors import UsageError
from kvarto.files import write_whole

_MOST_BYTES = 16 << 20
_NAME = r"[A-Za-z0-9][A-Za-z0-9._-]{0,63}"
Scales = Annotated[tuple[Annotated[float, Field(gt=0, allow_inf_nan=False)], ...], Field(min_length=1, strict=False)]


class _Table(BaseModel):
    """Strict types, unknown keys refused."""

    model_config = ConfigDict(strict=True, extra="forbid", frozen=True)


Numbers = Annotated[tuple[Annotated[float, Field(allow_inf_nan=False)], ...], Field(strict=False)]


class ConstantsEntry(_Table):
    """What a kvquant codec knows of a side of a layer (codecs/kvquant.py): `zero` and `scale` have a row for each KV head."""

    levels: Numbers
    thresholds: Numbers
    zero: Annotated[tuple[Numbers, ...], Field(strict=False)] = ()
    scale: Annotated[tuple[Numbers, ...], Field(strict=False)] = ()
    angles: Numbers = ()


class LayerEntry(_Table):
    """The format of one layer, as text; `k_scale` and `v_scale` are those of an fp8 codec, `k_constants` and `v_constants` of a kvquant codec."""

    format: str
    k_scale: Scales | None = None
    v_scale: Scales | None = None
    k_constants: ConstantsEntry | None = None
    v_constants: ConstantsEntry | None = None


Layer = Annotated[LayerEntry, BeforeValidator(lambda value: {"format": value} if isinstance(value, str) else value)]


class RecordEntry(_Table):
    """The calibration record that a policy was made from: where it lay, and the SHA-256 of its file."""

    path: str
    sha256: str = Field(pattern=r"^[0-9a-f]{64}$")


class PolicyFile(_Table):
    """What stands in the file. `provenance` may hold anything."""

    kvarto_policy: Literal[1] = 1
    name: str = Field(default="", pattern=rf"^({_NAME})?$")
    layers: tuple[Layer, ...] = Field(min_length=1, max_length=4096, strict=False)
    record: RecordEntry | None = None
    provenance: dict[str, Any] = {}

    def to_json(self) -> str:
        """As it is written: a layer a line."""
        said = self.model_dump(mode="json", exclude_none=True)
        layers = (entry["format"] if len(entry) == 1 else entry for entry in said.pop("layers"))
        parts = [f"{json.dumps(key)}: {json.dumps(value)}" for key, value in said.items() if value]
        parts.append('"layers": [\n    ' + ",\n    ".join(map(json.dumps, layers)) + "\n  ]")
        return "{\n  " + ",\n  ".join(parts) + "\n}\n"


@dataclass(frozen=True)
class ReadPolicy:
    """A file that was read: its content, its name (of the file, where the content has none), and the SHA-256 of its bytes."""

    content: PolicyFile
    name: str
    sha256: str
    path: Path


def read_policy_file(text: str) -> ReadPolicy:
    """The policy file of this path. Raises UsageError with what is wrong."""
    path = Path(text.strip()).expanduser()
    data = _read(path)
    try:
        raw = json.loads(data) if path.suffix.lower() == ".json" else tomllib.loads(data.decode())
    except (ValueError, RecursionError) as error:
        reason = " ".join(str(error).split())
        raise UsageError(f"policy {path}", f"{path.suffix[1:].upper()} text", reason, "write it anew") from None
    if not isinstance(raw, dict) or "kvarto_policy" not in raw:
        remedy = "kvarto calibrate MODEL --budget-bits 3.25 -o policy.json writes one"
        raise UsageError(f"policy {path}", 'a policy file, which says "kvarto_policy": 1', "none", remedy)
    try:
        content = PolicyFile.model_validate(raw)
    except ValidationError as error:
        first = error.errors(include_url=False)[0]
        where = ".".join(str(part) for part in first["loc"])
        raise UsageError(f"policy {path}: {where}", first["msg"].lower(), f"{first['input']!r:.100}") from None
    name = content.name or re.sub(r"[^A-Za-z0-9._-]+", "-", path.stem).strip("-._")[:64] or "policy"
    return ReadPolicy(content, name, hashlib.sha256(data).hexdigest(), path.absolute())


def write_policy_file(path: Path, content: PolicyFile) -> None:
    """As JSON. Raises UsageError if the path cannot be written, or does not say that it is JSON."""
    if path.suffix.lower() != ".json":
        raise UsageError("policy file", "a name that ends in .json", path)
    write_whole(path, content.to_json().encode())


def _read(path: Path) -> bytes:
    if not path.is_file():
        raise UsageError("policy", "an existing .json or .toml file", path)
    try:
        with path.open("rb") as file:
            data = file.read(_MOST_BYTES + 1)
    except OSError as error:
        raise UsageError("policy", "a file that can be read", f"{path} ({error.strerror})") from error
    if len(data) > _MOST_BYTES:
        raise UsageError(f"policy {path}", f"at most {_MOST_BYTES} bytes", "more")
    return data
