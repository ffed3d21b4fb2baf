"""`kvarto.Cache` against transformers' own cache, on tiny models of real architectures.

With a raw format the two must agree token for token in float32, whatever way of generating. In bfloat16 no two attention implementations
agree token for token (transformers' sdpa and eager do not either: logits tie), so there we compare distances from the float32 truth.
"""

from __future__ import annotations

import copy
import gc
import subprocess
import sys
import weakref
from collections.abc import Callable
from typing import Any

import pytest
import tiny
import torch
from transformers import DynamicCache

import kvarto
from kvarto.attention import PagedKV
from kvarto.errors import Unsupported, UsageError
from kvarto.integrations import interface

GREEDY = {"max_new_tokens": 72, "do_sample": False}
PAGE_EDGES = (5, 63, 64, 65, 200)


@pytest.fixture(autouse=True)
def _one_thread() -> None:
    torch.set_num_threads(1)


# ---- equality ----------------------------------------------------------------------------------------------------------

Way = Callable[[Any, Any], torch.Tensor]
"""(model, cache or None) to tokens."""


def greedy(model: Any, kv: Any) -> torch.Tensor:
    return model.generate(**tiny.prompt(100), **GREEDY, cache=kv)


def beams(model: Any, kv: Any) -> torch.Tensor:
    return model.generate(**tiny.prompt(60), **GREEDY, num_beams=4, cache=kv)


def padded_batch(model: Any, kv: Any) -> torch.Tensor:
    return model.generate(**tiny.prompt(130, 64, 7), **GREEDY, cache=kv)


def padded_beams(model: Any, kv: Any) -> torch.Tensor:
    return model.generate(**tiny.prompt(70, 11), **GREEDY, num_beams=3, num_return_sequences=2, cache=kv)


def prompt_lookup(model: Any, kv: Any) -> torch.Tensor:
    ids = torch.cat([tiny.prompt(30)["input_ids"]] * 4, dim=1)
    return model.generate(ids, **GREEDY, prompt_lookup_num_tokens=8, cache=kv)


def assisted(model: Any, kv: Any) -> torch.Tensor:
    draft = tiny.model("llama", seed=7, num_hidden_layers=1)
    return model.generate(**tiny.prompt(61), **GREEDY, assistant_model=draft, cache=kv)


def sampling(model: Any, kv: Any) -> torch.Tensor:
    torch.manual_seed(7)
    return model.generate(**tiny.prompt(50, 33), max_new_tokens=72, do_sample=True, num_return_sequences=2, cache=kv)


def chunked_prefill(model: Any, kv: Any) -> torch.Tensor:
    return model.generate(**tiny.prompt(150, 90), **GREEDY, prefill_chunk_size=17, cache=kv)


def two_turns(model: Any, kv: Any) -> torch.Tensor:
    kv = kv if kv is not None else DynamicCache(config=model.config)
    first = model.generate(**tiny.prompt(40, 25), max_new_tokens=30, do_sample=False, cache=kv)
    ids = torch.cat([first, tiny.prompt(20, 20, seed=9)["input_ids"]], dim=1)
    mask = torch.ones_like(ids)
    mask[:, :40] = tiny.prompt(40, 25)["attention_mask"]
    return model.generate(ids, attention_mask=mask, max_new_tokens=40, do_sample=False, cache=kv)


WAYS = (greedy, beams, padded_batch, padded_beams, prompt_lookup, assisted, sampling, chunked_prefill, two_turns)


@pytest.mark.parametrize("family", tiny.FAMILIES)
@pytest.mark.parametrize("way", WAYS, ids=lambda way: way.__name__)
def test_raw_pages_equal_transformers_own_cache_token_for_token(family: str, way: Way) -> None:
    model = tiny.shared(family)
    expected = way(model, None)
    assert len(expected[0].unique()) > 20, "a model that repeats itself proves nothing"
    assert torch.equal(way(model, kvarto.Cache(model, "fp32")), expected)


