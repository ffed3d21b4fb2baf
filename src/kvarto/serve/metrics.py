"""Metrics for Prometheus: what became of requests, and what the engine's books say when somebody looks."""

from __future__ import annotations

from collections.abc import Iterator
from dataclasses import dataclass
from itertools import accumulate, product

from prometheus_client import CollectorRegistry, Counter, Histogram, Info, generate_latest
from prometheus_client.core import CounterMetricFamily, GaugeMetricFamily, HistogramMetricFamily, Metric
from prometheus_client.registry import Collector

from kvarto.engine.engine import Engine
from kvarto.engine.probe import CONTEXT_NAMES, KL_BOUNDS_NATS, OUTCOMES, Probe

CONTENT_TYPE = "text/plain; version=0.0.4; charset=utf-8"
# Half a millisecond to 12 minutes, each bound sqrt(2) times the one before: a quantile read from them is off by less than a fifth.
_BOUNDS_SECONDS = tuple(round(0.0005 * 2 ** (i / 2), 6) for i in range(42))


@dataclass
class Times:
    """Of one request, in seconds of time.monotonic: when it arrived, began to be computed, and brought its first and its last token."""

    arrived: float
    began: float | None = None
    first: float | None = None
    last: float | None = None


class Metrics:
    """The registry of one server, and what it is told.

    A request with n choices counts n times, as the engine sees it, and so do its tokens.
    """

    def __init__(self, engine: Engine) -> None:
        self._registry = CollectorRegistry()
        self._registry.register(_EngineCollector(engine))
        self._requests = self._counter("requests", "Requests that ended, by how", "outcome")
        self._prompt = self._counter("prompt_tokens", "Tokens of prompts of requests that ended")
        self._cached = self._counter("cached_tokens", "Prompt tokens that the prefix cache had")
        self._generated = self._counter("generated_tokens", "Tokens generated for requests that ended")
        self._first = self._histogram("time_to_first_token_seconds", "From a request's arrival to its first token")
        self._gap = self._histogram("inter_token_latency_seconds", "Between two tokens of a request")
        self._whole = self._histogram("e2e_request_latency_seconds", "From a request's arrival to its last token")
        self._queue = self._histogram("request_queue_time_seconds", "From a request's arrival to its first step")
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
        times.last = now

    def ended(self, times: Times, now: float, kv_format: str, outcome: str) -> None:
        """A request is over."""
        self._requests.labels(kv_format, outcome).inc()
        self._whole.labels(kv_format).observe(now - times.arrived)
        if times.began is not None:
            self._queue.labels(kv_format).observe(max(0.0, times.began - times.arrived))

    def tokens(self, kv_format: str, *, prompt: int, cached: int, generated: int) -> None:
        """Of a request that is over."""
        self._prompt.labels(kv_format).inc(prompt)
        self._cached.labels(kv_format).inc(cached)
        self._generated.labels(kv_format).inc(generated)

    def text(self) -> bytes:
        """The exposition."""
        return generate_latest(self._registry)

    def _counter(self, name: str, about: str, *labels: str) -> Counter:
        return Counter(f"kvarto_{name}", about, ["kv_format", *labels], registry=self._registry)

    def _histogram(self, name: str, about: str) -> Histogram:
        return Histogram(f"kvarto_{name}", about, ["kv_format"], buckets=_BOUNDS_SECONDS, registry=self._registry)


class _EngineCollector(Collector):
    """Reads the engine's books when somebody looks, so the engine need not know of metrics."""

    def __init__(self, engine: Engine) -> None:
        self._engine = engine

    def collect(self) -> Iterator[Metric]:
        """All of it; the engine goes on meanwhile, so two numbers may be a step apart."""
        core = self._engine.core
        prefixes, total = core.memory.prefixes, core.memory.arena.nbytes
        held, idle = max(0, prefixes.held_bytes), prefixes.idle_bytes
        yield GaugeMetricFamily("kvarto_num_requests_running", "Requests that are computed", self._engine.running)
        yield GaugeMetricFamily("kvarto_num_requests_waiting", "Requests that wait", self._engine.waiting)
        yield GaugeMetricFamily("kvarto_pool_bytes", "Bytes for keys and values", total)
        yield GaugeMetricFamily("kvarto_pool_held_bytes", "Bytes that requests hold", held)
        yield GaugeMetricFamily("kvarto_pool_idle_bytes", "Bytes that only the prefix cache keeps", idle)
        yield GaugeMetricFamily("kvarto_kv_cache_usage_ratio", "Share of the pool that requests hold", held / total)
        yield CounterMetricFamily("kvarto_preemptions", "Requests sent back to wait", core.scheduler.preemptions)
        yield CounterMetricFamily("kvarto_dropped_pieces", "Pieces the prefix cache dropped", prefixes.dropped)
        yield CounterMetricFamily("kvarto_steps", "Steps of the engine", core.steps)
        if core.offload is not None:
            tiers = core.offload.tiers
            hits = CounterMetricFamily("kvarto_tier_hits", "Blocks that came back", labels=["tier"])
            for tier, count in tiers.hits.items():
                hits.add_metric([tier], count)
            yield hits
            yield CounterMetricFamily("kvarto_offloaded_bytes", "Bytes that left the pool for a tier", tiers.kept_bytes)
            yield CounterMetricFamily("kvarto_tier_refused", "Blocks that were not what they should be", tiers.refused)
        if core.probe is not None:
            yield from _probe_families(core.probe)


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
        "kvarto_probe_requests", "Requests chosen for the probe, by what became of that", labels=["kv_format", "outcome"]
    )  # fmt: skip
    probed = [policy for policy in range(len(probe.names)) if policy != probe.baseline]
    for policy, outcome in product(probed, OUTCOMES):
        done.add_metric([probe.names[policy], outcome], probe.outcomes[policy, outcome])
    yield from (kl, top1, done)
    if probe.threshold_nats is not None:
        routed = GaugeMetricFamily(
            "kvarto_routed_to_bf16", "1: who names no format and would get this one gets bf16", labels=labels
        )
        for policy, context in product(probed, range(len(CONTEXT_NAMES))):
            routed.add_metric([probe.names[policy], CONTEXT_NAMES[context]], (policy, context) in probe.routed)
        yield routed
