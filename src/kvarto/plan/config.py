"""A model by its config.json: a file, a folder, a name of kvarto's catalog, or a hub id; as the caches of each layer. No torch."""

from __future__ import annotations

import contextlib
import json
import logging
import os
import re
import socket
import urllib.parse
import urllib.request
from collections.abc import Mapping
from dataclasses import dataclass
from pathlib import Path
from typing import Any

from kvarto.errors import BackendUnavailable, FetchError, UnknownName, Unsupported, UsageError
from kvarto.jit import require
from kvarto.models import catalog
from kvarto.models.fetch import find_fetched
from kvarto.plan.cached import CachedModel, KeyValue, Latent, Layer
from kvarto.plan.families import families
from kvarto.plan.fields import Fields

_MOST_BYTES = 8 << 20
_HUB_SECONDS = 5.0
_HUB_ID = re.compile(r"[A-Za-z0-9][\w.-]*/[\w.-]+")
_TEXT_PARTS = ("text_config", "llm_config", "language_config")
_FLAGS_HINT = "or describe it: --layers, --kv-heads, --head-dim (see kvarto plan --help)"


@dataclass(frozen=True)
class Config:
    """A config that was read: what it is called, its text part, the whole, and the folder with weights if there is one."""

    name: str
    fields: Fields
    whole: Mapping[str, Any]
    folder: Path | None = None


def read_config(model: str) -> Config:
    """Find and read the config of a model. Raises UnknownName, UsageError, Unsupported, BackendUnavailable or FetchError."""
    path, folder = _find(model)
    data = read_json(path, f"config {path}")
    if not isinstance(data, dict):
        raise UsageError(f"config {path}", "an object, as in config.json of a Hugging Face model", type(data).__name__)
    beside = path.with_name("hf_quant_config.json")  # where Model-Optimizer says it
    if "quantization_config" not in data and beside.is_file():
        said = read_json(beside, f"config {beside}")
        if isinstance(said, dict) and isinstance(said.get("quantization"), dict):
            data = {**data, "quantization_config": {"quant_method": "modelopt", **said["quantization"]}}
    return make_config(model, data, folder)


def make_config(name: str, data: Mapping[str, Any], folder: Path | None = None) -> Config:
    """The text part of a config: of one that also sees or hears, that is a table of its own, which takes `dtype` from the whole."""
    for key in _TEXT_PARTS:
        inner = data.get(key)
        if isinstance(inner, Mapping):
            shared = {
                key: data[key] for key in ("model_type", "torch_dtype", "dtype", "quantization_config") if key in data
            }
            return Config(name, Fields(name, {**shared, **inner}), data, folder)
    return Config(name, Fields(name, data), data, folder)


def cached_model(config: Config) -> CachedModel:
    """The caches of the model of a config. Raises Unsupported if nobody knows its architecture."""
    fields = config.fields
    if not fields.family:
        raise Unsupported(
            f"{config.name}: the config has no model_type, so its architecture is not known; {_FLAGS_HINT}"
        )
    if fields.family not in families:
        near = UnknownName("model_type", fields.family, families).remedy
        raise Unsupported(
            f"{config.name}: model_type {fields.family!r} is not known, and its cache is not guessed"
            + (f" ({near.rstrip('?')}?)" if near else "")
            + f"; {_FLAGS_HINT}"
        )
    family = families[fields.family]
    layers = family.read(fields)
    notes = [family.note] if family.note else []
    if config.fields.data is not config.whole and any(key in config.whole for key in _TEXT_PARTS):
        notes.append("the text part: towers for images or sound are not counted")
    return CachedModel(config.name, fields.family, layers, fields.query_heads, fields.max_tokens, tuple(notes))


@dataclass(frozen=True)
class Described:
    """A model by flags. `window_layers` of its layers slide over `window_tokens`; with `latent_dim` it is MLA."""

    layers: int
    kv_heads: int | None = None
    head_dim: int | None = None
    v_dim: int | None = None
    query_heads: int | None = None
    window_tokens: int | None = None
    window_layers: int | None = None
    latent_dim: int | None = None


