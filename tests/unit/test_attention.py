"""PagedKV: path invariance, crop, reorder, and what it refuses. Model-free; the kernels have tests of their own."""

from __future__ import annotations

import json
import os
import subprocess
import sys
from dataclasses import replace

import pytest

pytest.importorskip("torch")

import torch
from torch import Tensor

from kvarto.attention import LayerSpec, PagedKV
from kvarto.codecs import registry
from kvarto.errors import BackendUnavailable, NotFinite, ShapeError, UnknownName, Unsupported
from kvarto.formats import parse_policy
from kvarto.layout import Geometry
from kvarto.testing import key_like, specimen_format

HEADS, R, DIM, SCALE = 2, 3, 64, 0.125


def tensors(tokens: int, rows: int = 2, dim: int = DIM) -> tuple[Tensor, Tensor, Tensor]:
    """q [B, Hq, T, D], k, v [B, Hkv, T, D]. Queries are small where keys have their bias, as in a real model."""
    q = key_like((rows, HEADS * R, tokens, dim), seed=1) % 1.0 - 0.5
    return q, key_like((rows, HEADS, tokens, dim), seed=2), key_like((rows, HEADS, tokens, dim), seed=3) % 1.0


def cache(
    policy: str,
    *,
    sliding: int | None = None,
    layers: int = 1,
    dtype: torch.dtype = torch.float32,
    kernel: str | None = None,
) -> PagedKV:
    spec, parsed = LayerSpec(Geometry(HEADS, DIM, DIM), sliding), parse_policy(policy)
    parsed = replace(parsed, format=specimen_format(parsed.format, DIM, DIM))
    return PagedKV([spec] * layers, parsed, dtype=dtype, kernel=kernel)


def feed(kv: PagedKV, q: Tensor, k: Tensor, v: Tensor, chunk: int, first: int = 0) -> Tensor:
    """Tokens from `first` on in chunks; the outputs [B, Hq, T, D]."""
    outs = []
    for i in range(first, q.shape[2], chunk):
        kv.append(0, k[:, :, i : i + chunk], v[:, :, i : i + chunk])
        outs.append(kv.attend(0, q[:, :, i : i + chunk], scale=SCALE))
    return torch.cat(outs, dim=2)


def pages(kv: PagedKV) -> dict[tuple[int, int], bytes]:
    layer = kv.layers[0]
    return {
        (row, page): layer.sealed_page(row, page).to_bytes()
        for row, state in enumerate(layer.rows)
        for page, held in enumerate(state.packed)
        if held >= 0
    }


def assert_equal(got: Tensor, expected: Tensor) -> None:
    """Float rounding only: the scores are of the order of 100 here, so that exp turns 1e-5 of them into 1e-4."""
    torch.testing.assert_close(got, expected, rtol=2e-4, atol=2e-4)


@pytest.mark.parametrize("sliding", [None, 100])
@pytest.mark.parametrize("name", list(registry))
def test_every_path_gives_the_same_pages_and_outputs(name: str, sliding: int | None) -> None:
    q, k, v = tensors(200)
    whole = cache(name, sliding=sliding)
    expected = feed(whole, q, k, v, chunk=200)
    for chunk in (1, 7, 64, 100):
        other = cache(name, sliding=sliding)
        assert_equal(feed(other, q, k, v, chunk), expected)
        assert pages(other) == pages(whole)
        assert other.footprint().payload_bytes == whole.footprint().payload_bytes


