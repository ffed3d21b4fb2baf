"""Layers of unequal geometry: other heads in sliding layers, shared caches, no-op layers, K and V of different size."""

from __future__ import annotations

from kvarto.errors import Unsupported, UsageError
from kvarto.plan.cached import KeyValue, Layer
from kvarto.plan.families import NOT_SERVED, Family
from kvarto.plan.families.plain import FULL, SLIDING, every, of_kinds, said_kinds, unknown_kind
from kvarto.plan.fields import Fields


def _without_shared(fields: Fields, layers: tuple[Layer, ...]) -> tuple[Layer, ...]:
    """The last `num_kv_shared_layers` read the cache of an earlier layer and have none."""
    shared = fields.whole("num_kv_shared_layers", default=0, least=0)
    if shared >= len(layers):
        raise UsageError(f"{fields.name}: num_kv_shared_layers", f"fewer than the {len(layers)} layers", shared)
    return layers[: len(layers) - shared] + ((),) * shared


def gemma3n(fields: Fields) -> tuple[Layer, ...]:
    """Four sliding layers to a full one, the last ones share."""
    return _without_shared(fields, of_kinds(fields, said_kinds(fields) or every(fields, 5)))


def gemma4(fields: Fields) -> tuple[Layer, ...]:
    """Full layers have heads of another size, and with `attention_k_eq_v` of another number: that shares the projection, not the cache.

    Hub configs say `global_head_dim` and `num_global_key_value_heads`, those that transformers saved have a `per_layer_config`.
    """
    kinds = said_kinds(fields) or every(fields, 6)
    kinds[-1] = FULL
    near_dim = fields.whole("head_dim")
    near = KeyValue(fields.kv_heads, near_dim, near_dim, fields.whole("sliding_window"))
    far_dim = fields.whole("global_head_dim", default=512)
    alike = fields.flag("attention_k_eq_v", default=True)
    far_heads = fields.whole("num_global_key_value_heads", default=near.heads) if alike else near.heads
    own = fields.part("per_layer_config") if fields.has("per_layer_config") else None
    layers: list[Layer] = []
    for i, kind in enumerate(kinds):
        if kind not in (FULL, SLIDING):
            raise unknown_kind(fields, kind)
        heads, dim = (far_heads, far_dim) if kind == FULL else (near.heads, near_dim)
        if own is not None:
            said = own.part(str(i)) if str(i) in own.data else fields
            heads, dim = said.whole("num_key_value_heads", default=near.heads), said.whole("head_dim", default=near_dim)
        layers.append((KeyValue(heads, dim, dim, near.window_tokens if kind == SLIDING else None),))
    return _without_shared(fields, tuple(layers))


def mimo_v2(fields: Fields) -> tuple[Layer, ...]:
    """`hybrid_layer_pattern`: 1 for sliding layers, which have KV heads of their own (twice as many, if not said); V is smaller than K."""
    slides = fields.switches("hybrid_layer_pattern", fields.layers)
    if slides is None:
        kinds = said_kinds(fields)
        if kinds is None:
            raise fields.missing("hybrid_layer_pattern", "layer_types")
        slides = [kind == SLIDING for kind in kinds]
    k_dim, v_dim = fields.head_dim, fields.whole("v_head_dim")
    far = KeyValue(fields.kv_heads, k_dim, v_dim)
    near = KeyValue(
        fields.whole("swa_num_key_value_heads", default=2 * far.heads), fields.whole("swa_head_dim", default=k_dim),
        fields.whole("swa_v_head_dim", default=v_dim), fields.whole("sliding_window"),
    )  # fmt: skip
    return tuple((near,) if slide else (far,) for slide in slides)


def nemotron_nas(fields: Fields) -> tuple[Layer, ...]:
    """`block_configs`: each layer has its own number of query heads for a KV head, or no attention at all."""
    blocks = fields.items("block_configs", fields.layers)
    if blocks is None:
        raise fields.missing("block_configs")
    layers: list[Layer] = []
    for i, block in enumerate(blocks):
        if not isinstance(block, dict):
            raise UsageError(f"{fields.name}: block_configs.{i}", "a table", repr(block)[:60])
        attention = Fields(f"{fields.name}: block_configs.{i}", block).part("attention")
        if attention.flag("no_op") or attention.flag("replace_with_linear"):
            layers.append(())
            continue
        if attention.has("sparsify") or attention.flag("unshifted_sink") or attention.has("num_sink_tokens"):
            raise Unsupported(f"{attention.name}: a sparsified or sink attention, whose cache is not known; use flags")
        heads = fields.query_heads // attention.whole("n_heads_in_group")
        window = attention.whole("window_length", default=0, least=1) or None
        layers.append((KeyValue(heads, fields.head_dim, fields.head_dim, window),))
    return tuple(layers)


FAMILIES = (
    *(Family(name, gemma3n, NOT_SERVED) for name in ("gemma3n", "gemma3n_text")),
    *(Family(name, gemma4) for name in ("gemma4", "gemma4_text")),
    *(Family(name, mimo_v2) for name in ("mimo_v2", "mimo_v2_flash")),
    Family("nemotron-nas", nemotron_nas),
)
