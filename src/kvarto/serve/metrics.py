"""Metrics for Prometheus: what became of requests, and what the engine's books say when somebody looks."""

from __future__ import annotations

from collections.abc import Iterable, Iterator, Sequence
from dataclasses import dataclass
from itertools import accumulate, product

from prometheus_client import CollectorRegistry, Counter, Histogram, Info, generate_latest
from prometheus_client.core import CounterMetricFamily, GaugeMetricFamily, HistogramMetricFamily, Metric
from prometheus_client.registry import Collector

from kvarto.cache.tiers import Tiers
from kvarto.engine.engine import Engine
from kvarto.engine.probe import CONTEXT_NAMES, KL_BOUNDS_NATS, OUTCOMES, Probe

CONTENT_TYPE = "text/plain; version=0.0.4; charset=utf-8"
# Half a millisecond to 12 minutes, each bound sqrt(2) times the one before: a quantile read from them is off by less than a fifth.
_BOUNDS_SECONDS = tuple(round(0.0005 * 2 ** (i / 2), 6) for i in range(42))


@dataclass
class Times:
    """Of one request, in seconds of time.monotonic: when it arrived, was begun, and brought its first and its last token; how many came."""

    arrived: float
    began: float | None = None
    first: float | None = None
    last: float | None = None
    tokens: int = 0


class Metrics:
    """The registry of one server, and what it is told.

    A request with n choices counts n times, as the engine sees it, and so do its tokens.
    """

    def __init__(self, engine: Engine) -> None:
        self._registry = CollectorRegistry()
        self._registry.register(_EngineCollector(engine))
        self._requests = self._counter("requests", "Requests that ended, by how", ("kv_format", "outcome"))
        self._prompt = self._counter("prompt_tokens", "Tokens of prompts of requests that ended")
        self._cached = self._counter("cached_tokens", "Prompt tokens that the prefix cache had")
        self._generated = self._counter("generated_tokens", "Tokens generated for requests that ended")
        self._first = self._histogram("time_to_first_token_seconds", "From a request's arrival to its first token")
        self._gap = self._histogram("inter_token_latency_seconds", "Between two tokens of a request")
        self._whole = self._histogram("e2e_request_latency_seconds", "From a request's arrival to its last token")
        self._queue = self._histogram("request_queue_time_seconds", "From a request's arrival to its first step")
        self._prefill = self._histogram(
            "request_prefill_time_seconds", "From a request's first step to its first token"
        )
        self._decode = self._histogram("request_decode_time_seconds", "From a request's first token to its last one")
        self._each = self._histogram(
            "request_time_per_output_token_seconds", "Of a request's tokens but the first, on average"
        )
        self._step = self._histogram("step_seconds", "A step of the engine", "kind")
        self._computed = self._counter("computed_tokens", "Tokens that went through the model", ("kind",))
        engine.core.on_step.append(self.step)
        info = Info("kvarto_formats", "What serves each format", ["kv_format"], registry=self._registry)
        for offer in engine.offers:
            about = {"model": engine.loaded.name, "kernel": offer.kernel_names, "device": str(engine.core.device)}
            info.labels(offer.name).info(about)

    def refused(self, outcome: str, kv_format: str) -> None:
        """A request that never reached the engine; `kv_format` is "" if it is not known."""
        self._requests.labels(kv_format, outcome).inc()

    def token(self, times: Times, now: float, kv_format: str) -> None:
        """A request has one more token."""
        if times.last is None:
            times.first = now
            self._first.labels(kv_format).observe(now - times.arrived)
        else:
            self._gap.labels(kv_format).observe(now - times.last)
        times.last, times.tokens = now, times.tokens + 1

    def ended(self, times: Times, now: float, kv_format: str, outcome: str) -> None:
        """A request is over."""
        self._requests.labels(kv_format, outcome).inc()
        self._whole.labels(kv_format).observe(now - times.arrived)
        if times.began is not None:
            self._queue.labels(kv_format).observe(max(0.0, times.began - times.arrived))
        if times.first is None or times.last is None or times.began is None:
            return
        self._prefill.labels(kv_format).observe(max(0.0, times.first - times.began))
        self._decode.labels(kv_format).observe(times.last - times.first)
        if times.tokens > 1:
            self._each.labels(kv_format).observe((times.last - times.first) / (times.tokens - 1))

    def step(self, prefill_tokens: int, decode_tokens: int, seconds: float) -> None:
        """The engine's thread tells of a step."""
        kind = "mixed" if prefill_tokens and decode_tokens else "prefill" if prefill_tokens else "decode"
        self._step.labels(kind).observe(seconds)
        self._computed.labels("prefill").inc(prefill_tokens)
        self._computed.labels("decode").inc(decode_tokens)

    def tokens(self, kv_format: str, *, prompt: int, cached: int, generated: int) -> None:
        """Of a request that is over."""
        self._prompt.labels(kv_format).inc(prompt)
        self._cached.labels(kv_format).inc(cached)
        self._generated.labels(kv_format).inc(generated)

    def text(self) -> bytes:
        """The exposition."""
        return generate_latest(self._registry)

    def _counter(self, name: str, about: str, labels: Sequence[str] = ("kv_format",)) -> Counter:
        return Counter(f"kvarto_{name}", about, labels, registry=self._registry)

    def _histogram(self, name: str, about: str, label: str = "kv_format") -> Histogram:
        return Histogram(f"kvarto_{name}", about, [label], buckets=_BOUNDS_SECONDS, registry=self._registry)


