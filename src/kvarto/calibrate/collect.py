"""From a model and text to a record: windows of real text run through the model, and every layer's keys, values and queries are looked at once."""

from __future__ import annotations

import platform
from collections.abc import Sequence
from datetime import UTC, datetime
from typing import TYPE_CHECKING, Any

import numpy as np
import torch
import transformers

from kvarto import __version__
from kvarto.calibrate.nuq import LevelStatistics
from kvarto.calibrate.record import Provenance, Record
from kvarto.calibrate.rope import Rope
from kvarto.calibrate.statistics import Average, SideStatistics
from kvarto.calibrate.tensors import Array
from kvarto.calibrate.watch import Seen, Watcher, as_row, watched, watching
from kvarto.calibrate.windows import LEAST_TOKENS, Window, cut_windows, gather
from kvarto.errors import NotFinite, UsageError
from kvarto.layer_pages import LayerSpec
from kvarto.layout import PAGE_TOKENS
from kvarto.models.load import LoadedModel, load
from kvarto.models.texts import fingerprint
from kvarto.progress import Progress, Silent

if TYPE_CHECKING:
    from torch import Tensor

TOKENS, WINDOW_TOKENS = 16_384, 2_048
_FISHER_WINDOW_TOKENS = 256 + PAGE_TOKENS
_BACKWARD_COST = 3


def calibrate(
    model: LoadedModel | str, text: str | Sequence[str] = "builtin", *, tokens: int = TOKENS,
    window_tokens: int = WINDOW_TOKENS, fisher_tokens: int = 0, least_tokens: int = LEAST_TOKENS,
    progress: Progress | None = None,
) -> Record:  # fmt: skip
    """Statistics of a model's keys and values over real text. The same inputs give the same record, but for its date.

    model           loaded, or a name, folder or hub id
    text            as `models.texts.texts` takes it, one or several
    tokens          how many are looked at, behind the first pages of windows of `window_tokens`
    fisher_tokens   of so many the squared gradients too: a backward pass, which takes about four times as long and far more memory
    least_tokens    less text than that is refused

    Raises UsageError for too little text, Unsupported for a model that cannot be watched, NotFinite for one that computes NaN.
    """
    progress = progress or Silent()
    sources = [text] if isinstance(text, str) else list(text)
    documents = gather(sources)
    loaded = load(model, progress=progress.say) if isinstance(model, str) else model
    limit = getattr(loaded.model.config.get_text_config(decoder=True), "max_position_embeddings", None)
    window_tokens = min(window_tokens, limit or window_tokens)
    windows = cut_windows(
        documents, loaded.tokenizer, tokens=tokens, window_tokens=window_tokens, least_tokens=least_tokens
    )
    for_fisher = _fisher_windows(windows, fisher_tokens)
    progress.plan(sum(len(w.tokens) for w in windows) + _BACKWARD_COST * sum(len(w.tokens) for w in for_fisher))
    with watching(loaded.model) as specs:
        rope = Rope(loaded.model, len(specs))
        with torch.inference_mode():
            rope.check(windows[0].tokens[-1], specs)
        statistics = _Statistics(specs, rope, sum(window.counted for window in windows), window_tokens)
        _look(loaded.model, windows, statistics, specs, progress)
        _look_at_gradients(loaded.model, for_fisher, statistics, specs, progress)
    provenance = Provenance(
        model=loaded.name, identity=loaded.identity, source=", ".join(sources),
        text_sha256=fingerprint(documents), documents=len({window.document for window in windows}),
        tokens=sum(window.counted for window in windows), sink_tokens=len(windows) * PAGE_TOKENS, window_tokens=window_tokens,
        threshold_tokens=statistics.threshold_tokens, fisher_tokens=sum(window.counted for window in for_fisher),
        pre_rope=rope.reason, dtype=str(loaded.model.dtype).removeprefix("torch."),
        versions=versions(), date=datetime.now(UTC).isoformat(timespec="seconds"),
    )  # fmt: skip
    return Record(provenance, tuple(statistics.arrays()))


