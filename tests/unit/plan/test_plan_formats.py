"""Bytes in formats: ours as the engine reserves them, other engines' rows, pages and metadata, ranks and stages."""

from __future__ import annotations

import pytest

from kvarto.cache.arena import UNIT_BYTES, Arena
from kvarto.cache.prefix import PrefixCache
from kvarto.engine.holding import Group, Holding, Scratch
from kvarto.errors import UnknownName
from kvarto.formats import parse_policy
from kvarto.layout import Geometry
from kvarto.plan.cached import KeyValue, describe, stage_layers
from kvarto.plan.engines import engine_formats, engines, find_format
from kvarto.plan.ours import OwnFormat
from kvarto.plan.written import bytes_of
from kvarto.rule import Rule
from unit.plan.samples import FORMATS, LLAMA, make, model

_CELL = Geometry(heads=8, k_dim=128, v_dim=128)


def own(text: str) -> OwnFormat:
    return OwnFormat(parse_policy(text))


@pytest.mark.parametrize("text", ["bf16", "int4", "int8/int4+sink128+window256", "kivi2+sink0", "fp8-token"])
@pytest.mark.parametrize("window", [None, 100, 4096])
@pytest.mark.parametrize("tokens", [1, 64, 65, 1000, 4480])
def test_ours_are_what_the_engines_books_hold(text: str, window: int | None, tokens: int) -> None:
    """Against a sequence that really grows in the engine's books, a page at a time."""
    kv = own(text)
    fields = {"num_hidden_layers": 3, "num_attention_heads": 32, "num_key_value_heads": 8, "head_dim": 128}
    layers = make("mistral", **fields, **({"sliding_window": window} if window else {}))
    chosen = kv.policy.format
    rule = Rule(64, chosen.sink_tokens // 64, chosen.window_tokens // 64, window)
    sealed_nbytes, raw_nbytes = (3 * each.layout(_CELL).nbytes for each in (chosen, own("bf16").policy.format))
    raw, sealed = grown(rule, tokens)
    assert bytes_of(kv, layers).sequence(tokens) == sealed * sealed_nbytes + raw * raw_nbytes


def grown(rule: Rule, tokens: int) -> tuple[int, int]:
    """(Raw, sealed) blocks that a sequence of so many tokens holds, by the arena's own count."""
    arena = Arena(1 << 19, [1 << 10, 1 << 10])
    cache = PrefixCache(arena, move=lambda *_: None)
    holding = Holding(cache, "test", [Group(rule, raw=0, sealed=1)], keep=False)
    scratch = Scratch(arena.nbytes // UNIT_BYTES, {0: 1}, 2)
    text = list(range(tokens))
    while holding.length < tokens:
        assert holding.reserve(min(64, tokens - holding.length))
        scratch.clear()
        holding.plan(scratch)
        holding.commit(text)
    return tuple(len(holding._held[kind]) for kind in (0, 1))  # type: ignore[return-value]


def test_a_page_of_ours_costs_what_its_layout_says() -> None:
    held = bytes_of(own("int4"), model(LLAMA))
    assert held.growth == 32 * parse_policy("int4").format.layout(_CELL).nbytes / 64 == 35_328
    assert held.sequence(1) == held.sequence(63) == held.sequence(64), "the sink is raw too"
    assert held.sequence(128) - held.sequence(64) == 64 * held.growth


def test_a_policy_counts_layers_that_cache() -> None:
    all_layers, skipping = (bytes_of(own(text), model(LLAMA)).growth for text in ("int4", "int4+skip=0,-1"))
    assert skipping == (30 * all_layers + 2 * bytes_of(own("bf16"), model(LLAMA)).growth) / 32


@pytest.mark.parametrize(
    ("name", "slot_bytes"),  # of one head and token, K and V, at D = 128: facts of each engine
    [
        ("vllm:bf16", 512), ("vllm:fp8_e4m3", 256), ("vllm:int8_per_token_head", 264), ("vllm:int4_per_token_head", 136), ("vllm:nvfp4", 144),
        ("sglang:fp4_e2m1", 144), ("tensorrt-llm:nvfp4", 144), ("llama.cpp:q8_0", 272), ("llama.cpp:q5_1", 192), ("llama.cpp:q5_0", 176),
        ("llama.cpp:q4_1", 160), ("llama.cpp:q4_0", 144), ("llama.cpp:iq4_nl", 144), ("llama.cpp:f16", 512),
    ],
)  # fmt: skip
def test_rows_of_other_engines(name: str, slot_bytes: int) -> None:
    assert bytes_of(FORMATS[name], model(LLAMA)).growth == 32 * 8 * slot_bytes


@pytest.mark.parametrize(
    ("name", "slot"), [("k8v4", 196), ("4bit_nc", 134), ("k3v4_nc", 118), ("3bit_nc", 102)]
)  # fmt: skip
def test_turboquant_keeps_two_layers_raw_at_each_end(name: str, slot: int) -> None:
    assert bytes_of(FORMATS[f"vllm:turboquant_{name}"], model(LLAMA)).growth == 8 * (28 * slot + 4 * 512)


def test_turboquant_of_the_published_ratio() -> None:
    """vllm#38479, Qwen3-4B, 3bit_nc: 417,440 to 1,431,184 tokens, 3.43 times, with slots of 104 bytes, which are 102 by now."""
    assert pytest.approx(1_431_184 / 417_440, rel=1e-4) == 36 * 512 / (32 * 104 + 4 * 512)
    three, raw = (
        bytes_of(FORMATS[name], model("Qwen/Qwen3-4B")).growth for name in ("vllm:turboquant_3bit_nc", "vllm:bf16")
    )
    assert float(raw / three) == pytest.approx(36 * 512 / (32 * 102 + 4 * 512))


def test_sparse_mla_rows_of_656_and_132_bytes() -> None:
    assert bytes_of(FORMATS["vllm:fp8_ds_mla"], model("deepseek-ai/DeepSeek-V3.2")).growth == 61 * (656 + 132)
    assert bytes_of(FORMATS["vllm:nvfp4_ds_mla"], model("deepseek-ai/DeepSeek-V3.2")).growth == 61 * (352 + 132)


def test_every_dtype_that_vllm_takes_is_there() -> None:
    """CacheDType of its config/cache.py, 0.32."""
    taken = (
        "auto float16 bfloat16 fp8 fp8_e4m3 fp8_e5m2 fp8_inc fp8_ds_mla nvfp4_ds_mla turboquant_k8v4 turboquant_4bit_nc turboquant_k3v4_nc "
        "turboquant_3bit_nc ultraquant_4bit int4_per_token_head int8_per_token_head fp8_per_token_head nvfp4 nvfp4_4over6"
    )
    assert all(find_format(f"vllm:{name}") for name in taken.split())


@pytest.mark.parametrize(
    ("tokens", "page", "expected"),
    [(1, 16, 16), (16, 16, 16), (17, 16, 32), (100, 128, 128), (129, 128, 256), (7, 1, 7)],
)
def test_pages_are_rounded_up(tokens: int, page: int, expected: int) -> None:
    raw = next(kv for kv in engine_formats(page) if kv.name == "vllm:bf16")
    assert bytes_of(raw, model(LLAMA)).sequence(tokens) == expected * 131_072


@pytest.mark.parametrize(("tokens", "pages"), [(100, 7), (128, 8), (129, 9), (144, 8), (150, 9), (100_000, 8)])
def test_a_window_holds_the_pages_that_it_touches(tokens: int, pages: int) -> None:
    """A window of 128 in pages of 16: 8, or 9 where it begins within a page."""
    layer = make("mistral", num_hidden_layers=1, num_attention_heads=1, head_dim=64, sliding_window=128)
    assert bytes_of(FORMATS["vllm:bf16"], layer).sequence(tokens) == pages * 16 * 256


def test_llama_cpp_pads_its_sliding_cache() -> None:
    layer = make("mistral", num_hidden_layers=1, num_attention_heads=1, head_dim=64, sliding_window=1024)
    assert bytes_of(FORMATS["llama.cpp:f16"], layer).sequence(100_000) == 1536 * 256


@pytest.mark.parametrize(("tp", "heads"), [(1, 8), (2, 4), (8, 1), (16, 1), (64, 1), (3, 3)])
def test_heads_spread_over_ranks_and_are_held_several_times(tp: int, heads: int) -> None:
    assert bytes_of(FORMATS["vllm:bf16"], model(LLAMA), tp).growth == 32 * heads * 512


def test_latents_are_on_every_rank() -> None:
    alone, ranked = (bytes_of(FORMATS["vllm:fp8_e4m3"], model("deepseek-ai/DeepSeek-V3"), tp).growth for tp in (1, 8))
    assert alone == ranked == 61 * 576


def test_states_spread_over_ranks() -> None:
    hybrid = model("Qwen/Qwen3.5-27B")
    alone, ranked = (bytes_of(FORMATS["vllm:bf16"], hybrid, tp).constant for tp in (1, 4))
    assert ranked == alone // 4 == 153_944_064 // 4


@pytest.mark.parametrize(
    ("layers", "pp", "expected"),
    [(32, 1, [32]), (32, 4, [8] * 4), (61, 2, [31, 30]), (61, 4, [15, 15, 16, 15]), (7, 3, [2, 3, 2])],
)
def test_stages_share_layers_as_vllm_does(layers: int, pp: int, expected: list[int]) -> None:
    assert stage_layers(layers, pp) == expected


def test_formats_refuse_with_a_reason() -> None:
    gpt_oss, deepseek, llama = model("openai/gpt-oss-20b"), model("deepseek-ai/DeepSeek-V3"), model(LLAMA)
    assert FORMATS["vllm:turboquant_4bit_nc"].refuses(gpt_oss) == "no sliding windows"
    assert FORMATS["vllm:nvfp4"].refuses(deepseek) == "not for MLA"
    assert (
        FORMATS["vllm:fp8_ds_mla"].refuses(llama)
        == FORMATS["vllm:fp8_ds_mla"].refuses(deepseek)
        == "only for MLA with sparse attention"
    )
    assert "latents" in str(FORMATS["int4"].refuses(deepseek))
    assert FORMATS["bf16"].refuses(deepseek) is None
    odd = make("llama", num_hidden_layers=1, num_attention_heads=1, head_dim=100)
    assert "power of two" in str(FORMATS["vllm:turboquant_4bit_nc"].refuses(odd))
    assert "blocks of 32" in str(FORMATS["llama.cpp:q8_0"].refuses(odd))
    assert "multiple of 8" in str(FORMATS["bf16"].refuses(odd))
    assert FORMATS["vllm:nvfp4_4over6"].refuses_gpu(90) == "needs SM 100, 103, this is 90"
    assert FORMATS["vllm:nvfp4"].refuses_gpu(90) is None
    assert FORMATS["vllm:ultraquant_4bit"].refuses_gpu(90) == "needs a GPU of AMD"
    assert FORMATS["vllm:fp8_per_token_head"].refuses_gpu(86) == "needs SM 89 or later, this is 86"


def test_each_engine_says_where_its_numbers_come_from() -> None:
    assert set(engines()) == {"vllm", "sglang", "tensorrt-llm", "llama.cpp"}
    for kv in engine_formats():
        assert kv.source
        assert kv.flag


def test_other_names_of_an_engine_are_known() -> None:
    assert find_format("vllm:fp8").name == find_format("VLLM:fp8_e4m3").name == "vllm:fp8_e4m3"
    assert find_format("vllm:auto").name == "vllm:bf16"
    with pytest.raises(UnknownName, match="did you mean vllm:fp8_e4m3"):
        find_format("vllm:fp8_e4m4")


def test_sparse_attention_reads_less_than_it_holds() -> None:
    held = bytes_of(FORMATS["vllm:bf16"], model("deepseek-ai/DeepSeek-V3.2"))
    assert held.read(100_000) == 61 * (2048 * 1152 + 100_000 * 132)


def test_layers_in_words() -> None:
    assert describe(model("openai/gpt-oss-20b").layers) == "12 sliding over 128 (8 x 64); 12 full (8 x 64)"
    assert describe(model("XiaomiMiMo/MiMo-V2-Flash").layers).startswith("9 full (4 x 192/128)")
    assert KeyValue(8, 64, 64) in model("openai/gpt-oss-20b").parts
