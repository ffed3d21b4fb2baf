"""How many parameters a model has, of which a step reads what, by the formulas of its architecture; and what they weigh in a dtype. No torch.

Counted by what they are, since quantized checkpoints keep embeddings (and gpt-oss all but its experts) in 16 bits:

    embedding   the input table, of which a step reads a row a token; tied to the head it is read whole
    head        the output matrix, 0 if tied
    attention   projections of attention and linear attention
    dense       MLPs that every token uses, shared experts and routers among them
    expert      one routed expert; `experts` of them in each of `expert_layers` layers, `chosen` a token
Norms, biases and vision towers are not counted (well below 1 % of the text part, or not read by a decode step).
"""

from __future__ import annotations

import json
import math
import struct
from dataclasses import dataclass
from pathlib import Path
from typing import Any

from kvarto.errors import Unsupported, UsageError
from kvarto.plan.config import Config
from kvarto.plan.fields import Fields

_MOST_HEADER_BYTES = 256 << 20
BYTES = {
    "fp32": 4.0,
    "bf16": 2.0,
    "fp16": 2.0,
    "fp8": 1.0,
    "int8": 1.0,
    "int4": 0.5 + 2.5 / 128,
    "nvfp4": 0.5625,
    "mxfp4": 0.53125,
}
"""Bytes a parameter: int4 in groups of 128 with a 16-bit scale and a 4-bit zero, as AWQ and GPTQ; nvfp4 16 to an fp8 scale; mxfp4 32."""


@dataclass(frozen=True)
class Parameters:
    """See the module docstring. `source`: where the numbers come from."""

    embedding: int
    head: int
    attention: int
    dense: int
    expert: int = 0
    experts: int = 0
    expert_layers: int = 0
    chosen: int = 0
    source: str = "the config"

    @property
    def routed(self) -> int:
        """All routed experts together."""
        return self.expert * self.experts * self.expert_layers

    @property
    def total(self) -> int:
        """All of them."""
        return self.embedding + self.head + self.attention + self.dense + self.routed

    @property
    def active(self) -> int:
        """Those that one token meets in a matrix product; a table that is only looked up does not count."""
        head = self.head or self.embedding
        return head + self.attention + self.dense + self.expert * self.chosen * self.expert_layers

    def experts_met(self, tokens: int) -> float:
        """How many of a layer's experts a batch of so many tokens meets, if each chooses at random."""
        return self.experts * (1 - (1 - self.chosen / self.experts) ** tokens) if self.experts else 0.0


@dataclass(frozen=True)
class Weights:
    """Parameters and what they weigh: `inner_bytes` for each one of attention and dense, `expert_bytes` for experts, 2 for embedding and head."""

    parameters: Parameters
    dtype: str
    inner_bytes: float
    expert_bytes: float
    outer_bytes: float = 2.0
    nbytes_known: int | None = None

    @property
    def nbytes(self) -> int:
        """All weights."""
        if self.nbytes_known is not None:
            return self.nbytes_known
        p = self.parameters
        outer = (p.embedding + p.head) * self.outer_bytes
        return round(outer + (p.attention + p.dense) * self.inner_bytes + p.routed * self.expert_bytes)

    def read_nbytes(self, batch: int) -> float:
        """What a decode step of a batch reads of them: experts as far as the batch meets them."""
        p = self.parameters
        head = (p.head or p.embedding) * self.outer_bytes
        met = p.experts_met(batch) * p.expert_layers * p.expert * self.expert_bytes
        return head + (p.attention + p.dense) * self.inner_bytes + met


def weights_of(config: Config, dtype: str | None) -> Weights:
    """By the checkpoint's own quantization, or as if in `dtype`. Raises Unsupported if the formulas do not cover the architecture."""
    parameters = count(config.fields)
    if dtype is not None:
        return as_dtype(parameters, dtype)
    own, only_experts = _own_dtype(config)
    outer = 4.0 if own == "fp32" else 2.0
    inner = outer if only_experts else BYTES[own]
    known = safetensors_nbytes(config.folder) if config.folder else None
    if known is not None:
        measured = f"the config; bytes of the checkpoint in {config.folder}"
        parameters = Parameters(**vars(parameters) | {"source": measured})
        # Read in proportion to what really lies there.
        made = Weights(parameters, own, inner, BYTES[own], outer)
        scale = known / made.nbytes
        return Weights(parameters, own, inner * scale, BYTES[own] * scale, outer * scale, known)
    return Weights(parameters, own, inner, BYTES[own], outer)