def versions() -> dict[str, str]:
    """What computed it."""
    return {
        "kvarto": __version__,
        "python": platform.python_version(),
        "torch": torch.__version__,
        "transformers": transformers.__version__,
    }


def _fisher_windows(windows: Sequence[Window], tokens: int) -> list[Window]:
    """The beginnings of windows: short, because a backward pass holds all that the forward pass computed."""
    if tokens < 0:
        raise UsageError("fisher_tokens", "0 or more", tokens)
    chosen: list[Window] = []
    for window in windows:
        if sum(each.counted for each in chosen) >= tokens:
            break
        chosen.append(Window(window.document, window.tokens[:_FISHER_WINDOW_TOKENS]))
    return chosen


def _look(
    model: Any, windows: Sequence[Window], statistics: _Statistics, specs: list[LayerSpec], progress: Progress
) -> None:
    for number, window in enumerate(windows):
        progress.begin("record", f"{window.document} ({number + 1} of {len(windows)})")
        with torch.inference_mode():
            watched(model, as_row(window.tokens, model), statistics, specs)
        progress.done(len(window.tokens))


def _look_at_gradients(
    model: Any, windows: Sequence[Window], statistics: _Statistics, specs: list[LayerSpec], progress: Progress
) -> None:
    """Of the summed negative log-likelihood of a window, in nats, with respect to each layer's keys and values."""
    for number, window in enumerate(windows):
        progress.begin("gradients", f"{window.document} ({number + 1} of {len(windows)})")
        gradients, tokens = Gradients(), as_row(window.tokens, model)
        with torch.enable_grad():
            logits = watched(model, tokens, gradients, specs, scored=len(window.tokens))
            loss = torch.nn.functional.cross_entropy(logits[0, :-1].float(), tokens[0, 1:], reduction="sum")
            found = torch.autograd.grad(loss, [*gradients.keys, *gradients.values])
        for layer in range(len(specs)):
            seen = (gradients.keys[layer], gradients.values[layer], found[layer], found[len(specs) + layer])
            statistics.add_gradients(layer, *(x.detach()[0].float() for x in seen))
        progress.done(_BACKWARD_COST * len(window.tokens))


class Gradients(Watcher):
    """Keeps what gradients are asked for. Only the first layer's keys and values are leaves: all else depends on them."""

    def __init__(self) -> None:
        self.keys, self.values, self.outs = list[Any](), list[Any](), list[Any]()

    def before(self, seen: Seen) -> None:
        """Keys and values, from which gradients flow."""
        for x in (seen.key, seen.value):
            if not x.requires_grad:
                x.requires_grad_()
        self.keys.append(seen.key)
        self.values.append(seen.value)

    def after(self, seen: Seen, out: Tensor) -> None:
        """And outputs."""
        self.outs.append(out)