def described_model(said: Described) -> CachedModel:
    """The caches of a model by flags. Raises UsageError for what is missing or makes no sense."""
    for flag, value in (("--layers", said.layers), ("--kv-heads", said.kv_heads), ("--head-dim", said.head_dim),
                        ("--v-dim", said.v_dim), ("--heads", said.query_heads), ("--window", said.window_tokens),
                        ("--latent-dim", said.latent_dim)):  # fmt: skip
        if value is not None and not 1 <= value <= 1 << 24:
            raise UsageError(flag, "a number from 1 on", value)
    if said.latent_dim is not None:
        layer: Layer = (Latent(said.latent_dim, 0),)
        return CachedModel("described by flags", "flags", (layer,) * said.layers, said.query_heads or 0)
    if said.kv_heads is None or said.head_dim is None:
        missing = "--kv-heads" if said.kv_heads is None else "--head-dim"
        raise UsageError(
            missing, "a number (a model by flags has --layers, --kv-heads and --head-dim, or --latent-dim)", "none"
        )
    full = KeyValue(said.kv_heads, said.head_dim, said.v_dim or said.head_dim)
    sliding = 0
    if said.window_tokens is not None:
        sliding = said.layers if said.window_layers is None else said.window_layers
    elif said.window_layers:
        raise UsageError("--window", "the window of those layers in tokens", "none")
    if not 0 <= sliding <= said.layers:
        raise UsageError("--window-layers", f"0 to {said.layers}", sliding)
    near = KeyValue(full.heads, full.k_dim, full.v_dim, said.window_tokens)
    layers: tuple[Layer, ...] = ((near,),) * sliding + ((full,),) * (said.layers - sliding)
    return CachedModel("described by flags", "flags", layers, said.query_heads or 0)


def read_json(path: Path, name: str, most_bytes: int = _MOST_BYTES) -> Any:
    """What stands in a JSON file of a user. Raises UsageError with one line."""
    try:
        with path.open("rb") as file:
            raw = file.read(most_bytes + 1)
    except OSError as error:
        raise UsageError(name, "a file that can be read", error.strerror or "an error") from error
    if len(raw) > most_bytes:
        raise UsageError(name, f"at most {most_bytes >> 20} MiB", "more")
    if not raw.strip():
        raise UsageError(name, "JSON", "an empty file")
    try:
        return json.loads(raw)
    except (ValueError, RecursionError) as error:
        what = "HTML" if raw.lstrip()[:1] == b"<" else " ".join(str(error).split())[:80]
        raise UsageError(name, "JSON", what) from None


def _find(model: str) -> tuple[Path, Path | None]:
    """The config's path, and the folder of the weights if they are there."""
    if model.lower() in catalog.CATALOG or model.lower() in catalog.ALIASES:
        entry = catalog.find(model)
        folder = find_fetched(entry)
        if folder is None:
            raise FetchError(
                f"model {entry.name}: expected it fetched, got nothing; run: kvarto models fetch {entry.name}"
            )
        return folder / "config.json", folder
    path = Path(model).expanduser()
    if path.is_file():
        return path, None
    if (path / "config.json").is_file():
        return path / "config.json", path
    if path.exists() or model.startswith((".", "/", "~")) or model.lower().endswith(".json"):
        raise UsageError("model", "a config.json, or a folder with one", model)
    if _HUB_ID.fullmatch(model):
        return _from_hub(model), None
    raise UnknownName(
        "model", model, [*catalog.CATALOG, *catalog.ALIASES, "a folder", "a config.json", "an owner/name of the hub"]
    )


def _from_hub(model: str) -> Path:
    """Download config.json alone, or take it from the hub's cache."""
    hub = require("huggingface_hub")
    log = logging.getLogger("huggingface_hub")
    level = log.level
    log.setLevel(logging.CRITICAL)  # it tells of each try; what went wrong is said below, once
    try:
        _reach_hub()
        return Path(hub.hf_hub_download(model, "config.json"))
    except Exception as error:  # noqa: BLE001 - the hub's client raises what its HTTP client raises
        with contextlib.suppress(Exception):
            return Path(hub.hf_hub_download(model, "config.json", local_files_only=True))
        reason = " ".join(str(error).split()).split(". ")[0][:160] or type(error).__name__
        if isinstance(error, ImportError):
            raise BackendUnavailable("huggingface_hub", reason, "run: pip install huggingface_hub") from None
        raise FetchError(
            f"model {model}: config.json could not be had from the hub ({reason}); give a local config.json"
        ) from None
    finally:
        log.setLevel(level)


def _reach_hub() -> None:
    """Raises OSError if there is no way to it: its client would try for half a minute. A proxy may know a way that we do not."""
    if urllib.request.getproxies():
        return
    place = urllib.parse.urlsplit(os.environ.get("HF_ENDPOINT", "https://huggingface.co"))
    port = place.port or (80 if place.scheme == "http" else 443)
    socket.create_connection((place.hostname or "", port), timeout=_HUB_SECONDS).close()
