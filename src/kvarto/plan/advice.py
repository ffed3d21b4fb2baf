"""The four steps as rules: data (advice.toml) about signals that the plan works out. No torch.

pool_bytes        left for keys and values on the fullest rank; at most 0 if the weights do not fit
kv_share          part of a BF16 step's bytes that is keys and values, at this context and concurrency
prefill_share     part of a request's own time that its prompt takes, by the bounds
fits_bf16, fits_fp8, fits_int4, fits_int2   1 if so many sequences of this context fit at once in that format, 0 if not or not possible
below_break_even  1 if the context is shorter than the one from which on an FP8 step is shorter than a BF16 one
constant_share    part of a BF16 sequence that does not grow with it (windows, states)
concurrency       sequences at once
latent            1 if some layer keeps latents
widest_head       the largest head dimension
sm                compute capability times ten, 0 if unknown
"""

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
SIGNALS = (
    "pool_bytes", "kv_share", "prefill_share", "fits_bf16", "fits_fp8", "fits_int4", "fits_int2", "below_break_even", "constant_share", "concurrency",
    "latent", "widest_head", "sm",
)  # fmt: skip


@dataclass(frozen=True)
class Rule:
    """`when`: (signal, comparison, number), all of which must hold. A signal that was not worked out holds never."""

    id: str
    step: int
    when: tuple[tuple[str, str, float], ...]
    say: str
    because: str
    source: str

    def holds(self, signals: Mapping[str, float]) -> bool:
        """For these signals."""
        return all(name in signals and _COMPARE[sign](signals[name], number) for name, sign, number in self.when)


@cache
def rules() -> tuple[Rule, ...]:
    """All, in the order of the file."""
    data = tomllib.loads(files("kvarto.plan").joinpath("advice.toml").read_text())
    return tuple(
        Rule(
            entry["id"], entry["step"], tuple(_condition(text) for text in entry["when"]), entry["say"], entry["because"], entry["source"]
        )
        for entry in data["rules"]
    )  # fmt: skip


def advise(signals: Mapping[str, float]) -> list[Rule]:
    """The rules that hold, by step."""
    return sorted((rule for rule in rules() if rule.holds(signals)), key=lambda rule: rule.step)


def _condition(text: str) -> tuple[str, str, float]:
    name, sign, number = text.split()
    assert name in SIGNALS, f"advice.toml: no signal {name}"
    assert sign in _COMPARE, f"advice.toml: no comparison {sign}"
    return name, sign, float(number)
