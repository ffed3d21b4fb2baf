"""Bytes written by a version of a codec are read by it for ever, and the same input gives the same bytes."""

from __future__ import annotations

import importlib.util
from pathlib import Path

import pytest

pytest.importorskip("torch")

import numpy as np

from kvarto.codecs import registry
from kvarto.page import CodecId, Page

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
    layout = write.chosen(name).layout(write.GEOMETRY)
    identity = CodecId(name, codec.version)
    page.expect(identity, identity, write.GEOMETRY, layout.nbytes)
    assert page == write.seal(name), (
        "the same input no longer gives the same bytes: raise the codec's version and write an ADR"
    )


@pytest.mark.parametrize("name", list(registry))
def test_golden_page_is_read_as_it_was_when_it_was_written(name: str) -> None:
    read = write.decode(name, Page.from_bytes(write.path(name).read_bytes()))
    with np.load(write.decoded_path(name), allow_pickle=False) as golden:
        assert set(golden) == set(read) == {"k", "v"}
        for side, numbers in read.items():
            assert numbers.dtype == golden[side].dtype == np.float32
            assert numbers.shape == golden[side].shape == (64, 64)
            # A rotation sums in float32; a machine may fuse a product and a sum.
            np.testing.assert_allclose(
                numbers, golden[side], rtol=1e-6, atol=1e-6 * np.abs(golden[side]).max(),
                err_msg=f"{name} no longer reads its own bytes: a new meaning is a new version",
            )  # fmt: skip


@pytest.mark.parametrize("name", list(registry))
def test_golden_numbers_are_near_what_was_sealed(name: str) -> None:
    """So that no wrong reading was ever committed: K is off by 20 at most (its range is 320), V, of unit scale / 50, by its own range.

    Errors that are relative to a token are within the bound of TurboQuant, sqrt(3) pi / 2 times that of uniform codes of the range.
    """
    codec = registry[name]
    most = 4.0 ** -min(codec.bits, 3.0) * (3.0**0.5 * np.pi / 2 if codec.relative else 1.0)
    with np.load(write.decoded_path(name), allow_pickle=False) as golden:
        for side, x in zip("kv", write.inputs(), strict=True):
            expected = x[0, 0].numpy()
            error = np.square(golden[side] - expected).mean() / np.square(expected).mean()
            assert error < most, (side, error)


def test_every_golden_file_belongs_to_a_codec() -> None:
    known = {path.name for name in registry for path in (write.path(name), write.decoded_path(name))}
    assert {path.name for path in write.PAGES.iterdir()} == known