@pytest.mark.parametrize("family", tiny.FAMILIES)
@pytest.mark.parametrize("prompt_tokens", PAGE_EDGES)
def test_raw_pages_equal_around_page_edges(family: str, prompt_tokens: int) -> None:
    model, inputs = tiny.shared(family), tiny.prompt(prompt_tokens)
    options = {**GREEDY, "return_dict_in_generate": True, "output_logits": True}
    expected = model.generate(**inputs, **options)
    kv = kvarto.Cache(model, "fp32")
    got = model.generate(**inputs, **options, cache=kv)
    assert torch.equal(got.sequences, expected.sequences)
    assert tiny.relative(torch.stack(got.logits), torch.stack(expected.logits)) < 1e-4
    assert got.cache is kv
    assert kv.get_seq_length() == prompt_tokens + GREEDY["max_new_tokens"] - 1


@pytest.mark.parametrize("family", tiny.HYBRIDS)
@pytest.mark.parametrize("way", [greedy, beams, padded_batch, chunked_prefill, two_turns], ids=lambda way: way.__name__)
def test_hybrid_models_keep_their_states_beside_our_pages(family: str, way: Way) -> None:
    model = tiny.shared(family)
    kv = kvarto.Cache(model, "fp32")
    assert 0 < len(kv.kv.layers) < len(kv.layers)
    assert torch.equal(way(model, kv), way(model, None))


@pytest.mark.parametrize("family", tiny.FAMILIES)
def test_half_pages_on_a_float32_model_differ_only_where_logits_nearly_tie(family: str) -> None:
    model, inputs = tiny.shared(family), tiny.prompt(130)
    options = {**GREEDY, "return_dict_in_generate": True, "output_logits": True}
    expected = model.generate(**inputs, **options)
    got = model.generate(**inputs, **options, cache=kvarto.Cache(model, "bf16"))
    differ = (got.sequences != expected.sequences)[0, 130:].nonzero().flatten().tolist()
    same = differ[0] if differ else len(expected.logits)
    ours, theirs = torch.stack(got.logits[: same + 1]), torch.stack(expected.logits[: same + 1])
    assert tiny.relative(ours[0], theirs[0]) < 0.1
    if differ:
        best, second = theirs[same].topk(2).values[0]
        assert float(best - second) <= 2 * float((ours[same] - theirs[same]).abs().max())


@pytest.mark.parametrize("way", [greedy, beams, padded_batch, prompt_lookup], ids=lambda way: way.__name__)
@pytest.mark.parametrize(
    ("family", "seed"), [("llama", 3), ("qwen2", 0), ("qwen3", 1), ("gemma3_text", 2), ("gpt_oss", 0)]
)
def test_bf16_pages_equal_transformers_own_cache_token_for_token(family: str, seed: int, way: Way) -> None:
    """With weights of the usual size, bfloat16's rounding of K and V (1 part in 256) seldom turns a token. These seeds turn none in any way;
    the test above says what happens where one turns.
    """
    model = tiny.model(family, seed=seed, initializer_range=0.1)
    few_words = {"suppress_tokens": list(range(64, tiny.VOCABULARY))}
    model.generation_config.update(**few_words)
    expected = way(model, None)
    assert len(expected[0].unique()) > 20, "a model that repeats itself proves nothing"
    assert torch.equal(way(model, kvarto.Cache(model, "bf16")), expected)


@pytest.mark.parametrize("family", ["llama", "qwen2", "qwen3", "gemma3_text"])
def test_bfloat16_models_are_no_further_from_float32_than_with_transformers_own_cache(family: str) -> None:
    ours, theirs = [], []
    for seed in range(6):
        model, truth = tiny.model(family, seed=seed, dtype=torch.bfloat16), tiny.model(family, seed=seed)
        truth.load_state_dict(model.state_dict())
        inputs = tiny.prompt(200, seed=seed)
        expected = truth(**inputs).logits
        theirs.append(float((model(**inputs).logits.float() - expected).norm() / expected.norm()))
        logits = tiny.feed(model, kvarto.Cache(model, "bf16"), inputs, [150, *[10] * 5])
        ours.append(float((logits.float() - expected).norm() / expected.norm()))
    assert sum(ours) <= 1.1 * sum(theirs)


# ---- the same numbers by every path --------------------------------------------------------------------------------------


