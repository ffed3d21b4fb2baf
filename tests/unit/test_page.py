from __future__ import annotations

import dataclasses

import pytest
from hypothesis import given
from hypothesis import strategies as st

from kvarto.errors import BadMagic, ChecksumMismatch, PageFormatError, PageMismatch, UnsupportedVersion
from kvarto.layout import Geometry
from kvarto.page import HEADER_BYTES, CodecId, Page

PAGE = Page(CodecId("int4", 1), CodecId("int8", 2), Geometry(2, 64, 128), bytes(range(256)) * 4)


def test_round_trip() -> None:
    assert Page.from_bytes(PAGE.to_bytes()) == PAGE


@given(position=st.integers(0, HEADER_BYTES + 1023), bit=st.integers(0, 7))
def test_any_flipped_bit_is_found(position: int, bit: int) -> None:
    data = bytearray(PAGE.to_bytes())
    data[position] ^= 1 << bit
    with pytest.raises(PageFormatError):
        Page.from_bytes(bytes(data))


@given(st.binary(max_size=600))
def test_any_bytes_are_refused_by_name(data: bytes) -> None:
    with pytest.raises(PageFormatError):
        Page.from_bytes(data)


def test_each_fault_has_its_own_error() -> None:
    data = PAGE.to_bytes()
    with pytest.raises(BadMagic, match="KVRT"):
        Page.from_bytes(b"GGUF" + data[4:])
    with pytest.raises(BadMagic, match="3 bytes"):
        Page.from_bytes(data[:3])
    with pytest.raises(UnsupportedVersion, match="expected format version 1, got 9"):
        Page.from_bytes(data[:4] + b"\x09\x00" + data[6:])
    with pytest.raises(PageMismatch, match="payload bytes: expected 1024, got 1023"):
        Page.from_bytes(data[:-1])
    with pytest.raises(ChecksumMismatch):
        Page.from_bytes(data[:-1] + b"\x00")


def test_expect_refuses_other_pages() -> None:
    right = (PAGE.k_codec, PAGE.v_codec, PAGE.geometry, 1024)
    assert PAGE.expect(*right) is PAGE
    with pytest.raises(PageMismatch, match="K codec: expected fp8 v1, got int4 v1"):
        PAGE.expect(CodecId("fp8", 1), *right[1:])
    with pytest.raises(UnsupportedVersion, match="expected int8 v3, got int8 v2"):
        PAGE.expect(right[0], CodecId("int8", 3), *right[2:])
    with pytest.raises(PageMismatch, match="geometry"):
        PAGE.expect(*right[:2], dataclasses.replace(PAGE.geometry, heads=1), 1024)
    with pytest.raises(PageMismatch, match="payload"):
        PAGE.expect(*right[:3], 1023)


def test_codec_name_must_fit_the_header() -> None:
    with pytest.raises(PageMismatch, match="codec name"):
        dataclasses.replace(PAGE, k_codec=CodecId("x" * 25, 1)).to_bytes()


def forged(**changes: int | bytes) -> bytes:
    """A page whose header lies but whose digest is right."""
    import hashlib

    data = bytearray(PAGE.to_bytes())
    places = {"reserved": (10, 6), "k_name": (16, 24), "tokens": (64, 4), "heads": (68, 4), "k_dim": (72, 4)}
    for name, value in changes.items():
        offset, size = places[name]
        data[offset : offset + size] = (
            value.to_bytes(size, "little") if isinstance(value, int) else value.ljust(size, b"\0")
        )
    digest = hashlib.blake2b(bytes(data[:88]), digest_size=16)
    digest.update(data[HEADER_BYTES:])
    data[88:104] = digest.digest()
    return bytes(data)


@pytest.mark.parametrize(
    ("changes", "name"),
    [
        ({"reserved": 1}, "reserved bytes"),
        ({"k_name": b""}, "codec name"),
        ({"k_name": b"in\xff4"}, "codec name"),
        ({"k_name": b"a b"}, "codec name"),
        ({"tokens": 0}, "geometry: expected page_tokens"),
        ({"heads": 0}, "geometry: expected heads"),
        ({"k_dim": 63}, "geometry: expected k_dim"),
    ],
)
def test_a_header_that_lies_is_refused_even_with_the_right_digest(changes: dict[str, int | bytes], name: str) -> None:
    assert forged() == PAGE.to_bytes()
    with pytest.raises(PageMismatch, match=name):
        Page.from_bytes(forged(**changes))


def test_a_page_owns_its_bytes() -> None:
    data = bytearray(PAGE.to_bytes())
    page = Page.from_bytes(data)
    data[-1] ^= 1
    assert page == PAGE
    assert hash(page) == hash(PAGE)


def test_what_does_not_fit_the_header_is_refused() -> None:
    with pytest.raises(PageMismatch, match="header"):
        dataclasses.replace(PAGE, k_codec=CodecId("int4", 70000)).to_bytes()
