"""KVQuant by the GPU kernel: levels in a table, ranges of heads, slots, RoPE. Cases and tolerances are those of test_triton.py."""

from __future__ import annotations

from collections.abc import Callable, Sequence
from dataclasses import replace

import pytest

pytest.importorskip("torch")
pytest.importorskip("triton")

import torch
from test_triton import DEVICE, Case, assert_same_bits, case, deterministic, few_programs  # noqa: F401
from torch import Tensor

from kvarto.binding import BoundCodec, choose_kernel
from kvarto.codecs import Codec, registry
from kvarto.codecs.kvquant import KvQuant
from kvarto.codecs.rope import turned
from kvarto.kernels import triton as host
from kvarto.kernels.triton import TritonKernel
from kvarto.kernels.triton_arguments import tables
from kvarto.layout import Geometry, PageLayout, Side
from kvarto.rule import Rule
from kvarto.testing import key_like, specimen, specimen_heads

NAMES = ("kvquant4", "kvquant3", "kvquant2")
SINK = Rule(64, sink_pages=1)
FAR = (1 << 24) + 64
"""Where float32 does not tell neighbouring places apart."""


@pytest.mark.parametrize("name", ["kvquant4", "kvquant3", pytest.param("kvquant2", marks=pytest.mark.slow)])
@pytest.mark.parametrize("dim", [64, 80, 128])
def test_one_query_of_each_sequence_behind_a_raw_page(name: str, dim: int) -> None:
    case(name, "fp16", Geometry(2, dim, dim), (64, 200), rule=SINK).check()


@pytest.mark.parametrize(
    ("name", "counts", "R"), [("kvquant4", (0, 5, 16), 1), ("kvquant3", (2, 0, 3), 4), ("kvquant2", (1, 2, 5), 3)]
)
def test_several_queries(name: str, counts: Sequence[int], R: int) -> None:
    case(name, "fp16", Geometry(2, 64, 80), (65, 130, 260), counts, R=R, rule=SINK).check()


@pytest.mark.parametrize(("name", "dim"), [("kvquant4", 128), ("kvquant3", 64), ("kvquant3", 80), ("kvquant2", 128)])
def test_prefill(name: str, dim: int) -> None:
    case(name, "fp16", Geometry(2, dim, dim), (220, 150), (100, 1), R=2, rule=SINK).check()


@pytest.mark.parametrize("counts", [(1, 1), (17, 2)])
@pytest.mark.parametrize(
    ("text", "geometry"),
    [
        ("kvquant4", Geometry(1, 256, 64)),  # three slots
        ("kvquant2", Geometry(1, 96, 256)),
        ("kvquant3", Geometry(1, 64, 64, 32)),  # rows of 4 bytes
        ("kvquant4/kvquant2", Geometry(1, 24, 40, 128)),
        ("int4/kvquant3", Geometry(2, 64, 80)),  # one side has no table: decoded, then attended
        ("kvquant2/int8", Geometry(2, 80, 64)),
        ("kvquant3/int4", Geometry(1, 64, 64)),
    ],
)
def test_geometries_and_mixed_formats(text: str, geometry: Geometry, counts: Sequence[int]) -> None:
    case(text, "fp16", geometry, (100, 300), counts, R=3, rule=Rule(geometry.page_tokens)).check()


@pytest.mark.parametrize("counts", [(1, 5), (30, 1)])
@pytest.mark.parametrize(
    ("rule", "options"),
    [
        (Rule(64, sink_pages=1, window_pages=1), {"softcap": 5.0}),
        (Rule(64, sink_pages=1, sliding_tokens=130), {"sinks": torch.tensor([1.0, -2.0])}),
    ],
)
def test_rules(rule: Rule, options: dict[str, object], counts: Sequence[int]) -> None:
    case("kvquant3", "fp16", Geometry(1, 64, 64), (200, 325), counts, R=2, rule=rule, **options).check()  # type: ignore[arg-type]


