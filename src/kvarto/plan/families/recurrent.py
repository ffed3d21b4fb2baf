"""Hybrids: layers with linear attention or a state-space model beside those that cache keys and values.

A state is float32 where the config does not say otherwise, the convolution's last inputs are in the model's dtype (2 bytes).
"""

from __future__ import annotations

from collections.abc import Callable

from kvarto.errors import UsageError
from kvarto.plan.cached import KeyValue, Layer, State
from kvarto.plan.families import NOT_SERVED, Family
from kvarto.plan.families.latent import latent_of
from kvarto.plan.families.plain import FULL, said_kinds, unknown_kind
from kvarto.plan.fields import Fields

LINEAR = "linear_attention"
_CONV_BYTES = 2
_DTYPE_BYTES = {"float32": 4, "float16": 2, "bfloat16": 2}
_SNAPSHOTS = "states are not quantized, and prefix caches store extra snapshots of them that are not counted"


def _state_bytes(fields: Fields, *keys: str) -> int:
    for key in keys:
        if fields.has(key):
            name = str(fields.data[key]).removeprefix("torch.")
            if name not in _DTYPE_BYTES:
                raise UsageError(f"{fields.name}: {key}", "float32, float16 or bfloat16", name[:60])
            return _DTYPE_BYTES[name]
    return 4


def _content(fields: Fields) -> KeyValue:
    return KeyValue(fields.kv_heads, fields.head_dim, fields.head_dim)


def _hybrid(kinds: list[str], made: dict[str, Layer], fields: Fields) -> tuple[Layer, ...]:
    for kind in kinds:
        if kind not in made:
            raise unknown_kind(fields, kind)
    return tuple(made[kind] for kind in kinds)


