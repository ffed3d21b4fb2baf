"""Variants in a real model's own forward pass: attention that reads history as a variant gives it back, and the rest raw.

A query in page p reads a token raw if it is one of the first `sink_tokens` or lies in page p - window_pages or later, else as its page reads back
(kvarto/rule.py). All tokens come at once, and by path invariance the numbers are those of decode. Registered with transformers' attention
interface; nothing is patched. Full causal attention alone: no sliding windows, soft-caps or learned sinks, no padding on the left.
"""

from __future__ import annotations

import itertools
import math
from collections.abc import Callable, Sequence
from dataclasses import dataclass
from typing import Any

import torch
from torch import Tensor
from transformers import AttentionInterface, AttentionMaskInterface

from kvarto.errors import NotFinite, Unsupported, UsageError
from kvarto.layout import PAGE_TOKENS
from variants import Moments, Variant

FIRST_SCORED = 128
_NAME = "kvarto-simulated-{}"
_MADE = itertools.count()
_SLICE = 256


@dataclass(frozen=True)
class Reading:
    """How history is read. A side that is None is raw.

    sink_tokens    first tokens that stay raw; those of a page that is cut are in no group of it (the next token stands in)
    window_pages   pages before a query's own that it reads raw
    coded          of the others, those tokens (first, end) that read as coded; the rest raw, to see whose error counts
    """

    k: Variant | None = None
    v: Variant | None = None
    sink_tokens: int = PAGE_TOKENS
    window_pages: int = 0
    coded: tuple[int, int | None] = (0, None)


RAW = Reading()
Observer = Callable[[Any, Tensor, Tensor, Tensor, float], None]


class Simulation:
    """A model whose attention reads by `reading`. `observe`, if given, sees (module, q [B, Hq, T, D], k, v [B, Hkv, T, D], scale) of each layer."""

    def __init__(self, model: Any) -> None:
        self.model, self.reading = model, RAW
        self.moments: dict[int, Moments] = {}
        self.observe: Observer | None = None
        config = model.config.get_text_config(decoder=True)
        self.layers: int = config.num_hidden_layers
        self.dim: int = getattr(config, "head_dim", None) or config.hidden_size // config.num_attention_heads
        self._attended = 0
        name = _NAME.format(next(_MADE))
        AttentionInterface.register(name, self._attention)
        AttentionMaskInterface.register(name, lambda *_, **__: None)
        model.set_attn_implementation(name)

    @torch.inference_mode()
    def logits(self, tokens: Tensor, reading: Reading = RAW, *, scored: int) -> Tensor:
        """Logits float32 [B, scored, vocabulary] after the last tokens of `tokens`, int64 [B, T]. Raises Unsupported."""
        self.reading, self._attended = reading, 0
        out = self.model(tokens.to(self.model.device), use_cache=False, logits_to_keep=scored).logits
        if self._attended != self.layers:
            raise Unsupported(f"{type(self.model).__name__}: {self._attended} of {self.layers} layers can be simulated")
        return out.float()  # type: ignore[no-any-return]

    def _attention(
        self, module: Any, query: Tensor, key: Tensor, value: Tensor, mask: Tensor | None, **options: Any
    ) -> tuple[Tensor, None]:
        """transformers' signature. Returns [B, T, Hq, D] and no weights."""
        if given := [name for name in ("softcap", "s_aux", "sliding_window") if options.get(name) is not None]:
            raise Unsupported(
                f"{type(module).__name__}: {given[0]} is not simulated; take a model with plain attention"
            )
        scale = options.get("scaling") or query.shape[-1] ** -0.5
        self._attended += 1
        if self.observe:
            self.observe(module, query, key, value, scale)
        moments, reading = self.moments.get(module.layer_idx), self.reading
        k, v = (read_back(side, x, reading, moments) for side, x in ((reading.k, key), (reading.v, value)))
        rows = [
            _attend(query[b], (key[b], value[b]), (k[b], v[b]), scale, reading.window_pages) for b in range(len(query))
        ]
        return torch.stack(rows).transpose(1, 2).contiguous(), None


