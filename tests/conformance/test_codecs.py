"""Every registered codec keeps the protocol; a new file in kvarto/codecs is tested by being there."""

from __future__ import annotations

import pytest

from kvarto.codecs import registry
from kvarto.testing import check_codec

pytest.importorskip("torch")


@pytest.mark.parametrize("name", list(registry))
def test_codec_conforms(name: str) -> None:
    check_codec(registry[name])


@pytest.mark.parametrize("name", list(registry))
def test_codec_names_its_source_and_fits_a_page_header(name: str) -> None:
    codec = registry[name]
    assert codec.source
    assert codec.version >= 1
    assert len(name.encode("ascii")) <= 24
    assert "+" not in name
    assert "/" not in name
