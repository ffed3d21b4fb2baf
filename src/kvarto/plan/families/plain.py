"""K and V of every layer, with or without windows: MHA, GQA, MQA, and patterns of full, sliding and chunked layers."""

from __future__ import annotations

from collections.abc import Callable

from kvarto.errors import Unsupported
from kvarto.plan.cached import KeyValue, Layer
from kvarto.plan.families import NOT_SERVED, Family
from kvarto.plan.fields import Fields

FULL = "full_attention"
SLIDING = "sliding_attention"
CHUNKED = "chunked_attention"


def uniform(fields: Fields) -> tuple[Layer, ...]:
    """Every layer alike, none with a window."""
    return ((KeyValue(fields.kv_heads, fields.head_dim, fields.head_dim),),) * fields.layers


def of_kinds(fields: Fields, kinds: list[str], *, window_key: str = "sliding_window") -> tuple[Layer, ...]:
    """A layer for each kind. Raises Unsupported for a kind that is neither full, sliding nor chunked."""
    heads, dim = fields.kv_heads, fields.head_dim
    made = {FULL: (KeyValue(heads, dim, dim),)}
    if SLIDING in kinds:
        made[SLIDING] = (KeyValue(heads, dim, dim, fields.whole(window_key)),)
    if CHUNKED in kinds:
        made[CHUNKED] = (KeyValue(heads, dim, dim, fields.whole("attention_chunk_size"), chunked=True),)
    for kind in kinds:
        if kind not in made:
            raise unknown_kind(fields, kind)
    return tuple(made[kind] for kind in kinds)


def unknown_kind(fields: Fields, kind: object) -> Exception:
    """The refusal of a layer of a kind that nobody knows."""
    return Unsupported(
        f"{fields.name}: layer_types has {kind!r:.60}, whose cache is not known for {fields.family}; describe the model by flags instead"
    )


def said_kinds(fields: Fields) -> list[str] | None:
    """The config's own list of kinds."""
    return fields.words("layer_types", fields.layers)


def every(fields: Fields, pattern: int, other: str = SLIDING) -> list[str]:
    """Each `pattern`-th layer is full, the others are `other`; of one without a pattern all are full."""
    return [FULL if not pattern or (i + 1) % pattern == 0 else other for i in range(fields.layers)]


def windowed(default_pattern: int, *, from_full: bool = False) -> Callable[[Fields], tuple[Layer, ...]]:
    """layer_types, or a full layer after each `default_pattern` - 1 sliding ones (`sliding_window_pattern` may say another number)."""

    def read(fields: Fields) -> tuple[Layer, ...]:
        if not fields.has("sliding_window") and said_kinds(fields) is None:
            return uniform(fields)
        pattern = fields.data.get("sliding_window_pattern")
        if isinstance(pattern, str):  # such as LLLG
            kinds = [FULL if pattern[i % len(pattern)] == "G" else SLIDING for i in range(fields.layers)]
            return of_kinds(fields, said_kinds(fields) or kinds)
        number = fields.whole("sliding_window_pattern", "_sliding_window_pattern", default=default_pattern, least=0)
        return of_kinds(fields, said_kinds(fields) or every(fields, number))

    return read


def mistral(fields: Fields) -> tuple[Layer, ...]:
    """All layers slide if there is a window at all."""
    kinds = said_kinds(fields) or [SLIDING if fields.has("sliding_window") else FULL] * fields.layers
    return of_kinds(fields, kinds)


def qwen(fields: Fields) -> tuple[Layer, ...]:
    """A window only where `use_sliding_window` says so, and from layer `max_window_layers` on."""
    kinds = said_kinds(fields)
    if kinds is None:
        first = fields.whole("max_window_layers", default=28, least=0)
        slides = fields.flag("use_sliding_window") and fields.has("sliding_window")
        kinds = [SLIDING if slides and i >= first else FULL for i in range(fields.layers)]
    return of_kinds(fields, kinds)