def gated_delta(fields: Fields) -> tuple[Layer, ...]:
    """Qwen3-Next and Qwen3.5: a matrix [Dk, Dv] for each value head, and the last inputs of one convolution over q, k and v."""
    period = fields.whole("full_attention_interval", default=4)
    kinds = said_kinds(fields) or [FULL if (i + 1) % period == 0 else LINEAR for i in range(fields.layers)]
    k_dim, v_dim = fields.whole("linear_key_head_dim"), fields.whole("linear_value_head_dim")
    k_heads, v_heads = fields.whole("linear_num_key_heads"), fields.whole("linear_num_value_heads")
    kept = fields.whole("linear_conv_kernel_dim") - 1
    matrices = State(v_heads, k_dim * v_dim * _state_bytes(fields, "mamba_ssm_dtype"))
    # The convolution's channels are spread over ranks by key heads.
    conv = State(k_heads, (2 * k_dim + v_heads * v_dim // k_heads) * kept * _CONV_BYTES)
    return _hybrid(kinds, {FULL: (_content(fields),), LINEAR: (matrices, conv)}, fields)


def kimi_linear(fields: Fields) -> tuple[Layer, ...]:
    """Kimi delta attention: a matrix [D, D] for each head, three convolutions; the full layers are MLA.

    Hub configs have a `linear_attn_config`, whose layers count from 1; those that transformers saved have `layer_types`.
    """
    if fields.has("linear_attn_config"):
        linear = fields.part("linear_attn_config")
        state = _delta_state(
            linear.whole("num_heads"), linear.whole("head_dim"), linear.whole("short_conv_kernel_size")
        )
        full, delta = linear.wholes("full_attn_layers"), linear.wholes("kda_layers")
        if full is None or delta is None:
            raise linear.missing("full_attn_layers and kda_layers")
        if sorted([*full, *delta]) != list(range(1, fields.layers + 1)):
            got = f"{len(full)} full and {len(delta)} linear ones"
            raise UsageError(f"{linear.name}: layers", f"each of 1 to {fields.layers} once", got)
        kinds = [FULL if i in set(full) else LINEAR for i in range(1, fields.layers + 1)]
    else:
        said = said_kinds(fields)
        if said is None:
            raise fields.missing("linear_attn_config", "layer_types")
        kinds = said
        state = _delta_state(
            *(fields.whole(key) for key in ("linear_num_heads", "linear_head_dim", "linear_conv_kernel_dim"))
        )
    return _hybrid(kinds, {FULL: (latent_of(fields),), LINEAR: (state,)}, fields)


def _delta_state(heads: int, dim: int, kernel: int) -> State:
    return State(heads, dim * dim * 4 + 3 * dim * (kernel - 1) * _CONV_BYTES)


def _mamba2(fields: Fields, heads: int, dim: int, groups: int, state_dim: int, kernel: int) -> tuple[State, State]:
    matrices = State(heads, dim * state_dim * _state_bytes(fields, "mamba_ssm_cache_dtype", "mamba_ssm_dtype"))
    return matrices, State(groups, (heads * dim // groups + 2 * state_dim) * (kernel - 1) * _CONV_BYTES)


_PATTERN = {"M": "mamba", "*": "attention", "-": "mlp", "E": "moe"}


def nemotron_h(fields: Fields) -> tuple[Layer, ...]:
    """Mamba-2, attention, MLP and expert layers, by `layers_block_type` or the letters of `hybrid_override_pattern`."""
    kinds = fields.words("layers_block_type") or said_kinds(fields)
    if kinds is None:
        letters = fields.data.get("hybrid_override_pattern")
        if not isinstance(letters, str) or not letters:
            raise fields.missing("layers_block_type", "hybrid_override_pattern")
        kinds = [_PATTERN.get(letter, letter) for letter in letters]
    state = _mamba2(
        fields, fields.whole("mamba_num_heads"), fields.whole("mamba_head_dim"), fields.whole("n_groups"),
        fields.whole("ssm_state_size"), fields.whole("conv_kernel"),
    )  # fmt: skip
    content: Layer = (_content(fields),)
    made: dict[str, Layer] = {"mamba": state, LINEAR: state, "attention": content, FULL: content, "mlp": (), "moe": ()}
    return _hybrid(kinds, made, fields)


def _mamba2_of(fields: Fields) -> tuple[State, State]:
    heads = fields.whole("mamba_n_heads")
    inner = fields.whole("mamba_d_ssm", default=fields.whole("mamba_expand", default=2) * fields.hidden)
    said = fields.data.get("mamba_d_head")
    dim = inner // heads if said in (None, "auto") else fields.whole("mamba_d_head")
    return _mamba2(
        fields, heads, dim, fields.whole("mamba_n_groups", default=1), fields.whole("mamba_d_state"), fields.whole("mamba_d_conv")
    )  # fmt: skip


def bamba(fields: Fields) -> tuple[Layer, ...]:
    """Mamba-2, and attention in the layers that `attn_layer_indices` names."""
    full = fields.wholes("attn_layer_indices")
    kinds = said_kinds(fields) or ([FULL if i in full else LINEAR for i in range(fields.layers)] if full else None)
    if kinds is None:
        raise fields.missing("attn_layer_indices", "layer_types")
    state = _mamba2_of(fields)
    content: Layer = (_content(fields),)
    return _hybrid(kinds, {FULL: content, "attention": content, LINEAR: state, "mamba": state}, fields)


def falcon_h1(fields: Fields) -> tuple[Layer, ...]:
    """Mamba-2 and attention side by side in every layer."""
    return ((_content(fields), *_mamba2_of(fields)),) * fields.layers


def jamba(fields: Fields) -> tuple[Layer, ...]:
    """Mamba-1: a state for each channel, kept in the model's dtype's wider kin float32."""
    period, offset = fields.whole("attn_layer_period"), fields.whole("attn_layer_offset", least=0)
    inner = fields.whole("mamba_expand") * fields.hidden
    kept = fields.whole("mamba_d_conv") - 1
    state: Layer = (State(inner, fields.whole("mamba_d_state") * 4 + kept * _CONV_BYTES),)
    content: Layer = (_content(fields),)
    return tuple(content if i % period == offset else state for i in range(fields.layers))


def lfm2(fields: Fields) -> tuple[Layer, ...]:
    """Short convolutions, whose last inputs are kept."""
    full = fields.wholes("full_attn_idxs")
    kinds = said_kinds(fields) or ([FULL if i in full else "conv" for i in range(fields.layers)] if full else None)
    if kinds is None:
        raise fields.missing("layer_types", "full_attn_idxs")
    conv: Layer = (State(fields.hidden, (fields.whole("conv_L_cache", least=2) - 1) * _CONV_BYTES),)
    return _hybrid(kinds, {FULL: (_content(fields),), "conv": conv, LINEAR: conv}, fields)


def minimax(fields: Fields) -> tuple[Layer, ...]:
    """Lightning attention: a matrix [D, D] for each query head."""
    kinds = said_kinds(fields)
    if kinds is None:
        said = fields.switches("attn_type_list", fields.layers)
        if said is None:
            raise fields.missing("layer_types", "attn_type_list")
        kinds = [FULL if full else LINEAR for full in said]
    state: Layer = (State(fields.query_heads, fields.head_dim**2 * 4),)
    return _hybrid(kinds, {FULL: (_content(fields),), LINEAR: state}, fields)


def _family(name: str, read: Callable[[Fields], tuple[Layer, ...]]) -> Family:
    return Family(name, read, _SNAPSHOTS)


_GATED_DELTA = ("qwen3_next", "qwen3_5", "qwen3_5_text", "qwen3_5_moe", "qwen3_5_moe_text")

FAMILIES = (
    *(_family(name, gated_delta) for name in _GATED_DELTA),
    _family("kimi_linear", kimi_linear),
    _family("nemotron_h", nemotron_h),
    _family("bamba", bamba),
    _family("granitemoehybrid", bamba),
    _family("falcon_h1", falcon_h1),
    _family("jamba", jamba),
    _family("lfm2", lfm2),
    _family("lfm2_moe", lfm2),
    *(Family(name, minimax, f"{_SNAPSHOTS}; {NOT_SERVED}") for name in ("minimax", "minimax_text_01")),
)