class _EngineCollector(Collector):
    """Reads the engine's books when somebody looks, so the engine need not know of metrics."""

    def __init__(self, engine: Engine) -> None:
        self._engine, self._core, self._forms = engine, engine.core, _forms(engine)

    def collect(self) -> Iterator[Metric]:
        """All of it; the engine goes on meanwhile, so two numbers may be a step apart."""
        yield from self._pool()
        yield from self._blocks()
        yield from self._formats()
        scheduler = self._core.scheduler
        yield GaugeMetricFamily("kvarto_num_requests_running", "Requests that are computed", self._engine.running)
        yield GaugeMetricFamily("kvarto_num_requests_waiting", "Requests that wait", self._engine.waiting)
        yield CounterMetricFamily("kvarto_preemptions", "Requests sent back to wait", scheduler.preemptions)
        yield CounterMetricFamily("kvarto_steps", "Steps of the engine", self._core.steps)
        replays = self._core.graphs.replays
        yield CounterMetricFamily("kvarto_replayed_steps", "Those that were replayed as CUDA graphs", replays)
        if self._core.offload is not None:
            yield from _tiers(self._core.offload.tiers)
        if self._core.probe is not None:
            yield from _probe_families(self._core.probe)

    def _pool(self) -> Iterator[Metric]:
        prefixes, total = self._core.memory.prefixes, self._core.memory.arena.nbytes
        held, idle = max(0, prefixes.held_bytes), prefixes.idle_bytes
        yield GaugeMetricFamily("kvarto_pool_bytes", "Bytes for keys and values", total)
        yield GaugeMetricFamily("kvarto_pool_held_bytes", "Bytes that requests hold", held)
        yield GaugeMetricFamily("kvarto_pool_idle_bytes", "Bytes that only the prefix cache keeps", idle)
        yield GaugeMetricFamily("kvarto_pool_free_bytes", "Bytes that nothing is in", max(0, total - held - idle))
        yield GaugeMetricFamily("kvarto_kv_cache_usage_ratio", "Share of the pool that requests hold", held / total)
        yield CounterMetricFamily("kvarto_dropped_pieces", "Pieces the prefix cache dropped", prefixes.dropped)
        live, slots = self._core.live_tokens
        yield GaugeMetricFamily("kvarto_live_tokens", "Tokens of running requests that are in the cache", live)
        yield GaugeMetricFamily("kvarto_held_slots", "Tokens that their pages have room for", slots)
        wasted = 1 - live / slots if slots else 0.0
        yield GaugeMetricFamily("kvarto_fragmentation_ratio", "Share of these slots without a token", wasted)

    def _blocks(self) -> Iterator[Metric]:
        """A block is a page of all layers of a group."""
        memory = self._core.memory
        labels = ["form", "kv_format", "state"]
        blocks = GaugeMetricFamily(
            "kvarto_pool_blocks", "Blocks by what they are for and who keeps them", labels=labels
        )
        unused_extents, used = memory.arena.census()
        counts: dict[tuple[str, str, str], int] = {}
        for kind, form in enumerate(self._forms):
            slots, idle = memory.arena.extent_slots(kind), memory.prefixes.idle_count(kind)
            extents, blocks_used = used[kind]
            states = {
                "held": max(0, blocks_used - idle),
                "evictable": idle,
                "free": (extents + unused_extents) * slots - blocks_used,
            }
            for state, count in states.items():
                counts[*form, state] = counts.get((*form, state), 0) + count
        for key, count in counts.items():
            blocks.add_metric(key, count)
        yield blocks

    def _formats(self) -> Iterator[Metric]:
        memory = self._core.memory
        offers = dict(zip(self._engine.formats, memory.offers, strict=False))  # the probe's own is not offered
        sealed = [memory.sealed(policy) for policy in range(len(offers))]
        queried, found = self._core.scheduler.queried_tokens, self._core.scheduler.found_tokens
        columns: dict[str, tuple[str, Iterable[int]]] = {
            "prefix_cache_queries": ("Prompt tokens that the prefix cache was asked for", (queried[i] for i in range(len(offers)))),
            "prefix_cache_hits": ("Prompt tokens that it had", (found[i] for i in range(len(offers)))),
            "sealed_pages": ("Pages that were sealed, each of one layer", (pages for pages, _ in sealed)),
            "sealed_elements": ("Numbers in them", (numbers for _, numbers in sealed)),
            "saturated_elements": ("Those beyond their codec's range, which were clamped", (offer.saturated_elements for offer in offers.values())),
        }  # fmt: skip
        for name, (about, values) in columns.items():
            family = CounterMetricFamily(f"kvarto_{name}", about, labels=["kv_format"])
            for kv_format, value in zip(offers, values, strict=True):
                family.add_metric([kv_format], value)
            yield family