def falcon(fields: Fields) -> tuple[Layer, ...]:
    """One KV head with `multi_query`, unless it is the new architecture."""
    heads = fields.query_heads
    if fields.flag("new_decoder_architecture"):
        heads = fields.whole("num_kv_heads", default=heads)
    elif fields.flag("multi_query", default=True):
        heads = 1
    return ((KeyValue(heads, fields.head_dim, fields.head_dim),),) * fields.layers


def bigcode(fields: Fields) -> tuple[Layer, ...]:
    """One KV head with `multi_query`."""
    heads = 1 if fields.flag("multi_query", default=True) else fields.query_heads
    return ((KeyValue(heads, fields.head_dim, fields.head_dim),),) * fields.layers


def smollm3(fields: Fields) -> tuple[Layer, ...]:
    """Layers without RoPE slide, if there is a window."""
    kinds = said_kinds(fields)
    if kinds is None and fields.flag("use_sliding_window") and fields.has("sliding_window"):
        ropes = fields.switches("no_rope_layers", fields.layers)
        period = fields.whole("no_rope_layer_interval", default=4)
        ropes = ropes or [bool((i + 1) % period) for i in range(fields.layers)]
        kinds = [FULL if rope else SLIDING for rope in ropes]
    return of_kinds(fields, kinds or [FULL] * fields.layers)


def llama4(fields: Fields) -> tuple[Layer, ...]:
    """Layers with RoPE stay within a chunk, each fourth one, without it, is full."""
    kinds = said_kinds(fields)
    if kinds is None:
        ropes = fields.switches("no_rope_layers", fields.layers) if fields.data.get("no_rope_layers") else None
        period = fields.whole("no_rope_layer_interval", default=4)
        ropes = ropes or [bool((i + 1) % period) for i in range(fields.layers)]
        kinds = [CHUNKED if rope and fields.has("attention_chunk_size") else FULL for rope in ropes]
    return of_kinds(fields, kinds)


_UNIFORM = (
    "llama", "gemma", "glm", "glm4", "glm4_moe", "granite", "granitemoe", "granitemoeshared", "olmo", "olmo2", "olmoe", "phi",
    "stablelm", "mpt", "gpt2", "gptj", "gpt_neox", "opt", "bloom", "codegen", "cohere", "dots1", "ernie4_5", "ernie4_5_moe", "exaone",
    "helium", "hunyuan_v1_dense", "hunyuan_v1_moe", "internlm2", "internlm3", "arcee", "apertus", "seed_oss", "minimax_m2", "nemotron", "mimo",
    "baichuan", "minicpm", "solar_open", "bitnet", "persimmon", "nanochat", "qwen3_vl_text", "qwen3_vl_moe_text",
    "qwen2_vl_text", "qwen2_5_vl_text", "biogpt", "xglm",
)  # fmt: skip
_QWEN = ("qwen2", "qwen2_moe", "qwen3", "qwen3_moe", "qwen2_vl", "qwen2_5_vl", "qwen3_vl", "qwen3_vl_moe")
_MISTRAL = ("mistral", "ministral", "ministral3", "mixtral", "phi3", "phimoe", "starcoder2")

FAMILIES = (
    *(Family(name, uniform) for name in _UNIFORM),
    *(Family(name, qwen) for name in _QWEN),
    *(Family(name, mistral) for name in _MISTRAL),
    Family("falcon", falcon),
    Family("gpt_bigcode", bigcode),
    Family("smollm3", smollm3),
    Family("gemma2", windowed(2)),
    *(Family(name, windowed(6)) for name in ("gemma3", "gemma3_text")),
    *(Family(name, windowed(4)) for name in ("cohere2", "exaone4", "olmo3", "step3p7")),
    Family("gpt_oss", windowed(2)),
    *(Family(name, llama4, NOT_SERVED) for name in ("llama4", "llama4_text")),
)
