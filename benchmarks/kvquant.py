"""What each part of KVQuant is worth on a real model, and what its three formats cost beside others of as many bits.

    python benchmarks/kvquant.py smollm2-135m-instruct --record smollm2.record --json kvquant.json

Calibration and measurement read different documents of the built-in text. Without the file, the record is made first. All formats keep the first
page raw. The ablation is the paper's (arXiv 2401.18079, section 4.2), at 3 bits: keys per token after RoPE with even levels; per channel; before
RoPE; levels by sensitivity; 1 % kept apart. Values are per token throughout and follow in the last two steps. Ranges of channels are calibrated,
without outliers from the lowest to the highest number, with outliers between the 0.5 and 99.5 percentiles. Rows after those are other choices that
were open.
"""

from __future__ import annotations

import argparse
import json
import tempfile
from collections.abc import Sequence
from dataclasses import dataclass, replace
from itertools import islice
from pathlib import Path
from typing import Any

import numpy as np
import torch
from torch import Tensor

from kvarto.calibrate import Record, calibrate
from kvarto.calibrate.collect import Gradients
from kvarto.calibrate.measure import measure
from kvarto.calibrate.nuq import calibrated_policy
from kvarto.calibrate.sensitivity import FIRST_SCORED
from kvarto.calibrate.watch import as_row, watched, watching
from kvarto.calibrate.windows import Window, cut_windows, gather, split
from kvarto.codecs import Codec, registry
from kvarto.codecs.kvquant import Constants, KvQuant, key_ranges, slots, token_ranges
from kvarto.codecs.levels import Histogram, fit_levels, normalised
from kvarto.codecs.rope import turned
from kvarto.formats import Format, Policy, parse_policy
from kvarto.layout import PAGE_TOKENS, FieldSpec, Side, SlabLayout
from kvarto.models.load import LoadedModel, load
from kvarto.models.texts import Document
from kvarto.policy_file import write_policy_file
from kvarto.progress import Silent

OTHERS = ("int4", "kivi4", "turbo4", "int3", "kivi3", "turbo3", "int2", "kivi2", "turbo2")
OWN = ("kvquant4", "kvquant3", "kvquant2")
_AT_ONCE = 4  # rows that share one pass of the model itself
ORIGIN = torch.zeros((), dtype=torch.int32)


@dataclass(frozen=True)
class PerToken(Codec):
    """Keys written as KVQuant writes values: for the ablation alone."""

    values: KvQuant | None = None

    def fields(self, side: Side, page_tokens: int, dim: int) -> Sequence[FieldSpec]:
        """Those of values."""
        return self._values.fields(Side.V, page_tokens, dim)

    def encode(self, x: Tensor, layout: SlabLayout) -> Tensor:
        """As values."""
        return self._values.encode(x, self._values.layout(Side.V, layout.page_tokens, layout.dim))

    def decode(self, slabs: Tensor, layout: SlabLayout) -> Tensor:
        """As values."""
        return self._values.decode(slabs, self._values.layout(Side.V, layout.page_tokens, layout.dim))

    @property
    def _values(self) -> KvQuant:
        assert self.values is not None
        return self.values


@dataclass(frozen=True)
class Tokens:
    """Of a layer, behind first pages, float32 [Hkv, T, D]: keys after and before RoPE, values, and gradients of all three."""

    key: Tensor
    before: Tensor
    value: Tensor
    key_gradient: Tensor
    before_gradient: Tensor
    value_gradient: Tensor


def look(model: Any, windows: Sequence[Window], angles: Sequence[tuple[float, ...]]) -> list[Tokens]:
    """Keys, values and gradients of windows. RoPE turns gradients as it turns keys, since it is orthogonal."""
    found: list[list[tuple[Tensor, ...]]] = [[] for _ in angles]
    with watching(model) as specs:
        for window in windows:
            kept, tokens = Gradients(), as_row(window.tokens, model)
            with torch.enable_grad():
                logits = watched(model, tokens, kept, specs, scored=len(window.tokens))
                loss = torch.nn.functional.cross_entropy(logits[0, :-1].float(), tokens[0, 1:], reduction="sum")
                gradients = torch.autograd.grad(loss, [*kept.keys, *kept.values])
            for layer, turn in enumerate(angles):
                k, v, gk, gv = (
                    x.detach()[0].float() for x in (kept.keys[layer], kept.values[layer], gradients[layer], gradients[len(angles) + layer])
                )  # fmt: skip
                parts = (k, turned(k, ORIGIN, turn, back=True), v, gk, turned(gk, ORIGIN, turn, back=True), gv)
                found[layer].append(tuple(x[:, PAGE_TOKENS:] for x in parts))
    return [Tokens(*(torch.cat(parts, dim=1) for parts in zip(*layer, strict=True))) for layer in found]