def _forms(engine: Engine) -> list[tuple[str, str]]:
    """Of each kind of block whether its pages are raw or sealed, and the formats that have it."""
    users: dict[int, tuple[set[str], set[str]]] = {}
    for number, offer in enumerate(engine.core.memory.offers):
        name = engine.formats[number] if number < len(engine.formats) else "probe"
        for group in offer.groups:
            for kind, form in ((group.raw, "raw"), (group.sealed, "sealed")):
                forms, names = users.setdefault(kind, (set(), set()))
                forms.add(form)
                names.add(name)
    return [("+".join(sorted(forms)), ",".join(sorted(names))) for _, (forms, names) in sorted(users.items())]


def _tiers(tiers: Tiers) -> Iterator[Metric]:
    hits = CounterMetricFamily("kvarto_tier_hits", "Blocks that came back", labels=["tier"])
    used = GaugeMetricFamily("kvarto_tier_bytes", "Bytes that a tier keeps", labels=["tier"])
    for name, tier in (("host", tiers.host), ("disk", tiers.disk)):
        hits.add_metric([name], tiers.hits[name])
        used.add_metric([name], 0 if tier is None else tier.used_bytes)
    yield hits
    yield used
    yield CounterMetricFamily("kvarto_offloaded_bytes", "Bytes that left the pool for a tier", tiers.kept_bytes)
    yield CounterMetricFamily("kvarto_restored_bytes", "Bytes that came back", tiers.found_bytes)
    yield CounterMetricFamily("kvarto_tier_refused", "Blocks that were not what they should be", tiers.refused)


def _probe_families(probe: Probe) -> Iterator[Metric]:
    """What the quality probe found, by format and context."""
    labels = ["kv_format", "context"]
    kl = HistogramMetricFamily("kvarto_probe_kl", "KL(bf16 || format) of probed positions, in nats", labels=labels)
    top1 = CounterMetricFamily(
        "kvarto_probe_top1_agreement", "Probed positions by whether bf16 has the same likeliest token", labels=[*labels, "agrees"]
    )  # fmt: skip
    for (policy, context), tally in list(probe.tallies.items()):
        where, counts = [probe.names[policy], CONTEXT_NAMES[context]], list(accumulate(tally.counts))
        bounds = [*(f"{bound:.3g}" for bound in KL_BOUNDS_NATS), "+Inf"]
        kl.add_metric(where, list(zip(bounds, counts, strict=True)), tally.kl_nats)
        top1.add_metric([*where, "true"], tally.agreed)
        top1.add_metric([*where, "false"], counts[-1] - tally.agreed)
    done = CounterMetricFamily(
        "kvarto_probe_requests", "Requests chosen for the probe, by what became of that", labels=[*labels, "outcome"]
    )  # fmt: skip
    probed = [policy for policy in range(len(probe.names)) if policy != probe.baseline]
    for policy, context, outcome in product(probed, range(len(CONTEXT_NAMES)), OUTCOMES):
        where = [probe.names[policy], CONTEXT_NAMES[context]]
        done.add_metric([*where, outcome], probe.outcomes[policy, context, outcome])
    yield from (kl, top1, done)
    if probe.threshold_nats is not None:
        routed = GaugeMetricFamily(
            "kvarto_routed_to_bf16", "1: who names no format and would get this one gets bf16", labels=labels
        )
        for policy, context in product(probed, range(len(CONTEXT_NAMES))):
            routed.add_metric([probe.names[policy], CONTEXT_NAMES[context]], (policy, context) in probe.routed)
        yield routed