def assert_same(got: torch.Tensor, kv: kvarto.Cache, expected: torch.Tensor, other: kvarto.Cache) -> None:
    """Logits [T, V] of the first sequence of two caches that hold the same tokens are the same, up to what the last bit of K and V decides.

    The K and V that a model computes differ between paths in the last bit, and once in ten thousand elements that bit decides a rounding when
    a page is sealed, which later layers pass on. So: the same pages but for a few bytes, and where all bytes are the same, the same logits up to
    float32 rounding.
    """
    pages, others = sealed_bytes(kv, 0), sealed_bytes(other, 0)
    differing = int((pages != others).sum())
    assert differing <= 0.01 * len(pages)
    if differing:
        assert float((got - expected).norm() / expected.norm()) < 0.02
    else:
        assert tiny.relative(got, expected) < 1e-4


def sealed_bytes(kv: kvarto.Cache, row: int) -> torch.Tensor:
    """All sealed pages of a sequence, uint8."""
    pages = [
        layer.sealed.pages[page].flatten() for layer in kv.kv.layers for page in layer.rows[row].packed if page >= 0
    ]
    return torch.cat(pages)


@pytest.mark.parametrize("family", ["llama", "gemma3_text", "gpt_oss"])
@pytest.mark.parametrize("format_text", ["int4", "int8/int4+window64", "kivi2+sink0", "fp8"])
def test_every_path_gives_the_same_logits(family: str, format_text: str) -> None:
    """Whole prompt, pieces, token by token, in a padded batch: one result."""
    model, inputs = tiny.shared(family), tiny.prompt(220)
    whole = kvarto.Cache(model, format_text)
    expected = tiny.feed(model, whole, inputs, [220])[0]
    assert tiny.relative(expected, model(**inputs).logits[0]) > 1e-3, (
        "quantization must be visible, or nothing is tested"
    )
    several = tiny.prompt(220, 150, 91)
    several["input_ids"][0] = inputs["input_ids"][0]
    alone = [(inputs, [7] * 31 + [3]), (inputs, [1] * 220), (inputs, [64, 64, 92])]
    for given, pieces in [*alone, (several, [220]), (several, [100, 120])]:
        kv = kvarto.Cache(model, format_text)
        assert_same(tiny.feed(model, kv, given, pieces)[0], kv, expected, whole)


def test_padding_is_not_stored_and_answers_nothing() -> None:
    model = tiny.shared("llama")
    kv = kvarto.Cache(model, "int4")
    model(**tiny.prompt(200, 10), cache=kv)
    assert [[row.length for row in layer.rows] for layer in kv.kv.layers] == [[200, 10]] * 4
    assert kv.get_seq_length() == 200
    assert kv.batch_size == 2


def test_padding_on_the_right_in_a_first_turn() -> None:
    """Rows of different length that all go on: each must equal itself alone."""
    model = tiny.shared("qwen3")
    inputs = tiny.prompt(70, 30)
    inputs["input_ids"][1], inputs["attention_mask"][1] = (
        inputs["input_ids"][1].roll(30),
        inputs["attention_mask"][1].roll(30),
    )
    kv = kvarto.Cache(model, "fp32")
    tiny.feed(model, kv, inputs, [70])
    more = tiny.prompt(40, 40, seed=4)
    both = {name: torch.cat([inputs[name], more[name]], dim=1) for name in inputs}
    alone = torch.cat([both["input_ids"][1:, :30], more["input_ids"][1:]], dim=1)
    assert tiny.relative(tiny.feed(model, kv, both, [40])[1], model(alone).logits[0, 30:]) < 1e-4


@pytest.mark.parametrize(("family", "theirs_is_alone"), [("llama", True), ("gemma3_text", False)])
def test_padding_between_turns_takes_no_place_in_a_sliding_window(family: str, theirs_is_alone: bool) -> None:
    """A known difference. Padding in the middle of a sequence is absent from our pages, so that a sliding layer sees its last W tokens and each row
    equals itself without the padding. transformers' own cache keeps the columns of padding: its window is W columns, fewer tokens, and the row
    depends on what it was batched with. Without sliding layers both agree.
    """
    model, gap = tiny.shared(family), tiny.WINDOW_TOKENS - 8
    first, more = tiny.prompt(60, 60), tiny.prompt(30, 30, seed=5)
    padding = {name: torch.zeros((2, gap), dtype=torch.long) for name in first}
    padding["input_ids"][0] = 7
    padding["attention_mask"][0] = 1  # The other row talks on.
    inputs = {name: torch.cat([first[name], padding[name], more[name]], dim=1) for name in first}
    alone = model(torch.cat([first["input_ids"][1:], more["input_ids"][1:]], dim=1)).logits[0, 60:]
    pieces = [60 + gap, 30]
    ours = tiny.feed(model, kvarto.Cache(model, "fp32"), inputs, pieces)[1, 60 + gap :]
    theirs = tiny.feed(model, DynamicCache(config=model.config), inputs, pieces)[1, 60 + gap :]
    assert tiny.relative(ours, alone) < 1e-4
    assert (tiny.relative(theirs, alone) < 1e-4) == theirs_is_alone