def as_dtype(parameters: Parameters, dtype: str) -> Weights:
    """All inner matrices in one dtype. Raises UsageError for one that is not known."""
    if dtype not in BYTES:
        raise UsageError("--weights", f"one of {', '.join(BYTES)}", repr(dtype))
    return Weights(parameters, dtype, BYTES[dtype], BYTES[dtype], 4.0 if dtype == "fp32" else 2.0)


def by_number(parameters: int, active: int | None) -> Parameters:
    """Of a model of which only the number is known: dense, or with `active` as one part that all tokens use and the rest that none does."""
    if active is not None and not 0 < active <= parameters:
        raise UsageError("--active-parameters", f"1 to the {parameters} of --parameters", active)
    used = parameters if active is None else active
    return Parameters(parameters - used, 1, used - 1, 0, source="--parameters")


def safetensors_nbytes(folder: Path) -> int | None:
    """Bytes of the tensors in a folder of safetensors, by their headers; None if there are none that can be read."""
    total = 0
    paths = sorted(folder.glob("*.safetensors"))
    for path in paths:
        try:
            with path.open("rb") as file:
                (length,) = struct.unpack("<Q", file.read(8))
                if length > _MOST_HEADER_BYTES:
                    return None
                header = json.loads(file.read(length))
            total += sum(
                entry["data_offsets"][1] - entry["data_offsets"][0]
                for name, entry in header.items()
                if name != "__metadata__"
            )
        except (OSError, ValueError, struct.error, KeyError, TypeError, AttributeError):
            return None
    return total or None


# ---- counting ----------------------------------------------------------------------------------------------------------


def count(fields: Fields) -> Parameters:
    """The parameters of the text part. Raises Unsupported for architectures whose matrices are not known here."""
    table = fields.whole("vocab_size") * fields.hidden
    attention = _attention(fields)
    dense, expert, experts, layers, chosen = _mlps(fields)
    tied = fields.flag("tie_word_embeddings", default=fields.family in _TIED)
    return Parameters(table, 0 if tied else table, attention, dense, expert, experts, layers, chosen)


_TIED = (
    "gpt2",
    "gemma",
    "gemma2",
    "gemma3",
    "gemma3_text",
    "gemma4",
    "gemma4_text",
    "bloom",
    "falcon",
    "mpt",
    "cohere",
    "cohere2",
)
_TWO_MATRICES = (
    "gpt2",
    "gptj",
    "gpt_neox",
    "opt",
    "bloom",
    "codegen",
    "falcon",
    "mpt",
    "starcoder2",
    "phi",
    "nemotron",
    "nemotron_h",
    "gpt_bigcode",
)
_NOT_COVERED = (
    "kimi_linear", "bamba", "granitemoehybrid", "falcon_h1", "jamba", "lfm2", "lfm2_moe", "minimax", "minimax_text_01", "gemma3n", "gemma3n_text",
    "deepseek_v4", "deepseek_ref", "minicpm3", "dots1", "ernie4_5_moe", "hunyuan_v1_moe", "step3p7",
)  # fmt: skip


def _attention(fields: Fields) -> int:
    family, h = fields.family, fields.hidden
    if family in _NOT_COVERED:
        raise Unsupported(
            f"{fields.name}: no formula here counts the weights of a {family}; say --parameters (and --active-parameters), or --weights-bytes"
        )
    if fields.has("kv_lora_rank"):
        return fields.layers * _latent_attention(fields)
    if family == "nemotron-nas":
        return sum(
            _grouped(h, fields.query_heads, layer[0].heads, fields.head_dim) for layer in _layers(fields) if layer
        )
    if family == "nemotron_h":
        return _nemotron_h_mixers(fields)
    if fields.has("linear_num_value_heads"):
        return _gated_delta_attention(fields)
    if family in ("gemma4", "gemma4_text"):
        shares_v = fields.flag("attention_k_eq_v")
        full = {layer[0].k_dim for layer in _layers(fields) if layer and layer[0].window_tokens is None}
        total = 0
        for layer in _layers(fields):
            if layer:
                part = layer[0]
                total += (
                    h
                    * part.k_dim
                    * (2 * fields.query_heads + part.heads * (1 if shares_v and part.k_dim in full else 2))
                )
        return total
    if family.startswith("mimo_v2"):
        return sum(
            h
            * (
                fields.query_heads * (layer[0].k_dim + layer[0].v_dim)
                + layer[0].heads * (layer[0].k_dim + layer[0].v_dim)
            )
            for layer in _layers(fields)
        )
    kv_heads = _layers(fields)[0][0].heads
    return fields.layers * _grouped(h, fields.query_heads, kv_heads, fields.head_dim) + _index_keys(fields)


