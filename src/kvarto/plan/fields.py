"""A config as families read it: numbers by name, checked, and a refusal that says what is missing. Nothing is guessed."""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from typing import Any, TypeVar

from kvarto.errors import Unsupported, UsageError

_MOST = 1 << 31
_NOTHING = object()
_T = TypeVar("_T")


class Fields:
    """The text part of a model's config. `name` is for messages."""

    def __init__(self, name: str, data: Mapping[str, Any]) -> None:
        self.name, self.data = name, data

    @property
    def family(self) -> str:
        """The `model_type`, lower case; "" if there is none."""
        said = self.data.get("model_type")
        return said.lower() if isinstance(said, str) else ""

    def part(self, key: str) -> Fields:
        """A table within the config. Raises Unsupported if it is not there."""
        inner = self.data.get(key)
        if not isinstance(inner, Mapping):
            raise self.missing(key)
        return Fields(f"{self.name}: {key}", {str(name): value for name, value in inner.items()})

    def missing(self, *keys: str) -> Unsupported:
        """The refusal for want of one of `keys`."""
        family = f" of a {self.family}" if self.family else ""
        return Unsupported(
            f"{self.name}: the config{family} lacks {' or '.join(keys)}; give it there, nothing is guessed"
        )

    def has(self, key: str) -> bool:
        """There, and not null."""
        return self.data.get(key) is not None

    def whole(self, *keys: str, default: Any = _NOTHING, least: int = 1) -> int:
        """The whole number under the first of `keys` that is there. Raises Unsupported if none is, UsageError if it is no such number."""
        for key in keys:
            if self.has(key):
                value = self.data[key]
                if isinstance(value, float) and value.is_integer():
                    value = int(value)
                if not isinstance(value, int) or isinstance(value, bool) or not least <= value <= _MOST:
                    raise UsageError(f"{self.name}: {key}", f"a whole number from {least} on", repr(value)[:60])
                return value
        if default is _NOTHING:
            raise self.missing(*keys)
        return int(default)

    def flag(self, key: str, default: bool = False) -> bool:
        """A truth value."""
        value = self.data.get(key)
        if value is None:
            return default
        if not isinstance(value, bool):
            raise UsageError(f"{self.name}: {key}", "true or false", repr(value)[:60])
        return value

    def items(self, key: str, count: int | None = None) -> list[Any] | None:
        """A list, None if there is none; of `count` items (more are cut off: those of extra heads for speculation)."""
        value = self.data.get(key)
        if value is None:
            return None
        if not isinstance(value, Sequence) or isinstance(value, str):
            raise UsageError(f"{self.name}: {key}", "a list", repr(value)[:60])
        if count is not None and len(value) < count:
            raise UsageError(f"{self.name}: {key}", f"an entry for each of the {count} layers", f"{len(value)} entries")
        return list(value if count is None else value[:count])

    def words(self, key: str, count: int | None = None) -> list[str] | None:
        """A list of text."""
        return self._all(str, "text in each entry", key, count)

    def wholes(self, key: str, count: int | None = None) -> list[int] | None:
        """A list of whole numbers from 0 on."""
        values = self._all(int, "whole numbers from 0 on", key, count)
        if values is not None and any(value < 0 for value in values):
            raise UsageError(f"{self.name}: {key}", "whole numbers from 0 on", repr(values)[:60])
        return values

    def _all(self, kind: type[_T], expected: str, key: str, count: int | None) -> list[_T] | None:
        values = self.items(key, count)
        if values is not None and any(not isinstance(value, kind) or isinstance(value, bool) for value in values):
            raise UsageError(f"{self.name}: {key}", expected, repr(values)[:60])
        return values

    def switches(self, key: str, count: int) -> list[bool] | None:
        """A list of zeros and ones."""
        values = self.items(key, count)
        if values is not None and any(value not in (0, 1) for value in values):
            raise UsageError(f"{self.name}: {key}", "zeros and ones", repr(values)[:60])
        return None if values is None else [bool(value) for value in values]

    # ---- what nearly all families have -----------------------------------------------------------------------------

    @property
    def layers(self) -> int:
        """L."""
        count = self.whole("num_hidden_layers", "n_layer", "n_layers", "num_layers")
        if count > 10_000:
            raise UsageError(f"{self.name}: num_hidden_layers", "at most 10,000", count)
        return count

    @property
    def hidden(self) -> int:
        """Width of the residual stream."""
        return self.whole("hidden_size", "n_embd", "d_model")

    @property
    def query_heads(self) -> int:
        """Hq."""
        return self.whole("num_attention_heads", "n_head", "n_heads")

    @property
    def kv_heads(self) -> int:
        """Hkv; as many as query heads where the config knows no other number."""
        return self.whole(
            "num_key_value_heads", "num_kv_heads", "n_head_kv", "multi_query_group_num", default=self.query_heads
        )

    @property
    def head_dim(self) -> int:
        """D, by itself or of the width."""
        if self.has("head_dim"):
            return self.whole("head_dim")
        if self.hidden % self.query_heads:
            raise UsageError(
                f"{self.name}: hidden_size", f"a multiple of the {self.query_heads} query heads", self.hidden
            )
        return self.hidden // self.query_heads

    @property
    def max_tokens(self) -> int | None:
        """Positions, if the config says."""
        keys = ("max_position_embeddings", "n_positions", "seq_length", "max_seq_len", "max_sequence_length", "n_ctx")
        return self.whole(*keys, default=0) or None
