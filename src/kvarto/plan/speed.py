"""Bounds: how fast a step could be if memory and arithmetic ran at their rated speed and nothing else took time. Upper bounds of speed. No torch.

    decode step >= max(bytes read / bandwidth, operations / compute);  bytes = active weights + keys and values of the batch
    KV share s = KV / (weights + KV);  r times smaller KV gains at most 1 / (1 - s + s / r)

A quantized step also has costs that a bound does not see. Here they are a constant a caching layer, from which break-even contexts follow: 4.4
microseconds a layer, as vLLM measured on Llama-3.1-8B, FP8, H100, 32 layers (blog of 2026-04-22: intercept 6.44 to 6.58 ms, break-even at 7,010
tokens where this gives 7,157). `Measured` replaces bound and constant by what a benchmark of kernels took.
"""

from __future__ import annotations

import bisect
from dataclasses import dataclass

from kvarto.plan.cached import CachedModel, KeyValue, Latent, State
from kvarto.plan.gpu import Gpu
from kvarto.plan.measured import Measured
from kvarto.plan.ours import read_entries
from kvarto.plan.weights import Weights
from kvarto.plan.written import KvFormat, bytes_of

LAYER_COST_SECONDS = 0.14e-3 / 32
_FARTHEST_TOKENS = 1 << 24


@dataclass(frozen=True)
class Machine:
    """A model on GPUs: `tp` ranks read their part at once, `pp` stages one after another."""

    model: CachedModel
    weights: Weights
    gpu: Gpu
    tp: int = 1
    layer_cost_seconds: float = LAYER_COST_SECONDS

    # ---- bounds ----------------------------------------------------------------------------------------------------

    def weights_nbytes(self, batch: int) -> float:
        """Weights that a rank reads in a step."""
        return self.weights.read_nbytes(batch) / self.tp

    def kv_nbytes(self, kv: KvFormat, batch: int, context_tokens: int) -> float:
        """Keys and values that a rank reads in a step."""
        return float(batch * bytes_of(kv, self.model, self.tp).read(context_tokens))

    def kv_share(self, kv: KvFormat, batch: int, context_tokens: int) -> float:
        """Part of the bytes of a step that is keys and values."""
        read = self.kv_nbytes(kv, batch, context_tokens)
        return read / (read + self.weights_nbytes(batch))

    def step_seconds(self, kv: KvFormat, batch: int, context_tokens: int) -> float:
        """The least that a decode step of `batch` sequences can take."""
        nbytes = self.weights_nbytes(batch) + self.kv_nbytes(kv, batch, context_tokens)
        return max(nbytes / self.gpu.bandwidth, self._decode_compute_seconds(kv, batch, context_tokens))

    def gain(self, kv: KvFormat, baseline: KvFormat, batch: int, context_tokens: int) -> float:
        """How much faster than with the baseline a step could be, at most: 1.2 is 20 % faster."""
        return self.step_seconds(baseline, batch, context_tokens) / self.step_seconds(kv, batch, context_tokens)

    def break_even_tokens(self, kv: KvFormat, baseline: KvFormat, batch: int) -> int | None:
        """The context from which on a step saves more than the constant costs; None if it never does."""
        cost = self.layer_cost_seconds * self.model.caching_layers

        def pays(tokens: int) -> bool:
            saved = self.kv_nbytes(baseline, batch, tokens) - self.kv_nbytes(kv, batch, tokens)
            return saved / self.gpu.bandwidth > cost

        return first_true(pays)

    def prefill_seconds(self, prompt_tokens: int) -> float:
        """The least that the prompt of one sequence can take: the head is asked once; attention of latents, which engines expand, is left out."""
        p, flops = self.weights.parameters, self.gpu.flops(self.weights.dtype)
        reads = self.weights_nbytes(prompt_tokens) / self.gpu.bandwidth
        if not flops:
            return reads
        products = 2 * (p.active - (p.head or p.embedding)) * prompt_tokens / flops
        attention = 0.0
        for part, count in self.model.parts.items():
            if isinstance(part, KeyValue):
                limit = min(part.window_tokens or prompt_tokens, part.read_entries or prompt_tokens, prompt_tokens)
                pairs = prompt_tokens * limit - limit * limit / 2
                attention += count * 2 * self.model.query_heads * (part.k_dim + part.v_dim) * pairs
        return max(reads, (products + attention / max(self.gpu.bf16_flops, self.gpu.fp8_flops)) / self.tp)

    def _decode_compute_seconds(self, kv: KvFormat, batch: int, context_tokens: int) -> float:
        """Products with weights, and with keys and values: those of 16 bits at the rate of 16 bits, smaller ones at the best there is for 8."""
        flops = self.gpu.flops(self.weights.dtype)
        if not flops:
            return 0.0
        total = 0.0
        for part, count in self.model.parts.items():
            if isinstance(part, KeyValue | Latent):
                numbers = part.k_dim + part.v_dim if isinstance(part, KeyValue) else 2 * part.dim - part.rope_dim
                total += count * 2 * self.model.query_heads * numbers * read_entries(part, context_tokens)
        rate = self.gpu.bf16_flops if kv.is_raw else max(self.gpu.bf16_flops, self.gpu.fp8_flops)
        return batch * (2 * self.weights.parameters.active / flops + total / rate) / self.tp

    # ---- measured --------------------------------------------------------------------------------------------------

    def measured_seconds(self, measured: Measured, kv: KvFormat, batch: int, context_tokens: int) -> float | None:
        """A step with weights at the measured bandwidth and attention as the kernels took for as many bytes.

        None if the format was not measured, or only with more bytes than this.
        """
        times = measured.series(kv)
        if times is None:
            return None
        held = bytes_of(kv, self.model, self.tp)
        reads = [(float(batch * nbytes), count) for nbytes, count in held.attention_reads(context_tokens)]
        if max((nbytes for nbytes, _ in reads), default=0.0) < times.least_nbytes:
            return None
        attention = sum(count * times.seconds(nbytes) for nbytes, count in reads)
        states = sum(2 * count * part.nbytes for _, part, count in held.counts if isinstance(part, State))
        return attention + (self.weights_nbytes(batch) + batch * states) / measured.bandwidth

    def measured_break_even_tokens(
        self, measured: Measured, kv: KvFormat, baseline: KvFormat, batch: int
    ) -> int | None:
        """The context from which on the measured step is shorter than the baseline's, at all larger powers of two up to a million; or the shortest
        that was measured. None if there is none."""

        def saves(tokens: int) -> bool | None:
            mine = self.measured_seconds(measured, kv, batch, tokens)
            other = self.measured_seconds(measured, baseline, batch, tokens)
            return None if mine is None or other is None else mine < other

        least = None
        for tokens in (1 << power for power in range(20, 4, -1)):
            saved = saves(tokens)
            if not saved:
                if least is not None and saved is False:
                    return bisect.bisect_left(range(least), True, tokens, key=lambda at: bool(saves(at)))
                break
            least = tokens
        return least


def first_true(holds: object) -> int | None:
    """The smallest number of tokens for which a monotone condition holds, None if it does for none."""
    assert callable(holds)
    if not holds(_FARTHEST_TOKENS):
        return None
    return bisect.bisect_left(range(_FARTHEST_TOKENS), True, 1, key=holds)
