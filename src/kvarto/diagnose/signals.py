"""What can be asked of any engine, and what an engine's file says: under which names, in which versions, it tells each of these.

An engine is added with one file in `engines/`, which offers a tuple ENGINES. A signal has a list of places, newest name first; the first that the
page has is read. Names stand there without prefix and without `_total`, because versions and proxies differ in both.
"""

from __future__ import annotations

from collections.abc import Mapping
from dataclasses import dataclass, field
from enum import StrEnum


class Gauge(StrEnum):
    """Of one moment."""

    RUNNING = "running requests"
    WAITING = "waiting requests"
    USAGE = "share of the KV pool that requests hold"  # 0 to 1; what only the prefix cache keeps is free
    POOL_TOKENS = "tokens that the KV pool has room for"
    POOL_BLOCKS = "blocks of the KV pool"
    BLOCK_TOKENS = "tokens in a block"
    HELD_BYTES = "bytes of keys and values that requests hold"
    LIVE_TOKENS = "tokens of running requests in the cache"
    HIT_RATE = "prefix cache hit rate"  # 0 to 1, over a time that the engine chooses
    BUSY_SLOTS = "sequences in a decode step"


class Counter(StrEnum):
    """Only grows, until the engine is started again."""

    PREEMPTIONS = "preemptions"
    PROMPT_TOKENS = "prompt tokens"
    COMPUTED_TOKENS = "prompt tokens computed"  # those that no cache had
    CACHED_TOKENS = "prompt tokens from a cache"
    QUERIES = "tokens asked of the prefix cache"
    HITS = "tokens that the prefix cache had"
    GENERATED = "tokens generated"
    CORRUPTED = "requests with NaN in their logits"
    PREFILL_SECONDS = "seconds of steps that computed prompts"
    DECODE_SECONDS = "seconds of steps that only generated"


class Timing(StrEnum):
    """A histogram of seconds."""

    TTFT = "time to the first token"
    ITL = "time between tokens"
    QUEUE = "time in the queue"
    PREFILL = "time of prefill"
    DECODE = "time of decode"
    E2E = "time of a whole request"


class Setting(StrEnum):
    """How the engine is set up."""

    KV_DTYPE = "KV format"
    PREFIX_CACHING = "prefix caching"
    CHUNKED_PREFILL = "chunked prefill"
    CONTINUOUS_BATCHING = "continuous batching"
    PAGED_KV = "paged KV"
    BACKEND = "attention backend"
    VERSION = "version"
    MODEL = "model"
    WEIGHTS_DTYPE = "dtype of the model"
    POOL_TOKENS = "tokens that fit"  # this and the next one where the metrics page does not tell
    WEIGHTS_BYTES = "bytes of weights"
    KV_BITS = "bits of a cached number"


@dataclass(frozen=True)
class At:
    """A place on the page: `name` without prefix and `_total`; `where` picks samples by a label's values, "" for none; `versions`.

    `label`: the number is not the sample's, it stands in this label (of an info metric).
    """

    name: str
    where: Mapping[str, tuple[str, ...]] = field(default_factory=dict)
    label: str = ""
    versions: str = ""


@dataclass(frozen=True)
class Label:
    """A setting that stands in a label of an info metric."""

    name: str
    label: str


@dataclass(frozen=True)
class Answer:
    """A setting that another address tells as JSON: the keys to follow from the top. `inverted`: it says the opposite (disable_...)."""

    path: str
    keys: tuple[str, ...]
    inverted: bool = False
    above_zero: bool = False  # a number that switches off at zero or below


@dataclass(frozen=True)
class Always:
    """A setting that this engine cannot have otherwise, and why we think so."""

    value: str
    reason: str


Place = Label | Answer | Always


@dataclass(frozen=True)
class Engine:
    """All that is known of an engine's page.

    prefixes      of its names, in both spellings (`vllm:`, `vllm_`)
    marks         names (without prefix) of which a page of this engine has at least one
    read_from     which versions the names were read from, and how
    formats_of    the engine whose KV formats it has, by its name in plan/engines; "" for its own
    absent        signals that no version tells, and what to do about it
    model_label   the label that names the model
    seconds_of_steps  whether Counter.*_SECONDS are of steps; else each request counts the same step
    waits_for     what whoever waits lacks, where the engine lets nobody wait for KV memory
    paths         where its page is, most likely first
    """

    name: str
    title: str
    prefixes: tuple[str, ...]
    marks: tuple[str, ...]
    read_from: str
    gauges: Mapping[Gauge, tuple[At, ...]]
    counters: Mapping[Counter, tuple[At, ...]]
    timings: Mapping[Timing, tuple[At, ...]]
    settings: Mapping[Setting, tuple[Place, ...]]
    formats_of: str = ""
    absent: Mapping[Gauge | Counter | Timing, str] = field(default_factory=dict)
    model_label: str = "model_name"
    seconds_of_steps: bool = True
    waits_for: str = ""
    paths: tuple[str, ...] = ("/metrics",)
    advice: Mapping[str, str] = field(default_factory=dict)

    @property
    def stores_as(self) -> str:
        """The engine whose KV formats it has."""
        return self.formats_of or self.name

    def strip(self, name: str) -> str | None:
        """A name without prefix and `_total`; None if it is of another engine."""
        for prefix in self.prefixes:
            if name.startswith(prefix):
                return name.removeprefix(prefix).removesuffix("_total")
        return None