# ---- sequences -----------------------------------------------------------------------------------------------------------


@pytest.mark.parametrize("family", ["llama", "gemma3_text"])
@pytest.mark.parametrize(("held", "taken"), [(100, 30), (130, 10), (130, 60), (128, 64), (200, 8), (129, 1)])
def test_crop_then_go_on(family: str, held: int, taken: int) -> None:
    model, inputs = tiny.shared(family), tiny.prompt(200)
    kv, plain = kvarto.Cache(model, "int4"), kvarto.Cache(model, "int4")
    tiny.feed(model, kv, inputs, [held])
    kv.crop(-taken)
    kv.crop(0)
    kept = held - taken
    assert kv.get_seq_length() == kept
    got = tiny.feed(model, kv, inputs, [200 - kept])[0]
    assert_same(got, kv, tiny.feed(model, plain, inputs, [kept, 200 - kept])[0, kept:], plain)


def test_a_crop_that_reaches_too_far_is_refused_and_changes_nothing() -> None:
    model, inputs = tiny.shared("llama"), tiny.prompt(200)
    kv = kvarto.Cache(model, "int4")
    tiny.feed(model, kv, inputs, [195])
    with pytest.raises(Unsupported, match="raw values are gone"):
        kv.crop(-100)
    with pytest.raises(Unsupported, match="only 195 tokens"):
        kv.crop(-196)
    with pytest.raises(UsageError, match="tokens_to_remove"):
        kv.crop(100)
    plain = kvarto.Cache(model, "int4")
    assert_same(tiny.feed(model, kv, inputs, [5])[0], kv, tiny.feed(model, plain, inputs, [200])[0, 195:], plain)


def test_a_crop_behind_the_sliding_window_is_refused() -> None:
    model = tiny.shared("gemma3_text")
    kv = kvarto.Cache(model, "fp32")
    model(**tiny.prompt(640), cache=kv)
    with pytest.raises(Unsupported, match="behind the sliding window"):
        kv.crop(-512)


def test_a_crop_of_padding_and_of_recurrent_states_is_refused() -> None:
    model, inputs = tiny.shared("llama"), tiny.prompt(20, 20)
    inputs["attention_mask"][1, 15:] = 0
    kv = kvarto.Cache(model, "int4")
    model(**inputs, cache=kv)
    with pytest.raises(Unsupported, match="padding"):
        kv.crop(-1)
    hybrid = tiny.shared("qwen3_next")
    kv = kvarto.Cache(hybrid, "int4")
    hybrid(**tiny.prompt(20), cache=kv)
    with pytest.raises(Unsupported, match="recurrent state"):
        kv.crop(-1)


def test_batch_operations_move_rows() -> None:
    model, inputs = tiny.shared("llama"), tiny.prompt(150, 80)
    kv = kvarto.Cache(model, "int4")
    for operation in (kv.batch_repeat_interleave, kv.batch_select_indices, kv.reorder_cache):
        operation(
            2 if operation == kv.batch_repeat_interleave else torch.tensor([], dtype=torch.long)
        )  # nothing held yet
    tiny.feed(model, kv, inputs, [150])
    expected = tiny.feed(model, copy.deepcopy(kv), tiny.one_more_token(inputs), [1])
    kv.batch_repeat_interleave(2)
    kv.reorder_cache(torch.tensor([3, 0, 1, 2]))
    kv.batch_select_indices(torch.tensor([True, True, False, True]))
    rows = torch.tensor([1, 0, 1])
    picked = {name: tensor[rows] for name, tensor in inputs.items()}
    assert kv.batch_size == 3
    assert tiny.relative(tiny.feed(model, kv, tiny.one_more_token(picked), [1]), expected[rows]) < 1e-4


