"""The four steps as rules: data (advice.toml) about signals, which `kvarto plan` works out and `kvarto diagnose` sees. No torch."""

from __future__ import annotations

import operator
import tomllib
from collections.abc import Callable, Mapping
from dataclasses import dataclass
from functools import cache
from importlib.resources import files

_COMPARE: dict[str, Callable[[float, float], bool]] = {
    "<": operator.lt, "<=": operator.le, ">": operator.gt, ">=": operator.ge, "=": operator.eq,
}  # fmt: skip
SIGNALS: Mapping[str, str] = {
    # worked out of a model and a machine
    "pool_bytes": "left for keys and values on the fullest rank; at most 0 if the weights do not fit",
    "fits_bf16": "1 if so many sequences of this context fit at once in that format, 0 if not or not possible",
    "fits_fp8": "likewise",
    "fits_int4": "likewise",
    "fits_int2": "likewise",
    "below_break_even": "1 if the context is shorter than the one from which on an FP8 step is shorter than a BF16 one",
    "concurrency": "sequences at once",
    "sm": "compute capability times ten, 0 if unknown",
    "kv_share": "part of a BF16 step's bytes that is keys and values, at this context and concurrency",
    "prefill_share": "part of a request's own time that its prompt takes, by the bounds",
    # of the model, known to both where there is a config
    "constant_share": "part of a BF16 sequence that does not grow with it (windows, states)",
    "latent": "1 if some layer keeps latents",
    "widest_head": "the largest head dimension",
    # seen on a running engine
    "capacity_bound": "1 if that is the verdict",
    "queue_bound": "likewise",
    "prefill_bound": "likewise",
    "not_kv": "likewise",
    "kv_bound": "1 if the verdict is capacity or decode bandwidth: what a smaller format eases",
    "kv_bits": "bits of a number in the format that serves; 16 if the engine does not tell",
    "prefix_caching": "1 if it is on, 0 if not",
    "chunked_prefill": "likewise",
    "hit_rate": "part of the prompts' tokens that the prefix cache had, where it is not off",
    "long_gaps": "the gap that one in a hundred exceeds over the mean one, where prefill is in chunks and nobody was preempted",
    "waits_for_slots": "1 if the engine lets nobody wait for memory, only for a slot",
    "corrupted": "requests with NaN in their logits",
}
Condition = tuple[str, str, float]
"""A signal, a comparison, a number."""


@dataclass(frozen=True)
class Advice:
    """A rule: said when all conditions of one case in `when` hold. A signal that is not known holds never.

    option  what the switch that it is about is called in an engine's file, "" if it is about none
    """

    id: str
    step: int
    when: tuple[tuple[Condition, ...], ...]
    say: str
    because: str
    source: str
    option: str = ""

    def holds(self, signals: Mapping[str, float]) -> bool:
        """For these signals."""
        return any(all(_holds(condition, signals) for condition in case) for case in self.when)

    def to_json(self) -> dict[str, str | int]:
        """For programs: what is said, and why."""
        return {"id": self.id, "step": self.step, "say": self.say, "because": self.because, "source": self.source}


def _holds(condition: Condition, signals: Mapping[str, float]) -> bool:
    name, sign, number = condition
    return name in signals and _COMPARE[sign](signals[name], number)


@cache
def rules() -> tuple[Advice, ...]:
    """All, in the order of the file."""
    data = tomllib.loads(files("kvarto").joinpath("advice.toml").read_text())
    return tuple(Advice(**entry | {"when": tuple(map(_case, entry["when"]))}) for entry in data["rules"])


def advise(signals: Mapping[str, float]) -> list[Advice]:
    """The rules that hold, by step."""
    assert signals.keys() <= SIGNALS.keys(), f"no such signals: {signals.keys() - SIGNALS.keys()}"
    return sorted((rule for rule in rules() if rule.holds(signals)), key=lambda rule: rule.step)


def _case(texts: list[str]) -> tuple[Condition, ...]:
    return tuple(map(_condition, texts))


def _condition(text: str) -> Condition:
    name, sign, number = text.split()
    assert name in SIGNALS, f"advice.toml: no signal {name}"
    assert sign in _COMPARE, f"advice.toml: no comparison {sign}"
    return name, sign, float(number)