def test_prefill_in_stretches(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(host, "_SCRATCH_BYTES", 1)
    case("kvquant4", "fp16", Geometry(1, 64, 64), (330, 65), (150, 20), R=2, rule=SINK).check()


# ---- RoPE ------------------------------------------------------------------------------------------------------------


def rotated(before: Callable[[Tensor], Tensor], place: int) -> Callable[[Tensor], Tensor]:
    """For `case`: normal numbers [pages, S, Hkv, D], changed by `before`, are keys before RoPE of a sequence that begins at `place`."""

    def keys(k: Tensor) -> Tensor:
        first = torch.arange(len(k), dtype=torch.int32) * k.shape[1] + place
        return turned(before(k).transpose(1, 2), first, angles(k.shape[-1])).transpose(1, 2)

    return keys


def angles(dim: int, pairs: int | None = None) -> tuple[float, ...]:
    return tuple(10_000.0 ** (-2.0 * i / dim) for i in range(dim // 2 if pairs is None else pairs))


@pytest.mark.parametrize("counts", [(1, 3), (40, 1)])
@pytest.mark.parametrize("place", [64, 1 << 20, FAR, (1 << 31) - 64 * 8])
def test_pages_anywhere_in_a_sequence(place: int, counts: Sequence[int]) -> None:
    """Keys that lie about a mean before RoPE: a turn that is off shows."""
    mean = torch.linspace(-2.0, 3.0, 64)
    codec = registry["kvquant4"].fitted(
        torch.randn(16, 64, 64, generator=torch.Generator().manual_seed(3)) * 0.5, Side.K
    )
    assert isinstance(codec, KvQuant)
    assert codec.calibrated is not None
    zero = tuple((mean + torch.tensor(codec.calibrated.zero[0])).tolist())
    codec = replace(codec, calibrated=replace(codec.calibrated, zero=(zero,), angles=angles(64)))
    codecs = codec, specimen(registry["kvquant4"], Side.V, 64)
    made = case(
        "kvquant4", "fp16", Geometry(2, 64, 64), (130, 250), counts, R=2, rule=SINK, place=place, codecs=codecs,
        keys=rotated(lambda k: 0.5 * k + mean, place),
    )  # fmt: skip
    made.check()


@pytest.mark.parametrize("counts", [(1, 1), (17, 2)])
@pytest.mark.parametrize("pairs", [0, 1, 20, 40])
def test_rope_of_some_channels_only(pairs: int, counts: Sequence[int]) -> None:
    geometry = Geometry(2, 80, 64)
    codecs = [specimen_heads(registry["kvquant3"], side, dim, 2) for side, dim in ((Side.K, 80), (Side.V, 64))]
    codec = codecs[0]
    assert isinstance(codec, KvQuant)
    assert codec.calibrated is not None
    codec = replace(codec, calibrated=replace(codec.calibrated, angles=angles(2 * pairs or 1, pairs)))
    case("kvquant3", "fp16", geometry, (100, 250), counts, codecs=(codec, codecs[1]), place=6400, rule=SINK).check()


@pytest.mark.parametrize("counts", [(1, 1), (17, 2)])
@pytest.mark.parametrize("sparse", [True, False])
def test_a_large_bias_of_a_channel_that_turns_slowly(sparse: bool, counts: Sequence[int]) -> None:
    """What real keys have; float16 would round them by a tenth, and scores with them."""
    before = key_like((16, 64, 64), seed=2)
    before[..., [3, 35]] = 0.0
    bias = torch.zeros(64)
    bias[31], bias[62] = 250.0, -180.0
    codec = registry["kvquant4"]
    assert isinstance(codec, KvQuant)
    codec = replace(codec, sparse=sparse)
    keys = turned(before + bias, torch.zeros(16, dtype=torch.int32), angles(64))
    made = case(
        "kvquant4", "fp16", Geometry(1, 64, 64), (65, 330), counts, rule=SINK, dtype=torch.float16,
        codecs=(codec.fitted(keys, Side.K), specimen(codec, Side.V, 64)), keys=rotated(lambda k: k + bias, 0),
    )  # fmt: skip
    made.check()


# ---- what else it promises -------------------------------------------------------------------------------------------


def bound(name: str, geometry: Geometry, heads: int) -> tuple[PageLayout, BoundCodec, BoundCodec]:
    k, v = (specimen_heads(registry[name], side, geometry.dim(side), heads) for side in Side)
    layout = PageLayout(geometry, k.layout(Side.K, 64, geometry.k_dim), v.layout(Side.V, 64, geometry.v_dim))
    return layout, BoundCodec(k, layout.k), BoundCodec(v, layout.v)


@pytest.mark.parametrize("name", NAMES)
def test_it_is_chosen_on_a_gpu(name: str) -> None:
    for heads in (1, 2):
        assert choose_kernel(None, *bound(name, Geometry(2, 64, 80), heads), "cuda").name == "triton"


def test_refusals_say_why() -> None:
    assert TritonKernel().supports(*bound("kvquant4", Geometry(4, 64, 64), 2), DEVICE).reason == (
        "K: constants of 2 heads, in pages of 4"
    )
    layout, k, v = bound("kvquant4", Geometry(2, 64, 64), 2)
    without: Codec = registry["kvquant4"]
    assert TritonKernel().supports(layout, BoundCodec(without, layout.k), v, DEVICE).reason == "the K codec has no tile"
    assert TritonKernel().supports(layout, k, BoundCodec(without, layout.v), DEVICE).reason == "the V codec has no tile"


def test_constants_are_sent_once() -> None:
    """A graph holds their addresses; layers share what RoPE's angles say."""
    made = case("kvquant4", None, Geometry(2, 64, 64), (200,))
    device, pages = torch.device(DEVICE), made.sets[0]
    first, again = tables(pages, device), tables(replace(pages, k=BoundCodec(pages.k.codec, pages.k.layout)), device)  # type: ignore[attr-defined]
    assert [id(value) for value in first.values()] == [id(value) for value in again.values()]
    other = tables(case("kvquant2", None, Geometry(2, 64, 64), (200,)).sets[0], device)
    assert other["phases"] is first["phases"]
    assert other["k_told"] is not first["k_told"]
    assert set(tables(case("int8", None, Geometry(2, 64, 64), (200,)).sets[0], device).values()) == {None}


@pytest.mark.parametrize(("length", "counts"), [pytest.param(2200, (1, 3), marks=pytest.mark.slow), (330, (17, 20))])
def test_a_sequence_has_the_same_bits_alone_and_in_a_batch(length: int, counts: Sequence[int]) -> None:
    made: Case = case("kvquant2", "fp16", Geometry(1, 64, 64), (200, length), counts, R=2, rule=SINK)
    start = made.queries.start.tolist()
    with deterministic():
        together = made.attend()
        for b in range(2):
            alone = made.row(b).attend()
            assert_same_bits(
                alone, type(alone)(together.out[start[b] : start[b + 1]], together.lse[start[b] : start[b + 1]])
            )