class _Statistics(Watcher):
    """Of all layers."""

    def __init__(self, specs: Sequence[LayerSpec], rope: Rope, tokens: int, window_tokens: int) -> None:
        self._rope, self._window_tokens = rope, window_tokens
        names = ("k", "v") if rope.reason else ("k", "v", "pre_k")
        self._sides = [{name: SideStatistics(spec.geometry.heads, tokens) for name in names} for spec in specs]
        self._averages: list[dict[str, Average]] = [{} for _ in specs]
        self._sinks: list[dict[str, Tensor]] = [{} for _ in specs]
        self._outputs: list[Array | None] = [None] * len(specs)
        self._levels: dict[int, LevelStatistics] = {}

    @property
    def threshold_tokens(self) -> int:
        """Tokens of which outlier thresholds are taken."""
        return self._sides[0]["k"].tails.tokens

    def before(self, seen: Seen) -> None:
        """One window, [1, H, T, D]: its first page apart. Raises NotFinite."""
        layer, S = seen.layer, PAGE_TOKENS
        key, value, query = seen.key[0].float(), seen.value[0].float(), seen.query[0].float()
        for name, x in (("k", key), ("v", value)):
            sink = x[:, :S].abs().amax(dim=(1, 2)).cpu()
            if not bool(torch.isfinite(x).all()):
                raise NotFinite(f"{name.upper()} of layer {layer}: expected finite numbers, got NaN or infinity")
            known = self._sinks[layer].get(f"{name}_sink_amax")
            self._sinks[layer][f"{name}_sink_amax"] = sink if known is None else torch.maximum(known, sink)
            self._sides[layer][name].add(x[:, S:])
        if "pre_k" in self._sides[layer]:
            self._sides[layer]["pre_k"].add(self._rope.undo(key, layer)[:, S:])
        grouped = query[:, S:].double().square().sum(dim=1).view(key.shape[0], -1, query.shape[-1]).sum(dim=1)
        self._average(layer, "q_square").add(grouped, key.shape[1] - S)
        if self._outputs[layer] is None:
            self._outputs[layer] = _output_weights(seen)

    def add_gradients(
        self, layer: int, key: Tensor, value: Tensor, key_gradient: Tensor, value_gradient: Tensor
    ) -> None:
        """Of a window, float32 [Hkv, T, D] each, after all windows were looked at: levels lie within the ranges found there."""
        found, S = {"k_fisher": key_gradient, "v_fisher": value_gradient}, PAGE_TOKENS
        levels = self._levels.setdefault(layer, LevelStatistics())
        levels.add_values(value[:, S:], value_gradient[:, S:])
        if not self._rope.reason:
            found["pre_k_fisher"] = turned_back = self._rope.gradient(key_gradient, layer)
            low, high = (getattr(self._sides[layer]["pre_k"].tails, end) for end in ("low", "high"))
            levels.add_keys(self._rope.undo(key, layer)[:, S:], turned_back[:, S:], low, high)
        for name, x in found.items():
            self._average(layer, name).add(x[:, PAGE_TOKENS:].double().square().sum(dim=1), x.shape[1] - PAGE_TOKENS)

    def _average(self, layer: int, name: str) -> Average:
        return self._averages[layer].setdefault(name, Average())

    def arrays(self) -> list[dict[str, Array]]:
        """As a record names them."""
        return [
            {name: array for side, of in sides.items() for name, array in of.arrays(side).items()}
            | {name: x.numpy() for name, x in sinks.items()}
            | {name: average.mean for name, average in averages.items()}
            | ({} if output is None else {"v_output": output})
            | (self._levels[layer].arrays() if layer in self._levels else {})
            | self._angles(layer)
            for layer, (sides, sinks, averages, output) in enumerate(
                zip(self._sides, self._sinks, self._averages, self._outputs, strict=True)
            )
        ]

    def _angles(self, layer: int) -> dict[str, Array]:
        """How RoPE turns keys over a window's tokens, if it does by angles alone."""
        found = None if self._rope.reason else self._rope.angles(layer, self._window_tokens)
        return {} if found is None else {"rope_angles": found[0], "rope_scale": np.full(1, found[1], np.float32)}


def _output_weights(seen: Seen) -> Array | None:
    """float32 [Hkv, Dv]: of each value channel the squared norm of what the output projection makes of it, summed over the group's heads."""
    weight = getattr(getattr(seen.module, "o_proj", None), "weight", None)
    (Hq, Hkv, Dv) = seen.query.shape[1], seen.key.shape[1], seen.value.shape[-1]
    if weight is None or weight.dim() != 2 or weight.shape[1] != Hq * Dv:
        return None
    columns = weight.detach().double().square().sum(dim=0)
    array: Array = columns.view(Hkv, Hq // Hkv, Dv).sum(dim=1).float().cpu().numpy()
    return array