def test_a_copied_cache_is_a_shared_prefix() -> None:
    model, inputs = tiny.shared("qwen2"), tiny.prompt(150)
    prefix = kvarto.Cache(model, "int4")
    tiny.feed(model, prefix, {name: tensor[:, :100] for name, tensor in inputs.items()}, [100])
    first = model.generate(**inputs, **GREEDY, cache=copy.deepcopy(prefix))
    again = model.generate(**inputs, **GREEDY, cache=copy.deepcopy(prefix))
    assert torch.equal(first, again)
    assert prefix.get_seq_length() == 100


def test_the_memory_of_a_cache_that_is_let_go_is_free_at_once() -> None:
    model, inputs = tiny.shared("llama"), tiny.prompt(100)
    gc.disable()  # It would find a cycle, some time: that is too late for a GPU that is full.
    try:
        kv = kvarto.Cache(model, "int4")
        model.generate(**inputs, **GREEDY, cache=kv)
        pages = weakref.ref(kv.kv)
        del kv
        assert pages() is None
    finally:
        gc.enable()


def test_reset_forgets_everything() -> None:
    model, inputs = tiny.shared("llama"), tiny.prompt(100)
    kv = kvarto.Cache(model, "int4")
    expected = model.generate(**inputs, **GREEDY, cache=kv)
    kv.reset()
    assert (kv.get_seq_length(), kv.batch_size, kv.footprint().payload_bytes, kv.footprint().raw_bytes) == (0, -1, 0, 0)
    assert torch.equal(model.generate(**inputs, **GREEDY, cache=kv), expected)


def test_what_a_cache_says_of_itself() -> None:
    model = tiny.shared("llama")
    kv = kvarto.Cache(model, "int4+skip=0,-1")
    model(**tiny.prompt(200), cache=kv)
    assert isinstance(kv.kv, PagedKV)
    assert [str(layer.format) for layer in kv.kv.layers] == ["fp32", "int4", "int4", "fp32"]
    assert (str(kv.policy), str(kv.format)) == ("int4+skip=0,-1", "int4")
    assert kv.kernel_names in {"numba", "reference"}
    assert repr(kv) == "kvarto.Cache(int4+skip=0,-1, 4 layers, 200 columns)"
    assert not kv.is_compileable
    assert kvarto.Cache(model, kvarto.parse_format("int8"), kernel="reference").kernel_names == "reference"
    assert kv.footprint().payload_bytes > 0


# ---- the model stays what it was -----------------------------------------------------------------------------------------


@pytest.mark.parametrize(
    ("family", "implementation"),
    [("llama", "sdpa"), ("llama", "eager"), ("gemma3_text", "sdpa"), ("gpt_oss", "eager")],
)
def test_an_attached_model_gives_the_same_numbers_as_before(family: str, implementation: str) -> None:
    model = tiny.model(family, attn_implementation=implementation)
    inputs = tiny.prompt(100, 70)

    def numbers() -> list[torch.Tensor]:
        own = DynamicCache(config=model.config)
        return [model(**inputs).logits, model(**inputs, cache=own).logits, model.generate(**inputs, **GREEDY)]

    before = numbers()
    kv = kvarto.Cache(model, "int4")
    model.generate(**inputs, **GREEDY, cache=kv)
    assert model.config._attn_implementation == f"kvarto-{implementation}"
    assert all(torch.equal(a, b) for a, b in zip(before, numbers(), strict=True))
    interface.detach(model)
    assert model.config._attn_implementation == implementation
    assert all(torch.equal(a, b) for a, b in zip(before, numbers(), strict=True))


def test_several_caches_live_on_one_model_at_once() -> None:
    model, inputs = tiny.shared("llama"), tiny.prompt(100)
    alone = [
        tiny.feed(model, kv, inputs, [60, 20, 20]) for kv in (kvarto.Cache(model, "int4"), kvarto.Cache(model, "fp8"))
    ]
    own = tiny.feed(model, DynamicCache(config=model.config), inputs, [60, 20, 20])
    caches = [kvarto.Cache(model, "int4"), kvarto.Cache(model, "fp8"), DynamicCache(config=model.config)]
    steps = [[tiny.feed(model, kv, inputs, [size]) for kv in caches] for size in (60, 20, 20)]
    for pieces, expected in zip(zip(*steps, strict=True), [*alone, own], strict=True):
        assert torch.equal(torch.cat(pieces, dim=1), expected)


