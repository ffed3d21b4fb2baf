"""What a process really grows by when it holds such a cache: measured in fresh processes, beside the bytes that the cache counts.

`measure_growth` starts `python -m kvarto.study.memory`, which imports everything once and forks for each cache, so that none inherits what
another left in the allocator. Only caches that have a name can be asked for: formats as text, or None for transformers' own cache.
"""

from __future__ import annotations

import contextlib
import ctypes
import dataclasses
import gc
import json
import os
import subprocess
import sys
from collections.abc import Callable
from dataclasses import dataclass
from functools import partial
from pathlib import Path
from typing import Any

import psutil
import torch
from transformers import AutoConfig, DynamicCache

from kvarto.attention import LayerSpec, PagedKV
from kvarto.formats import parse_policy
from kvarto.layout import Geometry
from kvarto.study.filling import fill_own, fill_pages

_WARM_TOKENS = 256
_TIMEOUT_SECONDS = 600


@dataclass(frozen=True)
class Order:
    """Which caches to fill: of one sequence of `tokens` tokens, for a model in `folder` whose layers cache `specs` in `dtype` ("float32")."""

    folder: Path
    specs: tuple[LayerSpec | None, ...]
    dtype: str
    tokens: int
    formats: tuple[str | None, ...]


def measure_growth(order: Order) -> list[int | None]:
    """Bytes of resident memory that each cache adds to a process; None where it cannot be measured."""
    if not hasattr(os, "fork"):
        return [None] * len(order.formats)
    environment = {**os.environ, "OMP_NUM_THREADS": "1", "TOKENIZERS_PARALLELISM": "false"}
    message = json.dumps(dataclasses.asdict(order) | {"folder": str(order.folder)})
    try:
        done = subprocess.run(
            [sys.executable, "-m", "kvarto.study.memory"], input=message, env=environment,
            capture_output=True, text=True, check=True, timeout=_TIMEOUT_SECONDS,
        )  # fmt: skip
    except (OSError, subprocess.SubprocessError):
        return [None] * len(order.formats)
    grown: list[int | None] = json.loads(done.stdout)
    return grown


def _main() -> None:
    """Read an order from standard input, write a list of bytes to standard output."""
    torch.set_num_threads(1)
    order = _read(json.load(sys.stdin))
    config = AutoConfig.from_pretrained(order.folder, local_files_only=True).get_text_config(decoder=True)

    def filled(text: str | None, tokens: int) -> Any:
        dtype = getattr(torch, order.dtype)
        if text is None:
            cache = DynamicCache(config=config)
            fill_own(cache, order.specs, tokens, dtype)
            return cache
        kv = PagedKV([spec for spec in order.specs if spec is not None], parse_policy(text), dtype=dtype)
        fill_pages(kv, tokens)
        return kv

    json.dump([_in_child(partial(_growth, filled, text, order.tokens)) for text in order.formats], sys.stdout)


def _read(message: dict[str, Any]) -> Order:
    specs = [spec and LayerSpec(Geometry(**spec["geometry"]), spec["sliding_tokens"]) for spec in message["specs"]]
    return Order(
        folder=Path(message["folder"]), specs=tuple(specs), dtype=message["dtype"], tokens=message["tokens"],
        formats=tuple(message["formats"]),
    )  # fmt: skip


def _growth(filled: Callable[[str | None, int], Any], text: str | None, tokens: int) -> int:
    """Resident bytes before and after, of a warm process without garbage."""
    filled(text, _WARM_TOKENS)
    before = _resident_bytes()
    cache = filled(text, tokens)
    after = _resident_bytes()
    del cache
    return after - before


def _resident_bytes() -> int:
    gc.collect()
    # Another C library has no malloc_trim; what it keeps back is then counted as grown.
    with contextlib.suppress(AttributeError, OSError):
        ctypes.CDLL(None).malloc_trim(0)
    return int(psutil.Process().memory_info().rss)


def _in_child(measure: Callable[[], int]) -> int | None:
    """The result of `measure` in a fork of this process, or None if the fork dies."""
    reader, writer = os.pipe()
    child = os.fork()
    if child == 0:
        os.close(reader)
        os.write(writer, str(measure()).encode())
        os._exit(0)
    os.close(writer)
    with os.fdopen(reader, "rb") as pipe:
        answer = pipe.read()
    os.waitpid(child, 0)
    return int(answer) if answer else None


if __name__ == "__main__":
    _main()
