"""Bytes written by a version of a codec are read by it for ever, and the same input gives the same bytes."""

from __future__ import annotations

import importlib.util
from pathlib import Path

import pytest

pytest.importorskip("torch")

import torch

from kvarto.binding import BoundCodec
from kvarto.codecs import registry
from kvarto.formats import Format
from kvarto.page import CodecId, Page
from kvarto.testing import key_like

_spec = importlib.util.spec_from_file_location("golden_write", Path(__file__).parent / "write.py")
assert _spec is not None
assert _spec.loader is not None
write = importlib.util.module_from_spec(_spec)
_spec.loader.exec_module(write)


@pytest.mark.parametrize("name", list(registry))
def test_golden_page(name: str) -> None:
    golden = write.path(name)
    assert golden.exists(), f"no golden page of {name}: run 'make golden' and commit it"
    page = Page.from_bytes(golden.read_bytes())
    codec = registry[name]
    layout = Format(codec, codec).layout(write.GEOMETRY)
    identity = CodecId(name, codec.version)
    page.expect(identity, identity, write.GEOMETRY, layout.nbytes)
    assert page == write.seal(name), (
        "the same input no longer gives the same bytes: raise the codec's version and write an ADR"
    )
    payload = torch.frombuffer(bytearray(page.payload), dtype=torch.uint8).view(1, 1, -1)
    k = BoundCodec(codec, layout.k).decode(payload[..., : layout.k.nbytes])
    error = (k - key_like((1, 1, 64, 64), seed=42)).abs()
    assert float(error.median()) <= {32: 0.0, 16: 0.01, 8: 0.5}.get(int(codec.bits), 20.0)


def test_every_golden_page_belongs_to_a_codec() -> None:
    known = {write.path(name).name for name in registry}
    assert {path.name for path in write.PAGES.glob("*.page")} == known