def _layers(fields: Fields) -> tuple[Any, ...]:
    from kvarto.plan.families import families

    return families[fields.family].read(fields)


def _grouped(h: int, query_heads: int, kv_heads: int, dim: int) -> int:
    return 2 * h * dim * (query_heads + kv_heads)


def _index_keys(fields: Fields) -> int:
    if not fields.has("sparse_attention_config"):
        return 0
    sparse = fields.part("sparse_attention_config")
    layers = sum(sparse.switches("sparse_attention_freq", fields.layers) or ())
    return layers * fields.hidden * sparse.whole("sparse_index_dim") * (1 + sparse.whole("sparse_num_index_heads"))


def _latent_attention(fields: Fields) -> int:
    h, heads, rank = fields.hidden, fields.query_heads, fields.whole("kv_lora_rank")
    rope, nope, v = (fields.whole(key) for key in ("qk_rope_head_dim", "qk_nope_head_dim", "v_head_dim"))
    q_rank = fields.whole("q_lora_rank", default=0, least=0)
    queries = heads * (nope + rope)
    total = (
        (h * q_rank + q_rank * queries if q_rank else h * queries)
        + h * (rank + rope)
        + rank * heads * (nope + v)
        + heads * v * h
    )
    if fields.has("index_head_dim"):
        dim, index_heads = fields.whole("index_head_dim"), fields.whole("index_n_heads")
        total += q_rank * dim * index_heads + h * (dim + index_heads)
    return total


def _gated_delta_attention(fields: Fields) -> int:
    h, total = fields.hidden, 0
    k = fields.whole("linear_num_key_heads") * fields.whole("linear_key_head_dim")
    v_heads = fields.whole("linear_num_value_heads")
    v = v_heads * fields.whole("linear_value_head_dim")
    linear = h * (2 * k + 2 * v + 2 * v_heads) + v * h
    gate = 2 if fields.flag("attn_output_gate", default=fields.family == "qwen3_next") else 1
    full = h * fields.head_dim * ((gate + 1) * fields.query_heads + 2 * fields.kv_heads)
    for layer in _layers(fields):
        total += full if any(not hasattr(part, "head_nbytes") for part in layer) else linear
    return total


def _nemotron_h_mixers(fields: Fields) -> int:
    h, total = fields.hidden, 0
    inner = fields.whole("mamba_num_heads") * fields.whole("mamba_head_dim")
    groups = fields.whole("n_groups") * fields.whole("ssm_state_size")
    mamba = h * (2 * inner + 2 * groups + fields.whole("mamba_num_heads")) + inner * h
    full = _grouped(h, fields.query_heads, fields.kv_heads, fields.head_dim)
    for layer in _layers(fields):
        total += 0 if not layer else mamba if hasattr(layer[0], "head_nbytes") else full
    return total


def _mlps(fields: Fields) -> tuple[int, int, int, int, int]:
    """(dense parameters, those of an expert, experts a layer, layers with experts, experts a token)."""
    h, matrices = fields.hidden, 2 if fields.family in _TWO_MATRICES else 3
    if fields.family == "nemotron-nas":
        return _nas_mlps(fields), 0, 0, 0, 0
    if fields.family == "nemotron_h":
        return _nemotron_h_mlps(fields)
    if fields.family == "gpt_bigcode" or not fields.has("intermediate_size"):
        width = fields.whole("n_inner", "ffn_dim", "ffn_hidden_size", "moe_intermediate_size", default=4 * h)
    else:
        width = fields.whole("intermediate_size")
    experts = fields.whole("n_routed_experts", "num_local_experts", "num_experts", default=0, least=0)
    if not experts:
        return fields.layers * matrices * h * width, 0, 0, 0, 0
    sparse = _sparse_layers(fields)
    expert = matrices * h * fields.whole("moe_intermediate_size", default=width)
    shared_width = fields.whole("shared_expert_intermediate_size", "shared_intermediate_size", default=0, least=0)
    if not shared_width and fields.has("moe_intermediate_size"):
        shared_width = fields.whole("moe_intermediate_size") * fields.whole("n_shared_experts", default=0, least=0)
    if fields.family.startswith("llama4"):
        expert, shared_width, width = 3 * h * width, width, fields.whole("intermediate_size_mlp")
    dense_width = fields.whole("dense_intermediate_size", default=width)
    beside = fields.layers if fields.family.startswith("gemma4") else fields.layers - sparse
    dense = beside * matrices * h * dense_width + sparse * (matrices * h * shared_width + h * experts)
    return (
        dense,
        expert,
        experts,
        sparse,
        fields.whole("num_experts_per_tok", "top_k_experts", "num_experts_per_token", "moe_topk"),
    )


