"""What another KV format would change on this server: the planner's bytes of each format, on the model of a config or on a head of D numbers.

Pool tokens grow as bytes shrink. A decode step of which KV is the share s becomes at most 1 / (1 - s + s / r) times as fast at r times fewer bytes:
an upper bound, because a kernel that unpacks reaches less of the memory's bandwidth.
"""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass

from kvarto.codecs import registry as codecs
from kvarto.diagnose.measure import live_tokens, mean_prompt_tokens
from kvarto.diagnose.signals import Engine, Gauge
from kvarto.diagnose.window import Window
from kvarto.errors import UsageError
from kvarto.formats import parse_policy
from kvarto.plan.cached import CachedModel
from kvarto.plan.engines import bits_per_number, engine_formats, find_format, plain_bytes
from kvarto.plan.ours import ENGINE as OURS
from kvarto.plan.ours import OwnFormat
from kvarto.plan.written import KvFormat, bytes_of

PLAIN_BITS = 16.0
_OFFERED = ("fp8", "int8", "int4", "int3", "int2")
"""Of ours; a name of any other codec or policy is known too."""
_NOTICED = 1.01
"""Times smaller: below that nothing changes."""


@dataclass(frozen=True)
class Change:
    """What one format would change. None: not known here. `smaller`: the present bytes over its bytes."""

    name: str
    bits_per_number: float | None
    smaller: float
    pool_tokens: float | None
    requests: float | None
    faster_at_most: float | None
    note: str


def known_format(engine: Engine, name: str, page_tokens: int | None = None) -> KvFormat | None:
    """The planner's format of the name that an engine gives it, in its own pages or others; None if it has none such."""
    try:
        if engine.stores_as == OURS:
            return OwnFormat(parse_policy(name.strip()))
        return find_format(f"{engine.stores_as}:{name.strip()}", page_tokens)
    except UsageError:
        return None


def stored_bits(kv: KvFormat, model: CachedModel) -> float | None:
    """Bits that a number of K and V costs, metadata included; None where the format cannot keep the model, or nothing grows."""
    return None if kv.refuses(model) else bits_per_number(kv, model)


def token_bytes(window: Window, kv: KvFormat, model: CachedModel) -> float | None:
    """Bytes that a decode step reads for each live token, at the context that running sequences have; None where a format cannot keep the model."""
    if kv.refuses(model):
        return None
    held, live, running = bytes_of(kv, model), live_tokens(window), window.gauge(Gauge.RUNNING)
    if live is None or running is None or live < running.mean or not running.mean:
        return float(held.growth)
    context = round(live / running.mean)
    return float(held.read(context) / context)


def changes(
    window: Window, present: KvFormat | None, now_bits: float, model: CachedModel, kv_share: float | None, pool_tokens: float | None = None
) -> list[Change]:  # fmt: skip
    """For each format of the engine that is smaller than the present one, of `now_bits` a number, 16 if that is not known.

    `kv_share` of a decode step's bytes; `pool_tokens` where the page tells none.
    """
    told, mean = window.gauge(Gauge.POOL_TOKENS), mean_prompt_tokens(window)
    pool = pool_tokens if told is None else told.values[-1]
    found = []
    for kv in _offered(window, model):
        bits = bits_per_number(kv, model)
        smaller = _smaller(present, kv, model, mean) or (now_bits / bits if bits else 1.0)
        if smaller <= _NOTICED:
            continue
        tokens = None if pool is None else pool * smaller
        requests = None if tokens is None or not mean else tokens / mean
        faster = None if kv_share is None else 1 / (1 - kv_share + kv_share / smaller)
        found.append(Change(kv.name.split(":")[-1], bits, smaller, tokens, requests, faster, _note(kv, model)))
    return sorted(found, key=lambda change: change.smaller)


def page_tokens(window: Window) -> int | None:
    """Tokens of a page, as the engine tells."""
    told = window.gauge(Gauge.BLOCK_TOKENS)
    return int(told.values[-1]) if told is not None and told.values[-1] >= 1 else None


def _offered(window: Window, model: CachedModel) -> Sequence[KvFormat]:
    """The formats of the engine that can keep the model, in pages of its size."""
    engine = window.engine
    if engine.stores_as == OURS:
        formats: list[KvFormat] = [OwnFormat(parse_policy(name)) for name in _OFFERED if name in codecs]
    else:
        formats = [kv for kv in engine_formats(page_tokens(window)) if kv.engine == engine.stores_as]
    return [kv for kv in formats if not kv.refuses(model)]


def _smaller(present: KvFormat | None, kv: KvFormat, model: CachedModel, tokens: float | None) -> float | None:
    """Of sequences with windows or states, which shrink less than their bits or not at all: by their bytes. None for a model without."""
    if present is None or tokens is None or present.refuses(model) or not plain_bytes(model).constant:
        return None
    before, after = (bytes_of(each, model).sequence(max(1, round(tokens))) for each in (present, kv))
    return before / after


def _note(kv: KvFormat, model: CachedModel) -> str:
    ends = kv.boundary_layers
    uncounted = (
        f"the first and the last {ends} layers stay in 16 bits, counted with --config"
        if ends and len(model.layers) == 1
        else ""
    )
    return "; ".join(filter(None, (kv.needs, uncounted)))