@dataclass(frozen=True)
class Parts:
    """What of KVQuant a row has. `share`: percent of a channel's numbers on either side that its range leaves out, if 1 % is kept apart."""

    bits: int
    nuq: bool = False
    sparse: bool = False
    weighted: bool = True
    share: float = 0.5

    def keys(self, seen: Tokens, angles: tuple[float, ...]) -> KvQuant:
        """Per channel; before RoPE if there are angles."""
        x, gradient = (seen.before, seen.before_gradient) if angles else (seen.key, seen.key_gradient)
        ordered = x.sort(dim=1).values
        rank = int(np.ceil(self.share / 100 * x.shape[1])) - 1 if self.sparse else 0
        ranges = key_ranges(ordered[:, rank].numpy(), ordered[:, -1 - rank].numpy())
        zero, scale = (torch.from_numpy(each)[:, None] for each in ranges)
        return self._codec((x - zero) / scale, gradient * scale, ranges, angles)

    def values(self, x: Tensor, gradient: Tensor) -> KvQuant:
        """Per token."""
        zero, scale = token_ranges(x, slots(x.shape[-1]) if self.sparse else 0)
        return self._codec((x - zero) / scale, gradient * scale)

    def _codec(self, u: Tensor, gradient: Tensor, ranges: Any = None, angles: tuple[float, ...] = ()) -> KvQuant:
        count = 1 << self.bits
        levels = drawn = (2.0 * np.arange(count) / (count - 1) - 1.0).astype(np.float32)  # the ends are levels
        if self.nuq:
            histogram = Histogram()
            histogram.add(u.numpy(), gradient.square().numpy() if self.weighted else None)
            levels = fit_levels(histogram, self.bits)
            drawn = normalised(histogram, levels) if self.bits == 2 and self.sparse else levels
        codec = registry[f"kvquant{self.bits}"]
        assert isinstance(codec, KvQuant)
        return replace(codec, sparse=self.sparse, calibrated=Constants.of(levels, drawn, ranges, angles))


def ablation(seen: Sequence[Tokens], angles: Sequence[tuple[float, ...]], bits: int) -> dict[str, Policy]:
    """The rows, in the paper's order, then the open choices: (parts, whether keys are before RoPE; None: per token)."""
    even, nuq = Parts(bits), Parts(bits, nuq=True)
    full = replace(nuq, sparse=True)
    rows: dict[str, tuple[Parts, bool | None]] = {
        "per token, after RoPE, even": (even, None), "per channel": (even, False), "+ before RoPE": (even, True),
        "+ levels by sensitivity": (nuq, True), "+ 1 % apart": (full, True), "all, but after RoPE": (full, False),
        "all, but even levels": (replace(full, nuq=False), True), "all, but levels not weighted": (replace(full, weighted=False), True),
        "all, but ranges from end to end": (replace(full, share=1e-9), True),
    }  # fmt: skip
    policies = {}
    for name, (parts, before) in rows.items():
        layers = []
        for tokens, turn in zip(seen, angles, strict=True):
            k: Codec = parts.keys(tokens, turn if before else ())
            if before is None:
                k = PerToken("per-token", bits, "ablation", values=parts.values(tokens.key, tokens.key_gradient))
            layers.append(Format(k, parts.values(tokens.value, tokens.value_gradient), PAGE_TOKENS))
        policies[name] = Policy.by_layer(layers, name=f"row{len(policies)}")
    return policies


def own(record: Record, folder: Path) -> dict[str, Policy]:
    """The three formats, by way of policy files."""
    found = {}
    for name in OWN:
        write_policy_file(folder / f"{name}.json", calibrated_policy(record, name, name=name))
        found[name] = parse_policy(str(folder / f"{name}.json"))
    return found


def made_record(path: Path, model: LoadedModel, documents: Sequence[Document], tokens: int, fisher_tokens: int) -> Record:  # fmt: skip
    """Read, or made of these documents and written."""
    if not path.exists():
        with tempfile.TemporaryDirectory() as folder:
            for number, document in enumerate(documents):
                (Path(folder) / f"{number:03}.txt").write_text(document.text)
            calibrate(model, folder, tokens=tokens, fisher_tokens=fisher_tokens).save(path)
    return Record.load(path, model=model)


def main() -> None:
    """Print a line for each row as it is measured."""
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("model")
    parser.add_argument("--record", type=Path, required=True)
    parser.add_argument("--tokens", type=int, default=8192, help="of the record")
    parser.add_argument("--fisher-tokens", type=int, default=2048)
    parser.add_argument("--measured-tokens", type=int, default=2048)
    parser.add_argument("--bits", type=int, default=3, help="of the ablation; 0 for none")
    parser.add_argument("--rows", default="", help="only rows that contain one of these, comma-separated")
    parser.add_argument("--json", type=Path)
    options = parser.parse_args()
    model = load(options.model)
    kept, held_out = split(gather(["builtin"]))
    record = made_record(options.record, model, kept, options.tokens, options.fisher_tokens)
    windows = [
        window
        for window in cut_windows(held_out, model.tokenizer, tokens=options.measured_tokens, window_tokens=512)
        if len(window.tokens) > FIRST_SCORED
    ]
    with tempfile.TemporaryDirectory() as folder:
        policies = own(record, Path(folder))
        if options.bits:
            angles = [tuple(layer["rope_angles"].tolist()) for layer in record.layers]
            for_ranges = cut_windows(kept, model.tokenizer, tokens=options.fisher_tokens, window_tokens=320)
            policies = ablation(look(model.model, for_ranges, angles), angles, options.bits) | policies
        policies |= {name: Policy(Format(registry[name], registry[name], PAGE_TOKENS)) for name in OTHERS}
        wanted = [part for part in options.rows.split(",") if part]
        if wanted:
            policies = {name: each for name, each in policies.items() if any(part in name for part in wanted)}
        rows = []
        for first in range(0, len(policies), _AT_ONCE):
            some = islice(policies.items(), first, first + _AT_ONCE)
            for name, found in measure(model.model, dict(some), windows, Silent()).items():
                kl = found.kl_nats
                interval = f"[{kl.low:.5f}, {kl.high:.5f}]"
                print(
                    f"{name:32} {found.bits:6.3f} {kl.mean:9.5f} {interval} {found.top1:7.2%}  {found.kernels}",
                    flush=True,
                )
                row = {"row": name, "bits": found.bits, "kl_nats": kl.mean, "low": kl.low, "high": kl.high}
                rows.append(row | {"top1": found.top1})
        if options.json:
            options.json.write_text(json.dumps({"model": options.model, "rows": rows}, indent=2))


if __name__ == "__main__":
    main()