def read_back(side: Variant | None, x: Tensor, reading: Reading, moments: Moments | None) -> Tensor:
    """History as queries of later pages read it: x float32 [B, Hkv, T, D], whole pages coded but for what stays raw."""
    pages, sink = x.shape[2] // PAGE_TOKENS, reading.sink_tokens
    whole_sinks = sink // PAGE_TOKENS
    if side is None or pages <= whole_sinks:
        return x
    body = x[:, :, whole_sinks * PAGE_TOKENS : pages * PAGE_TOKENS].float()
    if cut := sink % PAGE_TOKENS:
        body = torch.cat([body[:, :, cut : cut + 1].expand(-1, -1, cut, -1), body[:, :, cut:]], dim=2)
    coded = side.read(body.unflatten(2, (-1, PAGE_TOKENS)), moments).flatten(2, 3)  # type: ignore[arg-type]
    first, end = max(sink, reading.coded[0]), min(reading.coded[1] or x.shape[2], pages * PAGE_TOKENS)
    out = x.clone()
    if first < end:
        shift = whole_sinks * PAGE_TOKENS
        out[:, :, first:end] = coded[:, :, first - shift : end - shift]
    return out


def raw_for(tokens: int, window_pages: int, device: torch.device) -> tuple[Tensor, Tensor]:
    """bool [T, T] of query and token: whether the token's page is the query's own or in its window; and whether it may be read at all."""
    place = torch.arange(tokens, device=device)
    page = place // PAGE_TOKENS
    return page[None] >= page[:, None] - window_pages, place[None] <= place[:, None]


def _attend(
    q: Tensor, raw: tuple[Tensor, Tensor], coded: tuple[Tensor, Tensor], scale: float, window_pages: int
) -> Tensor:
    """One sequence: q [Hq, T, D], raw and coded keys and values [Hkv, T, D] each. Returns [Hq, T, D]."""
    Hq, T, D = q.shape
    grouped = q.reshape(raw[0].shape[0], -1, T, D)
    near, seen = raw_for(T, window_pages, q.device)
    of_raw, of_coded = (grouped @ k[:, None].transpose(-1, -2) for k in (raw[0], coded[0]))
    scores = torch.where(near, of_raw, of_coded)
    weights = torch.softmax((scores * scale).masked_fill(~seen, -math.inf), dim=-1)
    out = (weights * near) @ raw[1][:, None] + (weights * ~near) @ coded[1][:, None]
    return out.reshape(Hq, T, D)


# ---- what a record would know ----------------------------------------------------------------------------------------


