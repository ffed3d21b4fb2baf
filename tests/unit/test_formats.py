from __future__ import annotations

import pytest

from kvarto.errors import UnknownName, Unsupported, UsageError
from kvarto.formats import parse_format, parse_policy, raw_format
from kvarto.layout import Geometry


@pytest.mark.parametrize(
    "text",
    ["int4", "int8/int4", "fp8", "bf16", "int4+sink0", "int4+sink128+window256", "kivi2/fp8", "int4+skip=0,1,-1"],
)
def test_text_round_trips(text: str) -> None:
    assert str(parse_policy(text)) == text


def test_formats_below_eight_bits_keep_the_first_page_raw() -> None:
    assert parse_format("int4").sink_tokens == 64
    assert parse_format("int8/int4").sink_tokens == 64
    assert parse_format("int4+sink0").sink_tokens == 0
    assert parse_format("int8").sink_tokens == parse_format("bf16").sink_tokens == 0


def test_unknown_codec_suggests() -> None:
    with pytest.raises(UnknownName, match="did you mean int4"):
        parse_format("imt4")
    with pytest.raises(UnknownName, match="codec"):
        parse_format("")


@pytest.mark.parametrize("text", ["int4+", "int4+sink", "int4+sink64x", "int4+blah", "int4+sink-64"])
def test_malformed_part_says_the_grammar(text: str) -> None:
    with pytest.raises(UsageError, match="K-codec/V-codec"):
        parse_format(text)


def test_sink_must_be_whole_pages() -> None:
    with pytest.raises(UsageError, match="sink tokens: expected a multiple of the page's 64 tokens, got 10"):
        parse_format("int4+sink10")


def test_policy_skips_layers_from_both_ends() -> None:
    policy, raw = parse_policy("int4+skip=0,-1"), raw_format("float32")
    chosen = [policy.for_layer(i, 4, raw) for i in range(4)]
    assert [str(f) for f in chosen] == ["fp32", "int4", "int4", "fp32"]
    with pytest.raises(UsageError, match="skip: expected layers between -2 and 1, got 5"):
        parse_policy("int4+skip=5").for_layer(0, 2, raw)
    with pytest.raises(UsageError, match="skip"):
        parse_policy("int4+skip=a")
    with pytest.raises(UsageError, match="one format for all layers"):
        parse_format("int4+skip=0")


@pytest.mark.parametrize("text", ["int4+sink64+sink128", "int4+skip=0+skip=1", "int4+window64+window64"])
def test_a_part_given_twice_is_refused(text: str) -> None:
    with pytest.raises(UsageError, match="once"):
        parse_policy(text)


@pytest.mark.parametrize("text", ["int4+sink" + "9" * 5000, "int4+sink٦٤", "int4+skip=1_0", "int4+skip=0,,1"])
def test_numbers_are_plain_digits(text: str) -> None:
    with pytest.raises(UsageError):
        parse_policy(text)


def test_geometry_a_codec_cannot_write_is_refused_with_the_reason() -> None:
    with pytest.raises(Unsupported, match="no Hadamard transform of order 72"):
        parse_format("int4").layout(Geometry(1, 64, 72))


def test_raw_format_of_other_dtypes_is_refused() -> None:
    with pytest.raises(Unsupported, match="float64"):
        raw_format("float64")


@pytest.mark.parametrize(
    ("text", "bits"),
    [("bf16", 16.0), ("int8", 8.3125), ("int4", 4.3125), ("kivi4-g32", 5.0), ("kivi2-g32", 3.0), ("fp8-token", 8.125)],
)
def test_bits_per_element_at_dim_128(text: str, bits: float) -> None:
    assert parse_format(text).layout(Geometry(8, 128, 128)).bits_per_element == bits
