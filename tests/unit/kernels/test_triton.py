"""The GPU kernel against the reference. Without a GPU its programs run in Triton's interpreter (tests/conftest.py), so cases are few and small.

What may not be read is poison: pages that the rule hides from every query are not in the table and hold 0xFF bytes, unfilled slots hold NaN.

**Tolerances.** Tensor cores take float16 operands, which carry 11 bits, and add in float32. Rounding an operand to nearest is an error of at most
u = 2^-11 of it, about u / 3 in the root mean square. Rounded are q, its product with a scale of keys, and p times a scale of values; codes are not.
Codes count from the lowest number of a group, so a code times its scale is some 2.5 times the number: its rounding weighs as much more. An error of
d in a score is one of d in p. Together about 2.5 u: `out` may be off by 4 u = 2e-3 in the 2-norm, and a single row (one token, one head), of which
there are hundreds, by twice that. bfloat16 has 8 bits, but its numbers are stored as they are, so there only q and p are rounded: 1.5 u = 6e-3 with
u = 2^-8. `lse` is a mean of errors of scores, of order 1: 5e-3 for both.
"""

from __future__ import annotations

import warnings
from collections.abc import Callable, Iterator, Sequence
from contextlib import contextmanager, nullcontext
from dataclasses import dataclass, replace
from itertools import pairwise

import pytest

pytest.importorskip("torch")
pytest.importorskip("triton")

import torch
from torch import Tensor

from kvarto.binding import BoundCodec
from kvarto.codecs import registry
from kvarto.codecs.base import Codec
from kvarto.formats import parse_format
from kvarto.kernels import triton as host
from kvarto.kernels.base import PageSet, Partial, Queries
from kvarto.kernels.reference import ReferenceKernel
from kvarto.kernels.triton import TritonKernel
from kvarto.kernels.triton_tune import Tuning, trial
from kvarto.layout import Geometry, PageLayout, Side
from kvarto.rule import Rule
from kvarto.testing import specimen_heads

DEVICE = "cuda" if torch.cuda.is_available() else "cpu"
LENGTHS = (1, 63, 64, 65, 200)
SMALL = Geometry(1, 64, 64)
OUT_TOLERANCE, OUT_TOLERANCE_BFLOAT16, LSE_TOLERANCE = 2e-3, 6e-3, 5e-3
POISON = 0xFF
DECODE_AND_PREFILL = pytest.mark.parametrize("counts", [(1, 1), (17, 2)])


@pytest.fixture(autouse=True)
def few_programs() -> Iterator[None]:
    """In the interpreter each program takes a tenth of a second, one without work too: fewer of them at once."""
    with trial(Tuning(255, True)) if DEVICE == "cpu" else nullcontext():
        yield


