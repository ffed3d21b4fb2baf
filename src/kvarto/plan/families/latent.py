"""One latent vector for all heads (MLA), with or without index keys for sparse attention (DSA), and DeepSeek-V4's compressed layers."""

from __future__ import annotations

from dataclasses import replace

from kvarto.errors import UsageError
from kvarto.plan.cached import IndexKey, KeyValue, Latent, Layer
from kvarto.plan.families import NOT_SERVED, Family
from kvarto.plan.fields import Fields

_MTP = "the multi-token-prediction layer is not counted"
_EXPANDED = "engines that keep MLA expanded (transformers) need far more than the latent that is counted here"


def latent_of(fields: Fields) -> Latent:
    """The vector of a layer."""
    rope = fields.whole("qk_rope_head_dim", least=0)
    return Latent(fields.whole("kv_lora_rank") + rope, rope)


def mla(fields: Fields) -> tuple[Layer, ...]:
    """Every layer alike."""
    return ((latent_of(fields),),) * fields.layers


def dsa(fields: Fields) -> tuple[Layer, ...]:
    """And an index key in each layer that chooses tokens for itself; others take an earlier layer's choice."""
    latent = replace(latent_of(fields), read_entries=fields.whole("index_topk"))
    key = IndexKey(fields.whole("index_head_dim"))
    return tuple((latent, key) if kind == "full" else (latent,) for kind in _indexers(fields))


def _indexers(fields: Fields) -> list[str]:
    """full or shared for each layer: as said, or by a pattern of F and S, or by period and offset (transformers' GlmMoeDsaConfig)."""
    kinds = fields.words("indexer_types", fields.layers)
    pattern = fields.data.get("index_topk_pattern")
    if kinds is None and isinstance(pattern, str):
        kinds = [{"F": "full", "S": "shared"}.get(letter, letter) for letter in pattern[: fields.layers]]
    if kinds is None:
        period = fields.whole("index_topk_freq", default=1)
        offset = fields.whole("index_skip_topk_offset", default=2, least=0)
        return ["shared" if max(i - offset + 1, 0) % period else "full" for i in range(fields.layers)]
    if len(kinds) != fields.layers or set(map(str, kinds)) - {"full", "shared"}:
        got = sorted(set(map(str, kinds)))
        raise UsageError(f"{fields.name}: indexer_types", f"full or shared for each of the {fields.layers} layers", got)
    return kinds


def deepseek_v4(fields: Fields) -> tuple[Layer, ...]:
    """One vector is K and V. Every layer has those of a window; by its ratio r also one for each r tokens, at r = 4 with an index key."""
    dim, window = fields.whole("head_dim"), fields.whole("sliding_window")
    rope = fields.whole("qk_rope_head_dim", default=0, least=0)
    ratios = fields.wholes("compress_ratios", fields.layers)
    if ratios is None:
        raise fields.missing("compress_ratios")
    recent = Latent(dim, rope, window_tokens=window)
    layers: list[Layer] = []
    for ratio in ratios:
        chosen = fields.whole("index_topk") if ratio == 4 else None
        far = (Latent(dim, rope, ratio, read_entries=chosen),) if ratio else ()
        index = (IndexKey(fields.whole("index_head_dim"), ratio),) if ratio == 4 else ()
        layers.append((recent, *far, *index))
    return tuple(layers)


def minimax_m3(fields: Fields) -> tuple[Layer, ...]:
    """K and V as ever, and in sparse layers one index key (one head: transformers' k_proj(hidden, index_head_dim))."""
    content = KeyValue(fields.kv_heads, fields.head_dim, fields.head_dim)
    if not fields.has("sparse_attention_config"):
        raise fields.missing("sparse_attention_config")
    sparse = fields.part("sparse_attention_config")
    chooses = sparse.switches("sparse_attention_freq", fields.layers)
    if chooses is None:
        raise sparse.missing("sparse_attention_freq")
    key = IndexKey(sparse.whole("sparse_index_dim"))
    sparsely = replace(content, read_entries=sparse.whole("sparse_topk_blocks") * sparse.whole("sparse_block_size"))
    return tuple((sparsely, key) if chosen else (content,) for chosen in chooses)


_MLA = ("deepseek_v2", "deepseek_v3", "kimi_k2", "minicpm3", "glm4_moe_lite", "youtu", "sarvam_mla")

FAMILIES = (
    *(Family(name, mla, f"{_MTP}; {_EXPANDED}") for name in _MLA),
    *(Family(name, dsa, _MTP) for name in ("deepseek_v32", "glm_moe_dsa")),
    *(Family(name, deepseek_v4, _MTP) for name in ("deepseek_v4", "deepseek_ref")),
    *(
        Family(name, minimax_m3, f"{_MTP}; {NOT_SERVED}")
        for name in ("minimax_m3", "minimax_m3_vl", "minimax_m3_vl_text")
    ),
)
