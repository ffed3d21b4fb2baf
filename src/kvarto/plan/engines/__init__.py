"""Other engines' KV formats: one data file for each engine, found by a look through the folder. What the fields mean stands in vllm.toml."""

from __future__ import annotations

import tomllib
from dataclasses import dataclass, replace
from fractions import Fraction
from functools import cache
from importlib.resources import files
from typing import Any

from kvarto.errors import UnknownName
from kvarto.plan.cached import CachedModel, IndexKey, KeyValue, Latent, Part, State
from kvarto.plan.ours import read_entries
from kvarto.plan.written import Bytes, KvFormat, Writer, bytes_of


@dataclass(frozen=True)
class Row:
    """Bytes of a row of numbers: blocks of `block` numbers in `block_bytes`, and `extra_bytes`. `rope_bytes`: rotary numbers apart, raw."""

    block: int
    block_bytes: int
    extra_bytes: int = 0
    rope_bytes: int = 0

    def nbytes(self, dim: int, rope_dim: int = 0) -> int:
        """Of a row of `dim` numbers, of which the last `rope_dim` are rotary."""
        apart = rope_dim if self.rope_bytes else 0
        return -(-(dim - apart) // self.block) * self.block_bytes + self.extra_bytes + apart * self.rope_bytes


@dataclass(frozen=True)
class Engine:
    """What all formats of an engine share; see vllm.toml."""

    name: str
    title: str
    version: str
    checked: str
    page_tokens: int
    windows: str
    memory_share: float
    index_key: Row
    window_extra_tokens: int = 0
    note: str = ""


@dataclass(frozen=True)
class RowWriter(Writer):
    """Rows of an engine, in pages of its size."""

    k: Row | None
    v: Row | None
    latent: Row | None
    index: Row
    slot_multiple: int
    page_tokens: int
    window_extra_tokens: int
    windows_kept: bool

    def row_nbytes(self, part: KeyValue | Latent | IndexKey) -> int:
        """Bytes of one entry."""
        if isinstance(part, IndexKey):
            return self.index.nbytes(part.dim)
        if isinstance(part, Latent):
            assert self.latent, "refused models are not counted"
            return self.latent.nbytes(part.dim, part.rope_dim)
        assert self.k, "refused models are not counted"
        assert self.v, "refused models are not counted"
        slot = self.k.nbytes(part.k_dim) + self.v.nbytes(part.v_dim)
        return part.heads * -(-slot // self.slot_multiple) * self.slot_multiple

    def nbytes(self, part: Part, tokens: int) -> int:
        """Whole pages; of a window those that its tokens touch."""
        if isinstance(part, State):
            return part.nbytes
        ratio = 1 if isinstance(part, KeyValue) else part.ratio
        return -(-self._page_tokens_held(part, tokens) // ratio) * self.row_nbytes(part)

    def growth(self, part: Part) -> Fraction:
        """A row for each token, or each `ratio` tokens."""
        if isinstance(part, State) or (self.windows_kept and _window(part) is not None):
            return Fraction(0)
        return Fraction(self.row_nbytes(part), 1 if isinstance(part, KeyValue) else part.ratio)

    def read_nbytes(self, part: Part, tokens: int) -> Fraction:
        """The rows that attention reads."""
        if isinstance(part, State):
            return Fraction(2 * part.nbytes)
        return Fraction(read_entries(part, tokens) * self.row_nbytes(part))

    def _page_tokens_held(self, part: KeyValue | Latent | IndexKey, tokens: int) -> int:
        S, window = self.page_tokens, _window(part)
        pages = -(-tokens // S)
        if window is not None and self.windows_kept:
            if self.window_extra_tokens:
                pages = min(pages, -(-(window + self.window_extra_tokens) // S))
            elif isinstance(part, KeyValue) and part.chunked:
                pages = min(pages, -(-window // S))
            else:
                pages -= max(0, tokens - window) // S
        return pages * S


def _window(part: Part) -> int | None:
    return part.window_tokens if isinstance(part, KeyValue | Latent) else None


class EngineFormat(KvFormat):
    """A format of a data file; `page_tokens` in place of the engine's own."""

    def __init__(self, engine: Engine, data: dict[str, Any], page_tokens: int | None) -> None:
        self.of, self.engine, self.name = engine, engine.name, f"{engine.name}:{data['name']}"
        self.page_tokens = page_tokens or engine.page_tokens
        self.windows_kept = engine.windows == "kept"
        rows = {key: Row(**data[key]) if key in data else None for key in ("k", "v", "latent")}
        self.writer = RowWriter(
            rows["k"], rows["v"] or rows["k"], rows["latent"], engine.index_key, data.get("slot_multiple", 1),
            self.page_tokens, engine.window_extra_tokens, self.windows_kept,
        )  # fmt: skip
        self.is_raw = rows["k"] == Row(1, 2)
        self._needs_index = data.get("needs_index", False)
        self.needs, self.source, self.flag = data.get("needs", ""), data["source"], data["flag"]
        self.measured = tuple(data.get("measured", ()))
        self.aliases = tuple(f"{engine.name}:{alias}" for alias in data.get("aliases", ()))
        self.boundary_layers = data.get("boundary_layers", 0)
        self._takes_windows, self._power_of_two = data.get("windows", True), data.get("power_of_two", False)
        self._sm_least, self._only_sm = data.get("sm_least", 0), tuple(data.get("sm", ()))
        self._vendor: str = data.get("vendor", "")

    def refuses(self, model: CachedModel) -> str | None:
        """By the kinds of parts that there are."""
        if self._needs_index and not any(isinstance(part, IndexKey) for part in model.parts):
            return "only for MLA with sparse attention"
        for part in model.parts:
            if isinstance(part, KeyValue):
                if self.writer.k is None:
                    return "only for MLA"
                if part.window_tokens is not None and not self._takes_windows:
                    return "no sliding windows"
                if self._power_of_two and (part.k_dim & (part.k_dim - 1) or part.v_dim & (part.v_dim - 1)):
                    return f"needs a power of two as head dimension, which {part.k_dim}/{part.v_dim} is not"
                if part.k_dim % self.writer.k.block:
                    return f"needs a head dimension in blocks of {self.writer.k.block}, which {part.k_dim} is not"
            elif isinstance(part, Latent) and self.writer.latent is None:
                return "not for MLA"
        return None

    def writers(self, model: CachedModel) -> list[Writer]:
        """All layers alike, but those at both ends of dense models where the engine keeps them raw."""
        raw = Row(1, 2)
        ends = replace(self.writer, k=raw, v=raw, latent=raw, slot_multiple=1)
        count = len(model.layers)
        kept = 0 if model.has_states else min(self.boundary_layers, count // 2)
        return [ends if i < kept or i >= count - kept else self.writer for i in range(count)]

    def refuses_gpu(self, sm: int) -> str | None:
        """By compute capability."""
        if self._vendor and sm:
            return f"needs a GPU of {self._vendor}"
        if self._only_sm and sm not in self._only_sm:
            return f"needs SM {', '.join(map(str, self._only_sm))}, this is {sm}"
        return f"needs SM {self._sm_least} or later, this is {sm}" if sm < self._sm_least else None


@cache
def engines() -> dict[str, Engine]:
    """All engines by name."""
    return {made.name: made for made, _ in _read()}


def engine_formats(page_tokens: int | None = None) -> list[EngineFormat]:
    """All formats of all engines, those of an engine together; `page_tokens` in place of each engine's own."""
    return [EngineFormat(engine, data, page_tokens) for engine, formats in _read() for data in formats]


def find_format(name: str, page_tokens: int | None = None) -> EngineFormat:
    """A format by engine and name, also by another name that the engine takes: vllm:fp8_e4m3, vllm:fp8, vllm:auto. Raises UnknownName."""
    formats = engine_formats(page_tokens)
    found = next((kv for kv in formats if name.lower() in (kv.name, *kv.aliases)), None)
    if found is None:
        raise UnknownName("format", name, [kv.name for kv in formats])
    return found


@cache
def _read() -> list[tuple[Engine, list[dict[str, Any]]]]:
    folder = files("kvarto.plan.engines")
    read = []
    for file in sorted(folder.iterdir(), key=lambda file: file.name):
        if file.name.endswith(".toml"):
            data = tomllib.loads(file.read_text())
            formats = data.pop("formats")
            read.append((Engine(**data | {"index_key": Row(**data["index_key"])}), formats))
    return read


def plain_bytes(model: CachedModel) -> Bytes:
    """A model in 16 bits, without pages, metadata or alignment: what textbooks count."""
    raw = Row(1, 2)
    writer = RowWriter(raw, raw, raw, raw, 1, 1, 0, windows_kept=True)
    return Bytes(tuple((writer, part, count) for part, count in model.parts.items()))


def bits_per_number(kv: KvFormat, model: CachedModel) -> float | None:
    """Bits that a cached number costs at long context, metadata included; None where nothing grows."""
    plain = plain_bytes(model).growth
    return float(16 * bytes_of(kv, model).growth / plain) if plain else None
