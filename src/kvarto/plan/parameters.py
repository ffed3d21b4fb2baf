"""How many parameters a model has, by the formulas of its architecture, and of which a step reads what. No torch.

    embedding   the input table, of which a step reads a row a token; tied to the head it is read whole
    head        the output matrix, 0 if tied
    attention   projections of attention and linear attention
    dense       MLPs that every token uses, shared experts and routers among them
    expert      one routed expert; `experts` of them in each of `expert_layers` layers, `chosen` a token
Norms, biases and vision towers are not counted (well below 1 % of the text part, or not read by a decode step).
"""

from __future__ import annotations

import math
from dataclasses import dataclass

from kvarto.errors import Unsupported, UsageError
from kvarto.plan.cached import KeyValue, Layer, State
from kvarto.plan.families import families
from kvarto.plan.fields import Fields


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


def by_number(parameters: int, active: int | None) -> Parameters:
    """Of a model of which only the number is known: dense, or with `active` as one part that all tokens use and the rest that none does."""
    if active is not None and not 0 < active <= parameters:
        raise UsageError("--active-parameters", f"1 to the {parameters} of --parameters", active)
    used = parameters if active is None else active
    return Parameters(parameters - used, 1, used - 1, 0, source="--parameters")


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
    family, h, heads = fields.family, fields.hidden, fields.query_heads
    if family in _NOT_COVERED:
        raise Unsupported(
            f"{fields.name}: no formula here counts the weights of a {family}; say --parameters (and --active-parameters), or --weights-bytes"
        )
    if fields.has("kv_lora_rank"):
        return fields.layers * _latent_attention(fields)
    if family == "nemotron_h":
        return _nemotron_h_mixers(fields)
    if fields.has("linear_num_value_heads"):
        return _gated_delta_attention(fields)
    contents = _contents(fields)
    if family.startswith("gemma4"):
        # Where V is K before its norm, one projection makes both.
        shares = fields.flag("attention_k_eq_v", default=True)
        return sum(
            h * part.k_dim * (2 * heads + part.heads * (1 if shares and not part.window_tokens else 2))
            for part in contents
        )
    total = sum(h * (heads + part.heads) * (part.k_dim + part.v_dim) for part in contents)
    return total + _index_keys(fields)


def _read(fields: Fields) -> tuple[Layer, ...]:
    return families[fields.family].read(fields)


def _contents(fields: Fields) -> list[KeyValue]:
    """Keys and values of each layer that has any."""
    return [part for layer in _read(fields) for part in layer if isinstance(part, KeyValue)]


def _recurrent_layers(fields: Fields) -> int:
    return sum(any(isinstance(part, State) for part in layer) for layer in _read(fields))


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
    h = fields.hidden
    k = fields.whole("linear_num_key_heads") * fields.whole("linear_key_head_dim")
    v_heads = fields.whole("linear_num_value_heads")
    v = v_heads * fields.whole("linear_value_head_dim")
    linear = h * (2 * k + 2 * v + 2 * v_heads) + v * h
    gate = 2 if fields.flag("attn_output_gate", default=fields.family == "qwen3_next") else 1
    full = h * fields.head_dim * ((gate + 1) * fields.query_heads + 2 * fields.kv_heads)
    recurrent = _recurrent_layers(fields)
    return recurrent * linear + (fields.layers - recurrent) * full


def _nemotron_h_mixers(fields: Fields) -> int:
    h = fields.hidden
    inner = fields.whole("mamba_num_heads") * fields.whole("mamba_head_dim")
    groups = fields.whole("n_groups") * fields.whole("ssm_state_size")
    mamba = h * (2 * inner + 2 * groups + fields.whole("mamba_num_heads")) + inner * h
    full = _grouped(h, fields.query_heads, fields.kv_heads, fields.head_dim)
    return _recurrent_layers(fields) * mamba + len(_contents(fields)) * full


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
    kinds = fields.words("mlp_layer_types", fields.layers)
    if kinds is not None:
        return sum(kind == "sparse" for kind in kinds)
    if isinstance(fields.data.get("moe_layer_freq"), list):
        return sum(fields.switches("moe_layer_freq", fields.layers) or ())
    if fields.family.startswith("llama4"):
        return fields.layers // fields.whole("interleave_moe_layer_step", default=1)
    dense = fields.wholes("mlp_only_layers") or []
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