@dataclass(frozen=True)
class Case:
    """A ragged batch on the CPU, and the sets that it reads."""

    queries: Queries
    sets: tuple[PageSet, ...]
    rule: Rule
    softcap: float | None = None
    sinks: Tensor | None = None

    def attend(self, kernel: type[TritonKernel] | type[ReferenceKernel] = TritonKernel) -> Partial:
        """What a kernel says, on the CPU; Triton's computes on DEVICE."""
        device = "cpu" if kernel is ReferenceKernel else DEVICE
        queries = Queries(
            _to(self.queries.q, device), self.queries.start.to(device), self.queries.position.to(device),
            self.queries.longest,
        )  # fmt: skip
        sets = [replace(pages, pages=_to(pages.pages, device), table=_to(pages.table, device)) for pages in self.sets]
        scale, sinks = float(queries.q.shape[-1] ** -0.5), None if self.sinks is None else self.sinks.to(device)
        partial = kernel().attend(queries, sets, self.rule, scale=scale, softcap=self.softcap, sinks=sinks)
        return Partial(partial.out.cpu(), partial.lse.cpu())

    def check(self) -> None:
        """The kernel takes the sets, and agrees with the reference."""
        for pages in self.sets:
            support = TritonKernel().supports(pages.layout, pages.k, pages.v, DEVICE)
            assert support, support.reason
        got, expected = self.attend(), self.attend(ReferenceKernel)
        assert got.out.shape == expected.out.shape
        assert got.out.dtype == got.lse.dtype == torch.float32
        assert torch.equal(got.lse == -torch.inf, expected.lse == -torch.inf)
        seen = expected.lse > -torch.inf
        assert not got.out[~seen].any()
        lse_error = (got.lse - expected.lse).abs()[seen]
        assert bool((lse_error <= LSE_TOLERANCE).all()), f"lse is off by {float(lse_error.max()):.1e}"
        out_error, size = (got.out - expected.out).norm(dim=-1), expected.out.norm(dim=-1)
        assert float(out_error.norm()) <= self.tolerance * float(size.norm()), (
            f"out: {out_error.norm() / size.norm():.1e}"
        )
        assert bool((out_error <= 2 * self.tolerance * size).all()), f"a row of out: {(out_error / size).max():.1e}"

    @property
    def tolerance(self) -> float:
        bfloat16 = any(reader.codec.name == "bf16" for pages in self.sets for reader in (pages.k, pages.v))  # type: ignore[attr-defined]
        return OUT_TOLERANCE_BFLOAT16 if bfloat16 else OUT_TOLERANCE

    def row(self, b: int) -> Case:
        """Sequence b alone."""
        first, end = self.queries.start[b : b + 2].tolist()
        start, position = torch.tensor([0, end - first]).int(), self.queries.position[b : b + 1]
        queries = Queries(self.queries.q[first:end], start, position, end - first)
        sets = tuple(replace(pages, table=pages.table[b : b + 1]) for pages in self.sets)
        return replace(self, queries=queries, sets=sets)


def _to(x: Tensor, device: str) -> Tensor:
    """On the device with the same strides: `Tensor.to` makes what is not dense contiguous."""
    if device == "cpu":
        return x
    span = 1 + sum((size - 1) * stride for size, stride in zip(x.shape, x.stride(), strict=True)) if x.numel() else 0
    return x.as_strided((span,), (1,)).to(device).as_strided(x.shape, x.stride(), 0)


def case(
    packed: str | None,
    raw: str | None,
    geometry: Geometry,
    lengths: Sequence[int] = LENGTHS,
    counts: Sequence[int] | None = None,
    *,
    R: int = 4,
    rule: Rule | None = None,
    dtype: torch.dtype = torch.float32,
    keys: Callable[[Tensor], Tensor] = lambda k: k,
    values: Callable[[Tensor], Tensor] = lambda v: v,
    codecs: tuple[Codec, Codec] | None = None,
    place: int = 0,
    **options: object,
) -> Case:
    """Sequences of `lengths` tokens; the last `counts` (1 each) are the queries.

    packed, raw   the formats of the two sets, or None
    keys, values  change normal numbers [pages, S, Hkv, D]
    codecs        in place of those of `packed`, which if they need constants get those of `specimen_heads`
    place         of all sequences' first tokens, as pages are told it
    """
    generator = torch.Generator().manual_seed(sum(lengths) + geometry.k_dim)
    counts = counts or [1] * len(lengths)
    rule = rule or Rule(geometry.page_tokens)
    S, heads = geometry.page_tokens, geometry.heads

    def randn(*shape: int) -> Tensor:
        return torch.randn(*shape, generator=generator)

    numbers = [
        [
            change(randn(geometry.pages_for(n), S, heads, dim))
            for change, dim in ((keys, geometry.k_dim), (values, geometry.v_dim))
        ]
        for n in lengths
    ]
    sets = tuple(
        _page_set(text, geometry, numbers, lengths, counts, rule, is_raw, generator, None if is_raw else codecs, place)
        for text, is_raw in ((packed, False), (raw, True))
        if text is not None
    )
    q = randn(sum(counts), heads * R, geometry.k_dim).to(dtype)
    start = torch.tensor([0, *counts]).cumsum(0).int()
    position = torch.tensor([length - count for length, count in zip(lengths, counts, strict=True)]).int()
    return Case(Queries(q, start, position, max(counts)), sets, rule, **options)  # type: ignore[arg-type]