@pytest.mark.parametrize("policy", ["int4+sink128+window64", "kivi4+window128", "int8/int4+sink64", "int2+sink0"])
def test_sink_and_window_are_part_of_the_rule(policy: str) -> None:
    q, k, v = tensors(330)
    whole, chunked = cache(policy), cache(policy)
    assert_equal(feed(chunked, q, k, v, chunk=50), feed(whole, q, k, v, chunk=330))
    assert pages(chunked) == pages(whole)
    assert not any(page < parse_policy(policy).format.sink_tokens // 64 for _, page in pages(whole))


@pytest.mark.parametrize(("name", "dtype"), [*((name, torch.float32) for name in registry), ("int4", torch.bfloat16)])
def test_rescoring_gives_what_decode_gave(name: str, dtype: torch.dtype) -> None:
    q, k, v = (x.to(dtype) for x in tensors(150))
    kv = cache(name, dtype=dtype)
    decoded = feed(kv, q, k, v, chunk=1)
    sealed = pages(kv)
    kv.clear()
    rescored = feed(kv, q, k, v, chunk=150)
    assert decoded.dtype == rescored.dtype == dtype
    if dtype == torch.bfloat16:  # What is computed in float32 is rounded once: it may turn, by one part in 128.
        torch.testing.assert_close(rescored, decoded, rtol=2.0**-7, atol=1e-3)
    else:
        assert_equal(rescored, decoded)
    assert pages(kv) == sealed


@pytest.mark.parametrize("name", list(registry))
def test_ragged_batch_is_each_row_alone(name: str) -> None:
    q, k, v = tensors(140, rows=3)
    lengths = (140, 3, 77)
    valid = torch.stack([torch.arange(140) >= 140 - length for length in lengths])
    poison = torch.where(valid[:, None, :, None], 0.0, torch.nan)
    kv = cache(name)
    kv.append(0, k + poison, v + poison, valid)
    out = kv.attend(0, torch.nan_to_num(q + poison), scale=SCALE)
    for row, length in enumerate(lengths):
        alone = cache(name)
        mine = slice(row, row + 1), slice(None), slice(140 - length, 140)
        expected = feed(alone, q[mine], k[mine], v[mine], chunk=length)
        assert_equal(out[mine], expected)
        assert [data for (r, _), data in pages(kv).items() if r == row] == list(pages(alone).values())
        assert bool((out[row, :, : 140 - length] == 0).all())


def test_extend_does_not_depend_on_where_runs_are_cut(monkeypatch: pytest.MonkeyPatch) -> None:
    q, k, v = tensors(300)
    expected = feed(cache("kivi4"), q, k, v, chunk=300)
    monkeypatch.setattr("kvarto.attention._RUN_TOKENS", 70)
    kv = cache("kivi4")
    assert_equal(kv.extend(0, q, k, v, scale=SCALE), expected)


@pytest.mark.parametrize("policy", ["int4", "int8", "int4+window64", "kivi2+sink0"])
@pytest.mark.parametrize(
    ("length", "back"), [(150, 5), (150, 22), (150, 23), (150, 80), (128, 1), (129, 1), (129, 60), (192, 64)]
)
def test_crop_and_go_on_equals_never_having_been_there(policy: str, length: int, back: int) -> None:
    q, k, v = tensors(220)
    kv, straight = cache(policy), cache(policy)
    feed(kv, *(x[:, :, :length] for x in (q, k, v)), chunk=length)
    kv.crop(back)
    resumed = feed(kv, q, k, v, chunk=9, first=length - back)
    expected = feed(straight, q, k, v, chunk=220)
    assert_equal(resumed, expected[:, :, length - back :])
    assert pages(kv) == pages(straight)


def test_crop_beyond_the_last_sealed_page_is_refused_and_changes_nothing() -> None:
    q, k, v = tensors(200)
    kv = cache("int4", layers=2)
    feed(kv, q, k, v, chunk=200)
    kv.append(1, k, v)
    kv.attend(1, q, scale=SCALE)
    before = pages(kv)
    with pytest.raises(Unsupported, match="crop of 100 tokens: page 1 is sealed and its raw values are gone"):
        kv.crop(100)
    with pytest.raises(Unsupported, match="only 200 tokens are held"):
        kv.crop(201)
    assert pages(kv) == before
    kv.crop(72)
    with pytest.raises(Unsupported, match="raw values are gone"):
        kv.crop(1)


def test_crop_behind_a_sliding_window() -> None:
    q, k, v = tensors(400)
    kv, straight = cache("int4", sliding=100), cache("int4", sliding=100)
    feed(kv, *(x[:, :, :390] for x in (q, k, v)), chunk=64)
    kv.crop(60)
    assert_equal(feed(kv, q, k, v, chunk=64, first=330), feed(straight, q, k, v, chunk=400)[:, :, 330:])
    assert len(pages(kv)) <= 2 * 4
    kv.layers[0].sealed.pool.check()


def test_reorder_shares_pages_until_they_are_written() -> None:
    q, k, v = tensors(170)
    kv = cache("int4")
    feed(kv, *(x[:, :, :150] for x in (q, k, v)), chunk=150)
    kv.reorder([1, 1, 0])
    layer = kv.layers[0]
    assert layer.rows[0].packed == layer.rows[1].packed
    order = [1, 1, 0]
    k2, v2, q2 = k[order].clone(), v[order].clone(), q[order]
    k2[1, :, 150:] += 1.0
    out = feed(kv, q2, k2, v2, chunk=1, first=150)
    for row in range(3):
        alone = cache("int4")
        mine = slice(row, row + 1)
        assert_equal(out[mine], feed(alone, q2[mine], k2[mine], v2[mine], chunk=170)[:, :, 150:])
    layer.sealed.pool.check()
    layer.open.pool.check()
    kv.clear()
    assert layer.sealed.pool.used_pages == layer.open.pool.used_pages == 0


@pytest.mark.parametrize("value", [float("nan"), float("inf"), float("-inf")])
def test_not_finite_is_refused_and_nothing_is_stored(value: float) -> None:
    q, k, v = tensors(10)
    kv = cache("int4")
    feed(kv, q, k, v, chunk=10)
    bad = v.clone()
    bad[0, 1, 2, 3] = value
    with pytest.raises(NotFinite, match="values: expected finite values, got 1 of"):
        kv.append(0, k, bad)
    assert [row.length for row in kv.layers[0].rows] == [10, 10]


def test_saturation_is_counted_when_a_page_seals() -> None:
    _, k, v = tensors(64, rows=1)
    k[0, 0, 5, 3] = 500.0
    kv = cache("fp8/int8")
    kv.append(0, k[:, :, :63], v[:, :, :63])
    assert kv.saturated_elements == 0
    kv.append(0, k[:, :, 63:], v[:, :, 63:])
    assert kv.saturated_elements == 1


def test_wrong_shapes_are_refused_by_name() -> None:
    q, k, v = tensors(4)
    kv = cache("int4")
    with pytest.raises(ShapeError, match="v: expected"):
        kv.append(0, k, v[..., :32])
    kv.append(0, k, v)
    with pytest.raises(ShapeError, match="k: expected"):
        kv.append(0, k[:1], v[:1])
    with pytest.raises(ShapeError, match="q: expected"):
        kv.attend(0, q[:, :5], scale=SCALE)


def test_kernel_is_what_was_asked_for_or_an_error() -> None:
    assert cache("int4", kernel="reference").kernel_names == "reference"
    assert cache("int4").kernel_names == "numba"
    with pytest.raises(UnknownName, match="kernel: expected one of numba, reference, triton, got 'cuda'"):
        cache("int4", kernel="cuda")
    with pytest.raises(BackendUnavailable, match="kernel numba is not available"):
        PagedKV(
            [LayerSpec(Geometry(1, 64, 64))], parse_policy("int4"), dtype=torch.float32, device="meta", kernel="numba"
        )


def test_skipped_layers_keep_the_models_dtype() -> None:
    kv = cache("int4+skip=0,-1", layers=3, dtype=torch.bfloat16)
    assert [str(layer.format) for layer in kv.layers] == ["bf16", "int4", "bf16"]


def test_footprint_is_what_layout_says() -> None:
    q, k, v = tensors(64 * 20 + 5, rows=1)
    kv = cache("int4")
    feed(kv, q, k, v, chunk=64)
    layout = kv.layers[0].layout
    footprint = kv.footprint()
    assert footprint.payload_bytes + footprint.metadata_bytes == 19 * layout.nbytes
    # Keys two bits more for a quarter of their channels.
    assert footprint.payload_bytes == 19 * 64 * HEADS * DIM * (4 + 0.5 + 4) // 8
    assert footprint.raw_bytes == 3 * kv.layers[0].raw_layout.nbytes
    assert kv.layers[0].footprint().allocated_bytes <= (19 + 4) * layout.nbytes


def test_history_is_never_held_dense() -> None:
    q, k, v = tensors(64 * 100, rows=1)
    kv = cache("int4")
    kv.extend(0, q, k, v, scale=SCALE)
    dense_bytes = 64 * 100 * HEADS * 2 * DIM * 4
    assert kv.footprint().allocated_bytes < dense_bytes * (4.3125 / 32) * 1.03 + kv.layers[0].raw_layout.nbytes * 22


PEAK = """
import json, resource, sys
import torch
from kvarto.attention import LayerSpec, PagedKV
from kvarto.formats import parse_policy
from kvarto.layout import Geometry
from kvarto.study.filling import fill_pages

torch.set_num_threads(1)
TOKENS, RUN, HEADS, DIM, BLOCK = 1 << 16, 512, 2, 64, 1 << 20
kv = PagedKV([LayerSpec(Geometry(HEADS, DIM, DIM))], parse_policy(sys.argv[1]), dtype=torch.float32, kernel=sys.argv[2])
unit, ballast = 1 if sys.platform == "darwin" else 1024, []


def peak():
    return resource.getrusage(resource.RUSAGE_SELF).ru_maxrss * unit


def growth(act):
    start = peak()
    while peak() < start + 4 * BLOCK:  # take every byte that earlier peaks left free
        ballast.append(torch.ones(BLOCK // 4))
    before = peak()
    act()
    return peak() - before


def step(count):
    kv.append(0, k[:, :, :count], v[:, :, :count])
    kv.attend(0, q[:, :, :count], scale=0.125)


def extend():
    kv.extend(0, q, k, v, scale=0.125)


def dense():
    layer = kv.layers[0]
    slabs = layer.sealed.pages[: TOKENS // 64 - 1].view(-1, HEADS, layer.layout.pair_nbytes)
    return layer.k.decode(slabs[..., : layer.layout.k.nbytes])


q, k, v = (torch.randn(1, HEADS, RUN, DIM) for _ in range(3))
extend()
step(1)
kv.clear()
fill_pages(kv, TOKENS)
found = {"decode": growth(lambda: step(1)), "extend": growth(extend), "control": growth(dense)}
print(json.dumps({**found, "dense": TOKENS * HEADS * 2 * DIM * 4}))
"""


@pytest.mark.skipif(sys.platform == "win32", reason="no getrusage")
@pytest.mark.parametrize("kernel", ["numba", "reference"])
def test_attention_makes_no_dense_copy_of_the_history(kernel: str) -> None:
    """The peak of a process that decodes and extends behind 65,536 packed tokens, against one that does make a copy, of K alone."""
    command = [sys.executable, "-c", PEAK, "int4", kernel]
    environment = {**os.environ, "OMP_NUM_THREADS": "1", "NUMBA_NUM_THREADS": "1"}
    done = subprocess.run(command, env=environment, capture_output=True, text=True, check=True, timeout=120)
    grown = json.loads(done.stdout)
    assert grown["control"] > grown["dense"] / 3, "a dense copy does not show: the measure is blind"
    assert grown["decode"] < grown["dense"] / 8
    if kernel == "numba":  # The reference keeps a partial result of each run of pages, for each query.
        # The store of packed pages, here a sixth of a dense one, exists twice while it grows.
        assert grown["extend"] < grown["dense"] / 2


@pytest.mark.parametrize(("policy", "sliding"), [("int4", 70), ("int8+window64", None)])
def test_gpu_kernel_in_the_interpreter_gives_what_the_reference_gives(policy: str, sliding: int | None) -> None:
    """A prefill of many tokens, single tokens, a page border, then a few tokens; the outputs are bfloat16, which rounds at 2^-9."""
    pytest.importorskip("triton")
    q, k, v = (x.bfloat16() for x in tensors(200))
    outs = []
    for kernel in ("triton", "reference"):
        kv, parts = cache(policy, sliding=sliding, dtype=torch.bfloat16, kernel=kernel), []
        for first, end in ((0, 150), (150, 151), (151, 192), (192, 193), (193, 200)):
            part = slice(first, end)
            parts.append(kv.extend(0, q[:, :, part], k[:, :, part], v[:, :, part], scale=SCALE))
        assert kv.kernel_names == kernel
        outs.append(torch.cat(parts, dim=2).float())
    error = (outs[0] - outs[1]).norm() / outs[1].norm()
    assert error < 5e-3
