"""Layers of unequal geometry: other heads in sliding layers, shared caches, no-op layers, K and V of different size."""

from __future__ import annotations

from kvarto.errors import Unsupported, UsageError
from kvarto.plan.cached import KeyValue, Layer
from kvarto.plan.families import Family
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
    """Full layers have heads of another number and size. `attention_k_eq_v` shares the projection, not the cache."""
    kinds = said_kinds(fields) or every(fields, 6)
    near_dim = fields.whole("head_dim")
    near = KeyValue(fields.kv_heads, near_dim, near_dim, fields.whole("sliding_window"))
    far_dim = fields.whole("global_head_dim", default=near_dim)
    far_heads = fields.whole("num_global_key_value_heads", default=near.heads)
    made: dict[str, Layer] = {SLIDING: (near,), FULL: (KeyValue(far_heads, far_dim, far_dim),)}
    for kind in kinds:
        if kind not in made:
            raise unknown_kind(fields, kind)
    return _without_shared(fields, tuple(made[kind] for kind in kinds))


def mimo_v2(fields: Fields) -> tuple[Layer, ...]:
    """`hybrid_layer_pattern`: 1 for sliding layers, which have KV heads of their own; V is smaller than K."""
    slides = fields.switches("hybrid_layer_pattern", fields.layers)
    if slides is None:
        raise fields.missing("hybrid_layer_pattern")
    k_dim, v_dim = fields.head_dim, fields.whole("v_head_dim")
    far = KeyValue(fields.kv_heads, k_dim, v_dim)
    near = KeyValue(
        fields.whole("swa_num_key_value_heads"), fields.whole("swa_head_dim", default=k_dim),
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
    *(Family(name, gemma3n) for name in ("gemma3n", "gemma3n_text")),
    *(Family(name, gemma4) for name in ("gemma4", "gemma4_text")),
    *(Family(name, mimo_v2) for name in ("mimo_v2", "mimo_v2_flash")),
    Family("nemotron-nas", nemotron_nas),
)