def _page_set(
    text: str, geometry: Geometry, numbers: list[list[Tensor]], lengths: Sequence[int], counts: Sequence[int],
    rule: Rule, is_raw: bool, generator: torch.Generator, codecs: tuple[Codec, Codec] | None, place: int,
) -> PageSet:  # fmt: skip
    """The pages that some query reads in this form, anywhere in a store; all else is poison."""
    chosen = parse_format(text)
    k_codec, v_codec = codecs or (
        specimen_heads(codec, side, geometry.dim(side), geometry.heads, geometry.page_tokens)
        for codec, side in ((chosen.k, Side.K), (chosen.v, Side.V))
    )
    layout = replace(chosen, k=k_codec, v=v_codec).layout(geometry)
    readers = BoundCodec(k_codec, layout.k), BoundCodec(v_codec, layout.v)
    spots = iter(torch.randperm(sum(map(geometry.pages_for, lengths)) + 3, generator=generator).tolist())
    pool = torch.full((sum(map(geometry.pages_for, lengths)) + 3, layout.nbytes), POISON, dtype=torch.uint8)
    table = torch.full((len(lengths), geometry.pages_for(max(lengths)) + 2), -1, dtype=torch.int32)
    for b, ((k, v), length, count) in enumerate(zip(numbers, lengths, counts, strict=True)):
        for page in range(len(k)):
            if not _is_read(page, range(length - count, length), rule, is_raw):
                continue
            filled = length - page * geometry.page_tokens
            slabs = []
            for codec, x in zip(readers, (k[page].clone(), v[page].clone()), strict=True):
                x[max(filled, 0) :] = torch.nan
                first = torch.tensor(place + page * geometry.page_tokens, dtype=torch.int32)
                slabs.append(codec.encode(x.transpose(0, 1), first))
            table[b, page] = next(spots)
            pool[table[b, page]] = torch.cat(slabs, dim=-1).flatten()
    return PageSet(pool, table, layout, *readers, is_raw)