def _sparse_layers(fields: Fields) -> int:
    """Layers with experts."""
    kinds = fields.items("mlp_layer_types", fields.layers)
    if kinds is not None:
        return sum(kind == "sparse" for kind in kinds)
    if isinstance(fields.data.get("moe_layer_freq"), list):
        return sum(fields.switches("moe_layer_freq", fields.layers) or ())
    if fields.family.startswith("llama4"):
        return fields.layers // fields.whole("interleave_moe_layer_step", default=1)
    dense = fields.items("mlp_only_layers") or []
    step = fields.whole("decoder_sparse_step", default=1)
    first = fields.whole("first_k_dense_replace", default=0, least=0)
    return sum(i >= first and i not in dense and (i + 1) % step == 0 for i in range(fields.layers))


def _nas_mlps(fields: Fields) -> int:
    """Widths are multiples of 256, two thirds of `ffn_mult` times the width."""
    h, total = fields.hidden, 0
    for block in fields.items("block_configs", fields.layers) or []:
        part = block["ffn"]
        if part.get("replace_with_linear"):
            total += h * h
        elif not part.get("no_op"):
            total += 3 * h * 256 * math.ceil(int(2 * part["ffn_mult"] * h / 3) / 256)
    return total


def _nemotron_h_mlps(fields: Fields) -> tuple[int, int, int, int, int]:
    if fields.has("moe_latent_size"):
        raise Unsupported(f"{fields.name}: no formula here counts latent experts; say --parameters, or --weights-bytes")
    h, kinds = (
        fields.hidden,
        fields.items("layers_block_type") or list(fields.data.get("hybrid_override_pattern") or ""),
    )
    dense = sum(kind in ("-", "mlp") for kind in kinds) * 2 * h * fields.whole("intermediate_size")
    sparse = sum(kind in ("E", "moe") for kind in kinds)
    if not sparse:
        return dense, 0, 0, 0, 0
    experts = fields.whole("n_routed_experts")
    shared = 2 * h * fields.whole("moe_shared_expert_intermediate_size") * fields.whole("n_shared_experts", default=1)
    expert = 2 * h * fields.whole("moe_intermediate_size")
    return dense + sparse * (shared + h * experts), expert, experts, sparse, fields.whole("num_experts_per_tok")


# ---- dtypes ------------------------------------------------------------------------------------------------------------

_TORCH = {"float32": "fp32", "float16": "fp16", "bfloat16": "bf16"}


def _own_dtype(config: Config) -> tuple[str, bool]:
    """(The checkpoint's dtype by its config; whether only the experts are in it). Raises Unsupported for a quantization that is not known."""
    said = config.whole.get("quantization_config") or config.fields.data.get("quantization_config")
    if not isinstance(said, dict):
        name = str(config.fields.data.get("dtype") or config.fields.data.get("torch_dtype") or "bfloat16").removeprefix(
            "torch."
        )
        if name not in _TORCH:
            raise Unsupported(f"{config.name}: weights of dtype {name[:40]} are not known; say --weights")
        return _TORCH[name], False
    method = str(said.get("quant_method", "")).lower()
    words = json.dumps(said).lower()
    if method == "mxfp4":
        return "mxfp4", True
    if "nvfp4" in words:
        return "nvfp4", False
    if method in ("fp8", "fbgemm_fp8", "fp8_e4m3") or (
        method in ("modelopt", "compressed-tensors") and '"fp8' in words
    ):
        return "fp8", False
    if method in ("awq", "gptq") and said.get("bits", said.get("w_bit", 4)) == 4:
        return "int4", False
    if method == "compressed-tensors" and '"num_bits": 4' in words:
        return "int4", False
    if method == "compressed-tensors" and '"num_bits": 8' in words:
        return ("fp8" if '"type": "float"' in words else "int8"), False
    raise Unsupported(
        f"{config.name}: weights quantized by {method[:40] or 'nobody named'} are not known; say --weights"
    )