def test_only_the_text_decoder_of_a_composite_model_is_attached() -> None:
    from transformers import CLIPVisionConfig, LlavaConfig, LlavaForConditionalGeneration

    small = {"hidden_size": 32, "intermediate_size": 32, "num_hidden_layers": 1, "num_attention_heads": 2}
    vision = CLIPVisionConfig(**small, image_size=28, patch_size=14)
    torch.manual_seed(0)
    config = LlavaConfig(text_config=tiny.config("llama"), vision_config=vision, image_token_index=190)
    model = LlavaForConditionalGeneration(config).eval().requires_grad_(False)
    expected = model.generate(**tiny.prompt(40), **GREEDY)
    assert torch.equal(model.generate(**tiny.prompt(40), **GREEDY, cache=kvarto.Cache(model, "fp32")), expected)
    assert model.config.text_config._attn_implementation == "kvarto-sdpa"
    assert model.config.vision_config._attn_implementation == "sdpa"


def test_importing_kvarto_imports_no_torch() -> None:
    code = "import kvarto, sys; assert 'torch' not in sys.modules and 'numba' not in sys.modules; kvarto.parse_format('int4')"
    subprocess.run([sys.executable, "-c", code + "; assert 'torch' not in sys.modules"], check=True)


# ---- the real model ------------------------------------------------------------------------------------------------------


@pytest.fixture(scope="module")
def real() -> tuple[Any, Any]:
    from kvarto.models.load import load

    loaded = load("smollm2-135m-instruct")
    loaded.tokenizer.padding_side = "left"
    return loaded.model, loaded.tokenizer


TEXTS = [
    "Here is a short history of the city of Paris, from the Romans to our own days. " * 3,
    "The capital of France is",
    "def fibonacci(n):\n",
]


@pytest.mark.model
@pytest.mark.parametrize(
    ("texts", "format_text"),
    [
        pytest.param(TEXTS[:1], "fp32", id="alone"),
        pytest.param(TEXTS, "fp32", id="padded batch"),
        pytest.param(TEXTS[:1], "bf16", id="half pages"),
    ],
)
def test_the_real_model_generates_the_same_text(real: tuple[Any, Any], texts: list[str], format_text: str) -> None:
    model, tokenizer = real
    inputs = tokenizer(texts, return_tensors="pt", padding=True)
    expected = model.generate(**inputs, max_new_tokens=70, do_sample=False)
    got = model.generate(**inputs, max_new_tokens=70, do_sample=False, cache=kvarto.Cache(model, format_text))
    assert torch.equal(got, expected)


REPEATING = "The cat sat on the mat. The dog sat on the"


@pytest.mark.model
@pytest.mark.parametrize("format_text", ["fp32", "bf16"])
@pytest.mark.parametrize(
    ("texts", "options"),
    [
        pytest.param(TEXTS[:1], {}, id="greedy"),
        pytest.param(TEXTS[:1], {"num_beams": 4}, id="beams"),
        pytest.param(TEXTS, {}, id="padded batch"),
        pytest.param([REPEATING], {"prompt_lookup_num_tokens": 8}, id="crop"),
    ],
)
def test_the_real_model_gives_the_same_tokens_in_every_way(
    real: tuple[Any, Any], texts: list[str], options: dict[str, Any], format_text: str, monkeypatch: pytest.MonkeyPatch
) -> None:
    model, tokenizer = real
    inputs = tokenizer(texts, return_tensors="pt", padding=True)
    options = {**options, "max_new_tokens": 24, "do_sample": False}
    expected = model.generate(**inputs, **options)
    cropped, crop = [], kvarto.Cache.crop
    monkeypatch.setattr(kvarto.Cache, "crop", lambda kv, tokens: (cropped.append(tokens), crop(kv, tokens))[1])
    got = model.generate(**inputs, **options, cache=kvarto.Cache(model, format_text))
    assert torch.equal(got, expected)
    assert any(cropped) == ("prompt_lookup_num_tokens" in options), "a way that is called crop must crop"