def _is_read(page: int, query_tokens: range, rule: Rule, is_raw: bool) -> bool:
    S, sliding = rule.page_tokens, rule.sliding_tokens or 1 << 30
    return any(
        page * S <= t and (page + 1) * S - 1 > t - sliding and rule.reads_raw(page, t // S) == is_raw
        for t in query_tokens
    )


# ---- codecs and geometries -------------------------------------------------------------------------------------------


# Float32, and what is no tile.
UNREAD = {"fp32", "turbo4-qjl", "turbo3-qjl", "turbo3.5", "turbo2.5"}


@pytest.mark.parametrize("name", [name for name in registry if name not in UNREAD])
def test_every_codec(name: str) -> None:
    case(name, "fp16", Geometry(1, 128, 128)).check()


@pytest.mark.parametrize(("name", "counts"), [("bf16", (1, 2, 16, 1, 5)), ("fp16", (1, 1, 1, 1, 1))])
def test_raw_pages_alone(name: str, counts: Sequence[int]) -> None:
    dtype = torch.bfloat16 if name == "bf16" else torch.float16
    case(None, name, Geometry(1, 128, 80), counts=counts, R=2, rule=Rule(64, window_pages=9), dtype=dtype).check()


@pytest.mark.parametrize(
    ("text", "geometry", "R", "counts"),
    [
        ("int4", Geometry(1, 64, 64), 3, (1, 1)),
        ("int4", Geometry(1, 80, 80), 1, (2, 16)),
        ("int3", Geometry(1, 80, 96), 8, (1, 1)),
        ("int2", Geometry(1, 256, 256), 4, (1, 1)),
        ("int8", Geometry(1, 256, 64), 16, (1, 1)),
        ("fp8", Geometry(1, 80, 256), 1, (1, 1)),
        ("fp8_e5m2-token", Geometry(1, 96, 80), 3, (2, 5)),
        ("bf16", Geometry(1, 96, 80), 4, (1, 1)),
        ("kivi2", Geometry(1, 80, 80), 5, (1, 2)),  # The last group of values has 16 channels,
        ("kivi4", Geometry(1, 24, 40), 2, (1, 1)),  # and here 8, which are padded.
        ("int8/int4", Geometry(2, 64, 128), 7, (1, 1)),
        ("kivi2-g32/fp8", Geometry(1, 96, 64), 4, (1, 1)),
        ("int2", Geometry(1, 64, 64, 32), 4, (1, 3)),
        ("int4", Geometry(1, 64, 64, 128), 4, (1, 1)),
        ("kivi2", Geometry(1, 64, 64, 128), 4, (1, 1)),  # Two groups of tokens.
        ("turbo4", Geometry(1, 256, 80), 4, (1, 2)),
        ("turbo4/turbo3", Geometry(1, 80, 96), 3, (1, 1)),
        ("turbo3", Geometry(1, 96, 80), 2, (2, 1)),
        ("turbo3", Geometry(1, 256, 64, 128), 4, (1, 1)),
        ("turbo3/turbo2", Geometry(1, 64, 256, 32), 8, (1, 1)),
        ("turbo2", Geometry(2, 80, 64), 4, (1, 1)),
        ("turbo2/turbo4", Geometry(1, 24, 40, 32), 4, (1, 1)),
    ],
)
def test_geometries(text: str, geometry: Geometry, R: int, counts: Sequence[int]) -> None:
    case(text, "fp16", geometry, (65, 200), counts, R=R).check()


# ---- queries ---------------------------------------------------------------------------------------------------------


@pytest.mark.parametrize(
    ("R", "counts"),
    [
        (1, (1, 16, 5, 2)),
        (3, (0, 5, 1, 2)),
        (4, (0, 0, 2, 16)),
        (8, (2, 0, 5, 1)),
        (16, (1, 0, 2, 1)),
        (24, (0, 1, 1, 0)),
    ],
)
def test_several_queries_in_ragged_batches(R: int, counts: Sequence[int]) -> None:
    case("int8", "fp16", SMALL, (64, 65, 130, 200), counts, R=R).check()


@pytest.mark.parametrize("dtype", [torch.float32, torch.bfloat16, torch.float16])
def test_dtypes_of_queries(dtype: torch.dtype) -> None:
    case("int4", "fp16", SMALL, (65, 200), dtype=dtype).check()
    case("bf16", "bf16", SMALL, (65, 200), R=2, dtype=dtype).check()


@pytest.mark.parametrize("size", [1e-2, 30.0])
def test_queries_of_any_size(size: float) -> None:
    made = case("int4", "fp16", SMALL, (65, 200), keys=lambda k: k / size)
    replace(made, queries=replace(made.queries, q=made.queries.q * size)).check()


def test_strided_queries_and_tables() -> None:
    made = case("fp8", "fp16", Geometry(2, 64, 64), (65, 200), (1, 2), R=2, dtype=torch.float16)
    expected, q = made.attend(), made.queries.q
    # Between others of a fused projection, whose rows begin on odd numbers; head by head; and channels that are not contiguous.
    fused = torch.cat([torch.full_like(q[..., :1], torch.nan), q, torch.full_like(q, torch.nan)], dim=-1)
    for strided in (fused[..., 1:65], q.transpose(0, 1).contiguous().transpose(0, 1), q.mT.contiguous().mT):
        assert not strided.is_contiguous()
        sets = tuple(replace(pages, table=_every_second(pages.table)) for pages in made.sets)
        queries = replace(made.queries, q=strided)
        assert_same_bits(replace(made, queries=queries, sets=sets).attend(), expected)


def _every_second(table: Tensor) -> Tensor:
    """A view with wider rows, equal to the table."""
    return torch.stack([table, torch.full_like(table, 1 << 30)], dim=1).flatten(1)[:, : table.shape[1]]


@DECODE_AND_PREFILL
def test_tables_of_which_columns_are_contiguous(counts: Sequence[int]) -> None:
    made = case("int8", "fp16", SMALL, (65, 200), counts, R=1)
    sets = tuple(replace(pages, table=pages.table.t().contiguous().t()) for pages in made.sets)
    assert_same_bits(replace(made, sets=sets).attend(), made.attend())


@DECODE_AND_PREFILL
def test_pages_may_be_rows_of_a_wider_store(counts: Sequence[int]) -> None:
    made = case("int8", "fp16", SMALL, (65, 200), counts, R=1)
    sets = []
    for pages in made.sets:
        store = torch.full((len(pages.pages), pages.layout.nbytes + 48), POISON, dtype=torch.uint8)
        store[:, 16 : 16 + pages.layout.nbytes] = pages.pages
        sets.append(replace(pages, pages=store[:, 16 : 16 + pages.layout.nbytes]))
    assert_same_bits(replace(made, sets=tuple(sets)).attend(), made.attend())


@DECODE_AND_PREFILL
@pytest.mark.parametrize("raw", ["fp16", None])
def test_nan_in_a_query_is_not_hidden(raw: str | None, counts: Sequence[int]) -> None:
    made = case("int8", raw, SMALL, (200, 300), counts, R=2)
    made.queries.q[0, 1, 5] = torch.nan
    with numpy_warnings_ignored():
        got = made.attend()
    assert bool(got.out[0, 1].isnan().all())
    assert int(got.out.isnan().any(dim=-1).sum()) == 1
    assert got.lse.isnan().nonzero().tolist() == [[0, 1]]


def test_sequences_without_queries_or_pages() -> None:
    made = case("int8", None, SMALL, (30, 200, 64), (2, 0, 1), R=2)
    made.check()
    assert bool((made.attend().lse == -torch.inf).all())


@pytest.mark.parametrize("sequences", [3, 0])
def test_no_queries_at_all(sequences: int) -> None:
    made = case("int8", "fp16", SMALL, (30, 200, 64))
    none = Queries(made.queries.q[:0], torch.zeros(sequences + 1).int(), made.queries.position[:sequences], 0)
    sets = tuple(replace(pages, table=pages.table[:sequences]) for pages in made.sets)
    partial = replace(made, queries=none, sets=sets).attend()
    assert partial.out.shape == (0, 4, 64)
    assert partial.lse.shape == (0, 4)


# ---- the rule --------------------------------------------------------------------------------------------------------


@pytest.mark.parametrize(
    ("rule", "R", "counts"),
    [
        (Rule(64, sink_pages=1), 4, (1, 1, 1, 1)),
        (Rule(64, sink_pages=2, window_pages=1), 1, (1, 16, 5, 16)),
        (Rule(64, window_pages=2), 3, (1, 5, 2, 1)),
        (Rule(64, sink_pages=9), 2, (1, 1, 1, 1)),  # Nothing is packed.
        (Rule(64, sliding_tokens=100), 4, (1, 1, 1, 1)),
        (Rule(64, sink_pages=1, window_pages=1, sliding_tokens=130), 1, (1, 16, 5, 16)),
        (Rule(64, sliding_tokens=7), 1, (1, 16, 5, 16)),
        (Rule(64, sliding_tokens=1), 2, (1, 2, 1, 5)),
    ],
)
def test_sinks_windows_and_sliding_windows(rule: Rule, R: int, counts: Sequence[int]) -> None:
    """With 16 queries of the third and fourth sequence a page ends, and is read in both forms."""
    case("int8", "fp16", SMALL, (63, 130, 260, 325), counts, R=R, rule=rule).check()


# ---- prefill ---------------------------------------------------------------------------------------------------------


@pytest.mark.parametrize(
    ("text", "geometry", "R"),
    [
        ("int8", Geometry(2, 64, 64), 1),
        ("int4", Geometry(1, 80, 96), 2),
        ("int3", Geometry(1, 64, 128), 1),
        ("kivi4", Geometry(1, 24, 40), 3),
        ("kivi2-g32", Geometry(1, 64, 64, 32), 4),
        ("fp8_e5m2-token", Geometry(1, 256, 64), 1),
        ("bf16", Geometry(1, 64, 80), 1),
        ("turbo4/turbo2", Geometry(1, 64, 80), 2),
        ("turbo3", Geometry(1, 96, 64), 1),
    ],
)
def test_prefill_beside_decode(text: str, geometry: Geometry, R: int) -> None:
    case(text, "fp16", geometry, (200, 100), (100, 1), R=R).check()


@pytest.mark.parametrize(
    "rule",
    [
        Rule(64, sink_pages=1, window_pages=1),
        Rule(64, window_pages=2, sliding_tokens=200),
        Rule(64, sink_pages=1, sliding_tokens=70),
    ],
)
def test_prefill_in_stretches(rule: Rule, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(host, "_SCRATCH_BYTES", 1)  # A page at a time, so that the state waits in memory.
    made = case("int8", "bf16", SMALL, (330, 65), (150, 20), R=2, rule=rule, dtype=torch.bfloat16)
    replace(made, softcap=5.0, sinks=torch.tensor([1.0, -2.0])).check()


def test_prefill_of_rows_that_see_nothing() -> None:
    case("int8", None, SMALL, (100, 200), (90, 150), R=1).check()


# ---- scores ----------------------------------------------------------------------------------------------------------


@pytest.mark.parametrize("softcap", [0.5, 30.0])
def test_softcap(softcap: float) -> None:
    case("int8", "fp16", SMALL, (65, 200), (5, 1), R=2, softcap=softcap).check()


@pytest.mark.parametrize("logit", [-3.0, 8.0])
def test_learned_sinks(logit: float) -> None:
    sinks = logit + torch.arange(4.0)
    case("int4", "fp16", SMALL, (30, 65, 200), sinks=sinks).check()
    case("int8", None, SMALL, (30, 200), (2, 1), sinks=sinks.bfloat16()).check()


@pytest.mark.parametrize("name", ["int2", "int8", "kivi2-g32", "bf16"])
def test_keys_with_large_biases(name: str) -> None:
    bias = torch.zeros(64)
    bias[3], bias[35] = 200.0, -200.0
    made = case(name, "fp16", SMALL, (65, 200), dtype=torch.bfloat16, keys=lambda k: k + bias)
    made.queries.q[..., [3, 35]] *= 0.1
    made.check()


# ---- values ----------------------------------------------------------------------------------------------------------


@pytest.mark.parametrize("size", [1e-3, 1e3])
@pytest.mark.parametrize("name", ["int4", "kivi2", "fp8_e5m2", "turbo2"])
def test_small_and_large_values(name: str, size: float) -> None:
    case(name, "fp16", SMALL, (65, 200), R=2, values=lambda v: v * size).check()


@pytest.mark.parametrize(
    ("name", "gap"),
    [("int4", 0.0), ("int4", 11.0), ("int3", 11.0), ("fp8_e5m2-token", 11.0), ("kivi4", 11.0), ("int4/turbo3", 11.0)],
)
@pytest.mark.parametrize("sizes", [(1e-3, 1e3, 1.0), (1e3, 1e-3, 1.0)])
def test_pages_of_widely_different_scales(name: str, sizes: tuple[float, ...], gap: float) -> None:
    """With a gap of scores the page of large values has so little weight that it matters about as much as one of small values."""
    size = torch.tensor([*sizes, 1.0]).view(-1, 1, 1, 1)
    away = torch.zeros(64)
    away[0] = gap * 8.0

    def keys(k: Tensor) -> Tensor:
        return k - away * (size > 100)

    made = case(name, "fp16", SMALL, (200,), R=1, keys=keys, values=lambda v: v * size)
    made.queries.q[..., 0] = 1.0
    made.check()


@pytest.mark.parametrize(
    ("packed", "raw", "gap"), [("int4", None, 13.0), ("int8", None, 13.0), ("kivi2", None, 13.0), (None, "fp16", 7.0)]
)
def test_tiny_probabilities_are_not_lost(packed: str | None, raw: str | None, gap: float) -> None:
    """A token without a value (an attention sink) takes nearly all weight, and `out` is the sum of many small shares."""

    def keys(k: Tensor) -> Tensor:
        k[..., 0] = 0.0
        k[0, 5, :, 0] = gap * 8.0
        return k

    def values(v: Tensor) -> Tensor:
        v[0, 5] = 0.0
        return v

    rule = Rule(64, window_pages=9 if raw else 0)
    made = case(packed, raw, SMALL, (256,), R=1, keys=keys, values=values, rule=rule)
    made.queries.q[..., 0] = 1.0
    made.check()


# ---- what else it promises -------------------------------------------------------------------------------------------


def test_a_row_has_the_same_bits_alone_and_in_a_batch() -> None:
    made = case("fp8", "fp16", SMALL, (2200, 1, 65, 200), (1, 1, 3, 2), R=2)  # More pages than a split has.
    start = made.queries.start.tolist()
    with deterministic():
        together = made.attend()
        for b, (first, end) in enumerate(pairwise(start)):
            assert_same_bits(made.row(b).attend(), Partial(together.out[first:end], together.lse[first:end]))
    made.check()


@contextmanager
def deterministic() -> Iterator[None]:
    torch.use_deterministic_algorithms(True)
    try:
        yield
    finally:
        torch.use_deterministic_algorithms(False)


@contextmanager
def numpy_warnings_ignored() -> Iterator[None]:
    """The interpreter computes with numpy, which warns of NaN."""
    with warnings.catch_warnings():
        warnings.simplefilter("ignore", RuntimeWarning)
        yield


def assert_same_bits(got: Partial, expected: Partial) -> None:
    assert torch.equal(got.out, expected.out)
    assert torch.equal(got.lse, expected.lse)


class Untiled(Codec):
    """A codec without a tile."""

    fields = registry["int8"].fields
    encode = registry["int8"].encode
    decode = registry["int8"].decode


def test_refusals_say_why(monkeypatch: pytest.MonkeyPatch) -> None:
    def reason(k: Codec | str, v: Codec | str, geometry: Geometry = SMALL, device: str = DEVICE) -> str | None:
        k, v = (registry[codec] if isinstance(codec, str) else codec for codec in (k, v))
        S = geometry.page_tokens
        layout = PageLayout(geometry, k.layout(Side.K, S, geometry.k_dim), v.layout(Side.V, S, geometry.v_dim))
        return TritonKernel().supports(layout, BoundCodec(k, layout.k), BoundCodec(v, layout.v), device).reason

    assert reason("int4", "kivi2") is None
    assert reason("fp32", "int4") == "K: float32 values: tensor cores have no such operand"
    assert reason("int4", "fp32") == "V: float32 values: tensor cores have no such operand"
    assert reason("turbo3", "turbo3") is None
    assert reason("turbo3", "int4", Geometry(1, 80, 64)) == (
        "K: codes of several planes on a curve, 20 bytes in a row: only multiples of 8 from 16 on"
    )
    assert reason("turbo4-qjl", "turbo4") == "the K codec has no tile"
    assert reason("int8", Untiled("untiled", 8, "test")) == "the V codec has no tile"
    assert reason(Untiled("untiled", 8, "test"), "int8") == "the K codec has no tile"
    assert reason("int8", "int8", Geometry(1, 64, 64, 96)) == "pages of 96 tokens: only 32, 64 or 128"
    assert reason("int8", "int8", Geometry(1, 64, 64, 256)) == "pages of 256 tokens: only 32, 64 or 128"
    assert reason("int8", "int8", Geometry(1, 512, 64)) == "K: a head dimension of 512: only 16 to 256"
    assert reason("int8", "int8", Geometry(1, 64, 8)) == "V: a head dimension of 8: only 16 to 256"
    assert reason("int8", "int3", Geometry(1, 64, 64, 32)) == "V: rows of 4 bytes"
    assert reason("kivi2-g32", "int4", Geometry(1, 64, 64, 128)) == "K: column terms of 4 groups, float16"
    monkeypatch.setattr(host, "interpreted", lambda: False)
    assert reason("int4", "int4", device="cpu") == "it runs on a GPU, not on cpu"
    monkeypatch.setattr(host, "why_unavailable", lambda _package: "it is not installed")
    assert reason("int4", "int4") == "triton: it is not installed; run: pip install triton"
