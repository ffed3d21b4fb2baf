"""Levels that are not evenly spaced, by sensitivity (KVQuant, arXiv 2401.18079, 3.3): from keys, values and their gradients to constants of a policy.

A number x of a range with middle z and half width s is coded as the level q nearest to (x - z) / s, so the loss grows by about F (x - z - s q)^2, F
the squared gradient. Levels are the weighted k-means of normalised numbers with weights F s^2: equation 7 of the paper. (Its released code passes F
alone, which counts errors of narrow channels as much as those of wide ones.) k-means is solved exactly, over histograms (codecs/levels.py), where
theirs starts at random.

Ranges are those the codec has: of a key channel before RoPE the LOW and HIGH percentiles of the record; of a value token its own. Outliers take no
part.
"""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from datetime import UTC, datetime
from typing import TYPE_CHECKING

import torch

from kvarto.calibrate.record import Record
from kvarto.calibrate.tensors import Array
from kvarto.codecs import Codec
from kvarto.codecs.kvquant import Constants, KvQuant, key_ranges, slots, token_ranges
from kvarto.codecs.levels import Histogram, fit_levels, normalised
from kvarto.errors import UsageError
from kvarto.formats import Format, parse_format
from kvarto.policy_file import ConstantsEntry, LayerEntry, PolicyFile, RecordEntry

if TYPE_CHECKING:
    from torch import Tensor

BITS = (2, 3, 4)
FISHER_TOKENS = 2048
_DIGITS = 6


class LevelStatistics:
    """Histograms of one layer's normalised keys and values."""

    def __init__(self) -> None:
        self._keys, self._values = Histogram(), Histogram()

    def add_keys(self, key: Tensor, gradient: Tensor, low: Array, high: Array) -> None:
        """Keys before RoPE and gradients, float32 [Hkv, T, Dk], and the ends of their channels' ranges [Hkv, Dk]."""
        zero, scale = (torch.from_numpy(x).to(key.device).unsqueeze(1) for x in key_ranges(low, high))
        _add(self._keys, key, gradient, zero, scale)

    def add_values(self, value: Tensor, gradient: Tensor) -> None:
        """Values and gradients, float32 [Hkv, T, Dv]."""
        _add(self._values, value, gradient, *token_ranges(value, slots(value.shape[-1])))

    def arrays(self) -> dict[str, Array]:
        """As a record names them."""
        found: dict[str, Array] = {}
        for name, histogram in (("pre_k", self._keys), ("v", self._values)):
            for bits in BITS if histogram.count.any() else ():
                levels = fit_levels(histogram, bits)
                found |= {f"{name}_levels_{bits}": levels, f"{name}_drawn_{bits}": normalised(histogram, levels)}
        return found


def _add(histogram: Histogram, x: Tensor, gradient: Tensor, zero: Tensor, scale: Tensor) -> None:
    weights = (gradient * scale).square()
    histogram.add(((x - zero) / scale).cpu().numpy(), weights.cpu().numpy())


def calibrated_policy(record: Record, text: str, *, name: str = "", noted: RecordEntry | None = None) -> PolicyFile:
    """A policy of one format with constants of the record for each layer; `noted`: where the record lies.

    Raises UsageError for a format that needs no constants, and for a record without them.
    """
    chosen, said = require_calibrated(text), record.provenance
    return PolicyFile(
        name=name, layers=tuple(_entry(chosen, layer, said.pre_rope) for layer in record.layers), record=noted,
        provenance={
            "model": said.model, "identity": said.identity, "record_sha256": record.sha256, "source": said.source, "text_sha256": said.text_sha256,
            "tokens": said.tokens, "fisher_tokens": said.fisher_tokens, "weights": "squared gradient times squared half width (KVQuant, eq. 7)",
            "versions": dict(said.versions), "date": datetime.now(UTC).isoformat(timespec="seconds"),
        },
    )  # fmt: skip


def require_calibrated(text: str) -> Format:
    """The format, if a codec of it needs constants. Raises UsageError otherwise, UnknownName."""
    chosen = parse_format(text)
    if not any(isinstance(codec, KvQuant) for codec in (chosen.k, chosen.v)):
        raise UsageError("format", "one with calibrated levels, such as kvquant3 or int8/kvquant4", text)
    return chosen


def _entry(chosen: Format, layer: Mapping[str, Array], pre_rope: str) -> LayerEntry:
    k = v = None
    if isinstance(chosen.k, KvQuant):
        if "rope_angles" not in layer or "pre_k_low" not in layer:
            reason = (
                pre_rope or "RoPE turns them by other angles where contexts are long, or the record is an older one"
            )
            remedy = f"use another codec for keys, such as int4/{chosen.v.name}"
            raise UsageError("record", f"keys before RoPE, which {chosen.k.name} writes", f"none ({reason})", remedy)
        scale = layer["rope_scale"]
        ranges = key_ranges(layer["pre_k_low"] * scale, layer["pre_k_high"] * scale)
        k = _constants(chosen.k, layer, "pre_k", ranges, layer["rope_angles"].tolist())
    if isinstance(chosen.v, KvQuant):
        v = _constants(chosen.v, layer, "v")
    return LayerEntry(format=str(chosen), k_constants=k, v_constants=v)


def _constants(
    codec: Codec, layer: Mapping[str, Array], name: str, ranges: tuple[Array, Array] | None = None, angles: Sequence[float] = ()
) -> ConstantsEntry:  # fmt: skip
    assert isinstance(codec, KvQuant)
    bits = int(codec.bits)
    if f"{name}_levels_{bits}" not in layer:
        remedy = f"make it anew: kvarto calibrate MODEL --fisher-tokens {FISHER_TOKENS} -o RECORD"
        raise UsageError("record", "levels, for which gradients are needed", "none", remedy)
    levels = layer[f"{name}_levels_{bits}"]
    drawn = layer[f"{name}_drawn_{bits}"] if codec.normed else levels
    made = Constants.of(levels, drawn, ranges, angles)
    return ConstantsEntry(
        levels=_short(made.levels), thresholds=_short(made.thresholds), zero=tuple(map(_short, made.zero)),
        scale=tuple(map(_short, made.scale)), angles=made.angles,
    )  # fmt: skip


def _short(numbers: Sequence[float]) -> tuple[float, ...]:
    """Six digits: more than the numbers are known to, and a third of the text."""
    return tuple(float(f"{number:.{_DIGITS}g}") for number in numbers)
