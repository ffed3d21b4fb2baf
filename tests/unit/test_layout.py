from __future__ import annotations

import pytest

from kvarto.errors import ShapeError
from kvarto.layout import Geometry, PageLayout, Side, slab_layout


def test_fields_are_aligned_and_slab_is_padded() -> None:
    layout = slab_layout(Side.K, 64, 64, [("codes", "uint8", (3,)), ("b", "float32", (2,)), ("c", "float16", (1,))])
    assert [(field.name, field.offset, field.end) for field in layout.fields] == [
        ("codes", 0, 3),
        ("b", 4, 12),
        ("c", 12, 14),
    ]
    assert layout.nbytes == 16
    assert layout["b"].nbytes == 8
    assert layout.payload_nbytes == 3
    assert layout.bits_per_element == 16 * 8 / (64 * 64)


def test_page_is_heads_of_k_then_v() -> None:
    geometry = Geometry(heads=3, k_dim=64, v_dim=128)
    k = slab_layout(Side.K, 64, 64, [("codes", "uint8", (64, 32))])
    v = slab_layout(Side.V, 64, 128, [("codes", "uint8", (128, 32))])
    layout = PageLayout(geometry, k, v)
    assert layout.pair_nbytes == 64 * 32 + 128 * 32
    assert layout.nbytes == 3 * layout.pair_nbytes
    assert layout.slab_range(Side.K) == (0, 2048)
    assert layout.slab_range(Side.V) == (2048, 6144)
    assert layout.bits_per_element == 4.0
    assert (k.tile_shape, v.tile_shape) == ((64, 64), (128, 64))


@pytest.mark.parametrize(
    ("heads", "k_dim", "v_dim", "tokens", "name"),
    [(0, 64, 64, 64, "heads"), (1, 63, 64, 64, "k_dim"), (1, 64, 0, 64, "v_dim"), (1, 64, 64, 48, "page_tokens")],
)
def test_bad_geometry_is_refused_by_name(heads: int, k_dim: int, v_dim: int, tokens: int, name: str) -> None:
    with pytest.raises(ShapeError, match=name):
        Geometry(heads, k_dim, v_dim, tokens)


def test_pages_for() -> None:
    assert [Geometry(1, 64, 64).pages_for(tokens) for tokens in (0, 1, 63, 64, 65)] == [0, 1, 1, 1, 2]
