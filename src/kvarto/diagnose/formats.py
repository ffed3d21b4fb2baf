"""What another KV format would change on this server: simple arithmetic over bits per number, the engine's formats or ours.

Pool tokens grow as bits shrink. A decode step of which KV is the share s becomes at most 1 / (1 - s + s / r) times as fast at r times fewer bits:
an upper bound, because a kernel that unpacks reaches less of the memory's bandwidth.
"""

from __future__ import annotations

from dataclasses import dataclass

from kvarto.codecs import registry as codecs
from kvarto.diagnose.measure import mean_prompt_tokens
from kvarto.diagnose.signals import Engine, Gauge
from kvarto.diagnose.window import Window
from kvarto.layout import PAGE_TOKENS, Side

PLAIN_BITS = 16.0
_OURS = ("fp8", "int8", "int4", "int3", "int2")


@dataclass(frozen=True)
class Change:
    """What one format would change. None: not known here. `smaller`: the present bits over its bits."""

    name: str
    bits_per_number: float
    smaller: float
    pool_tokens: float | None
    requests: float | None
    faster_at_most: float | None
    note: str


def stored_bits(engine: Engine, name: str | None, dim: int) -> float | None:
    """Bits per number of a format of an engine; 16 for what it calls plain; None if the name is none that we know."""
    if name is None:
        return None
    name = name.strip().lower()
    if name in engine.plain:
        return 32.0 if name in ("f32", "fp32", "float32") else PLAIN_BITS
    if engine.name == "kvarto":
        head = name.split("+")[0]
        sides = head.split("/") * 2 if "/" not in head else head.split("/")
        if any(side not in codecs for side in sides[:2]):
            return None
        return sum(_codec_bits(codec, dim)[side] for side, codec in enumerate(sides[:2])) / 2
    return next((each.bits_per_number(dim) for each in engine.formats if each.name == name), None)


def _codec_bits(name: str, dim: int) -> tuple[float, float]:
    """Of K and of V."""
    k, v = (codecs[name].layout(side, PAGE_TOKENS, dim).bits_per_element for side in Side)
    return k, v


def changes(
    window: Window, now: float | None, dim: int, kv_share: float | None, pool_tokens: float | None = None
) -> list[Change]:
    """For each format of the engine that is smaller than the present one. `now`: its bits per number, None if unknown: then 16 are assumed.

    `dim` = D, the head dimension, which metadata are divided by; `kv_share` of a decode step's bytes; `pool_tokens` where the page tells none.
    """
    engine, now = window.engine, now or PLAIN_BITS
    told, mean = window.gauge(Gauge.POOL_TOKENS), mean_prompt_tokens(window)
    pool = pool_tokens if told is None else told.values[-1]
    found = []
    for name, bits, note in _offered(engine, dim):
        smaller = now / bits
        if smaller <= 1.01:
            continue
        tokens = None if pool is None else pool * smaller
        requests = None if tokens is None or not mean else tokens / mean
        faster = None if kv_share is None else 1 / (1 - kv_share + kv_share / smaller)
        found.append(Change(name, bits, smaller, tokens, requests, faster, note))
    return sorted(found, key=lambda change: -change.bits_per_number)


def _offered(engine: Engine, dim: int) -> list[tuple[str, float, str]]:
    if engine.name != "kvarto":
        return [(each.name, each.bits_per_number(dim), each.note) for each in engine.formats if not each.alias]
    return [(name, sum(_codec_bits(name, dim)) / 2, "") for name in _OURS if name in codecs]