def calibrate(simulation: Simulation, documents: Sequence[Tensor]) -> None:
    """Moments of every layer from documents int64 [T], for `simulation.moments`; the first page is left out. Raises UsageError."""
    sums: dict[int, dict[str, Tensor]] = {}

    def watch(module: Any, q: Tensor, k: Tensor, v: Tensor, scale: float) -> None:
        pages = k[:, :, PAGE_TOKENS : k.shape[2] // PAGE_TOKENS * PAGE_TOKENS].unflatten(2, (-1, PAGE_TOKENS)).double()
        queries = q[:, :, PAGE_TOKENS:].unflatten(1, (k.shape[1], -1)).double()
        new = {
            "k_mean": k[:, :, PAGE_TOKENS:].double().mean((0, 2)),
            "v_mean": v[:, :, PAGE_TOKENS:].double().mean((0, 2)),
            "q_square": (queries * queries).mean((0, 2, 3)),
            "k_square": (pages - pages.mean(-2, keepdim=True)).square().mean((0, 2, 3)),
        }
        held = sums.setdefault(module.layer_idx, {name: torch.zeros_like(x) for name, x in new.items()})
        for name, x in new.items():
            held[name] += x / len(documents)

    if not documents or min(map(len, documents)) < 2 * PAGE_TOKENS:
        raise UsageError("calibration", f"documents of at least {2 * PAGE_TOKENS} tokens", "none or shorter ones")
    simulation.observe = watch
    try:
        for document in documents:
            simulation.logits(document[None], scored=1)
    finally:
        simulation.observe = None
    simulation.moments = {layer: _moments(**held) for layer, held in sums.items()}


def _moments(k_mean: Tensor, v_mean: Tensor, q_square: Tensor, k_square: Tensor) -> Moments:
    """From means over tokens, float64 [Hkv, D]."""
    of_q, of_k = (x.unflatten(-1, (2, -1)).mean(-2) for x in (q_square, k_square))
    balance = (of_q / of_k.clamp_min(1e-12)).clamp_min(1e-12).pow(0.25)
    balance = balance / balance.log().mean(-1, keepdim=True).exp()
    return Moments(*(x.float()[:, None, None] for x in (k_mean, v_mean, torch.cat([balance, balance], dim=-1))))


# ---- what is measured ------------------------------------------------------------------------------------------------


@dataclass(frozen=True)
class Sums:
    """Of one document: scored positions, KL(raw || variant) in nats and positions with the same likeliest token, each summed."""

    positions: int
    kl_nats: float
    top1: int


def compare(base: Tensor, other: Tensor) -> Sums:
    """base: log-probabilities, other: logits, float32 [positions, vocabulary]. Raises NotFinite."""
    kl, same = base.new_zeros((), dtype=torch.float64), base.new_zeros((), dtype=torch.int64)
    for first in range(0, len(base), _SLICE):
        p, logits = base[first : first + _SLICE], other[first : first + _SLICE]
        kl += (p.exp() * (p - logits.log_softmax(dim=-1))).sum(dtype=torch.float64)
        same += (p.argmax(dim=-1) == logits.argmax(dim=-1)).sum()
    if not math.isfinite(kl):
        raise NotFinite("logits: expected finite values, got NaN or infinity")
    return Sums(len(base), float(kl), int(same))


def greedy(
    simulation: Simulation,
    reading: Reading,
    prompts: Sequence[Sequence[int]],
    drafts: Sequence[Sequence[int]],
    ends: set[int],
    most: int,
) -> list[list[int]]:
    """What greedy decoding writes after each prompt, up to a token of `ends` or `most` tokens: the fixed point of rereading a draft.

    Each pass reads prompt and draft at once and puts the likeliest tokens in the draft's place. What stands before the first change is what
    decoding would write, so each pass settles one token more at least, and where the draft is right, all.
    """  # fmt: skip
    texts = [list(draft[:most]) for draft in drafts]
    settled, open_rows = [0] * len(texts), [*range(len(texts))]
    while open_rows:
        rows = [[*prompts[i], *texts[i], *[0] * (most - len(texts[i]))] for i in open_rows]
        width = max(map(len, rows))
        scored = width - min(len(prompts[i]) for i in open_rows) + 1
        tokens = torch.tensor([[*row, *[0] * (width - len(row))] for row in rows])
        best = simulation.logits(tokens, reading, scored=min(scored, width)).argmax(dim=-1).cpu()
        for i, row in zip([*open_rows], best, strict=True):
            at = len(prompts[i]) - 1 - (width - len(row))
            new = row[at : at + most].tolist()
            same = next((j for j, (a, b) in enumerate(zip(texts[i], new, strict=False)) if a != b), len(texts[i]))
            settled[i] = min(max(settled[i], same) + 1, most)
            texts[i] = new
            end = next((j for j, token in enumerate(new[: settled[i]]) if token in ends), None)
            if end is not None:
                texts[i] = new[: end + 1]
            if end is not None or settled[i] == most:
                open_rows.remove(i)
    return texts
