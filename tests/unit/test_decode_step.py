"""What a decode step asks of its device: one kernel call, and within a page nothing that the host would wait for or send."""

from __future__ import annotations

from collections.abc import Sequence
from typing import Any

import pytest

pytest.importorskip("torch")
pytest.importorskip("numba")

import torch
from torch import Tensor
from torch.utils._python_dispatch import TorchDispatchMode

from kvarto import binding
from kvarto.attention import LayerSpec, PagedKV
from kvarto.errors import NotFinite, OutOfPages, UsageError
from kvarto.kernels.base import PageSet, Partial, Queries, Support
from kvarto.kernels.numba import NumbaKernel
from kvarto.kernels.reference import ReferenceKernel
from kvarto.layout import Geometry
from kvarto.rule import Rule

GEOMETRY, HQ = Geometry(heads=2, k_dim=64, v_dim=64), 4


class Spy:
    """A kernel that notes what it is given; its results are those of numba, or zeros."""

    name = "spy"

    def __init__(self, *, real: bool = True) -> None:
        self.calls: list[tuple[Queries, list[PageSet]]] = []
        self.real = real

    def supports(self, *_: Any) -> Support:
        return Support()

    def attend(self, queries: Queries, sets: Sequence[PageSet], rule: Rule, **options: Any) -> Partial:
        self.calls.append((queries, list(sets)))
        if self.real:
            return NumbaKernel().attend(queries, sets, rule, **options)
        T, device = len(queries.q), queries.q.device
        return Partial(torch.zeros(T, HQ, GEOMETRY.v_dim, device=device), torch.zeros(T, HQ, device=device))


def cache(policy: str = "int4", **options: Any) -> PagedKV:
    layers = options.pop("layers", 1)
    sliding = options.pop("sliding", None)
    return PagedKV([LayerSpec(GEOMETRY, sliding)] * layers, policy, **{"dtype": torch.float32, **options})


def tensors(tokens: int, rows: int = 2, dtype: torch.dtype = torch.float32) -> tuple[Tensor, Tensor, Tensor]:
    generator = torch.Generator().manual_seed(0)
    return tuple(torch.randn(rows, heads, tokens, 64, generator=generator).to(dtype) for heads in (HQ, 2, 2))  # type: ignore[return-value]


def step(kv: PagedKV, q: Tensor, k: Tensor, v: Tensor, **options: Any) -> Tensor:
    kv.append(0, k, v)
    return kv.attend(0, q, scale=0.125, **options)


def spied(kv: PagedKV, spy: Spy) -> Spy:
    for layer in kv.layers:
        layer.kernel = layer.raw_kernel = spy
    return spy


def test_one_call_reads_raw_and_packed_pages() -> None:
    q, k, v = tensors(200, dtype=torch.bfloat16)
    kv = cache(dtype=torch.bfloat16)
    spy = spied(kv, Spy())
    kv.append(0, k, v)
    kv.attend(0, q, scale=0.125)
    ((queries, sets),) = spy.calls
    assert [pages.raw for pages in sets] == [True, False]
    assert queries.q.dtype == torch.bfloat16
    assert queries.longest == 200
    assert queries.start.tolist() == [0, 200, 400]
    assert {pages.table.shape for pages in sets} == {(2, 16)}


def test_two_kernels_read_a_set_each() -> None:
    q, k, v = tensors(200)
    one, two, sinks = cache(), cache(), torch.linspace(-2, 2, HQ)
    two.layers[0].kernel = ReferenceKernel()
    assert two.kernel_names == "numba, reference"
    torch.testing.assert_close(step(two, q, k, v, sinks=sinks), step(one, q, k, v, sinks=sinks), rtol=1e-4, atol=1e-5)


def test_tensors_stay_while_no_page_fills() -> None:
    q, k, v = tensors(190)
    kv = cache()
    spy = spied(kv, Spy())
    step(kv, *(x[:, :, :140] for x in (q, k, v)))
    spy.calls.clear()
    for i in range(140, 190):
        step(kv, *(x[:, :, i : i + 1] for x in (q, k, v)))
    starts = {id(queries.start) for queries, _ in spy.calls}
    tables = {(id(raw.table), id(packed.table)) for _, (raw, packed) in spy.calls}
    assert len(starts) == len(tables) == 1
    assert [queries.position.tolist() for queries, _ in spy.calls] == [[i, i] for i in range(140, 190)]
    assert {queries.longest for queries, _ in spy.calls} == {1}


class Operations(TorchDispatchMode):
    """Notes which operations torch runs."""

    def __init__(self) -> None:
        super().__init__()
        self.names: list[str] = []

    def __torch_dispatch__(self, func: Any, types: Any, args: Any = (), kwargs: Any = None) -> Any:
        self.names.append(func.overloadpacket.__name__)
        return func(*args, **(kwargs or {}))


def test_within_a_page_nothing_is_asked_or_sent(monkeypatch: pytest.MonkeyPatch) -> None:
    q, k, v = tensors(200)
    kv = cache()
    spied(kv, Spy(real=False))
    layer = kv.layers[0]
    layer.finite.deferred = True  # As on a GPU.
    for first, end in ((0, 129), (129, 130)):
        step(kv, *(x[:, :, first:end] for x in (q, k, v)))

    def refuse(*_: Any) -> None:
        raise AssertionError("sent")

    for module in ("layer", "cache.tables"):
        monkeypatch.setattr(f"kvarto.{module}.send", refuse)
    with Operations() as seen:
        step(kv, *(x[:, :, 130:131] for x in (q, k, v)))
    computed = [name for name in seen.names if name not in ("slice", "select", "unsqueeze", "alias", "detach")]
    assert sorted(computed) == [
        "index_put_",
        "index_put_",
        "linalg_vector_norm",
        "linalg_vector_norm",
        "maximum",
        "maximum",
        "zeros",
        "zeros",
    ]


@pytest.mark.skipif(not torch.cuda.is_available(), reason="needs a GPU")
@pytest.mark.filterwarnings("ignore:Synchronization debug mode")
@pytest.mark.parametrize("rows", [1, 5])
def test_a_gpu_is_not_waited_for(rows: int) -> None:
    """Nor where a page opens; where one fills, codecs count what they clamp, and wait for that."""
    q, k, v = (x.cuda() for x in tensors(400, rows=rows, dtype=torch.bfloat16))
    kv = cache("int4+window64", dtype=torch.bfloat16, device="cuda")
    expected = cache("int4+window64", dtype=torch.bfloat16, kernel="reference")
    spied(kv, Spy(real=False))
    step(kv, *(x[:, :, :300] for x in (q, k, v)))
    for i in range(300, 400):
        torch.cuda.set_sync_debug_mode("error" if (i + 1) % 64 else "default")
        try:
            step(kv, *(x[:, :, i : i + 1] for x in (q, k, v)))
        finally:
            torch.cuda.set_sync_debug_mode("default")
    step(expected, *(x.cpu() for x in (q, k, v)))
    ours, theirs = kv.layers[0], expected.layers[0]
    for row, other in zip(ours.rows, theirs.rows, strict=True):
        for page in range(4, 6):  # Full, and raw in both.
            assert torch.equal(ours.open.pages[row.raw[page]].cpu(), theirs.open.pages[other.raw[page]])
    books = ours.sequences
    assert books.raw_table.tensor.tolist() == [[row.raw.get(page, -1) for page in range(16)] for row in ours.rows]
    assert books.packed_table.tensor.tolist() == [[*row.packed, *[-1] * (16 - len(row.packed))] for row in ours.rows]
    kv.check()
    for bad in (torch.nan, -torch.inf):
        kv.append(0, torch.full_like(k[:, :, :1], bad), v[:, :, :1])
        with pytest.raises(NotFinite, match="layer 0, keys"):
            kv.check()
        kv.layers[0].finite.forget()


# ---- a check that comes later --------------------------------------------------------------------------------------


@pytest.mark.parametrize("value", [float("nan"), float("inf"), float("-inf")])
def test_what_is_not_finite_is_found_later_where_the_host_does_not_wait(value: float) -> None:
    q, k, v = tensors(140)
    kv = cache(layers=3)
    for layer in kv.layers:
        layer.finite.deferred = True
    kv.append(2, k, v)
    assert kv.checks_due
    kv.check()
    assert not kv.checks_due
    kv.attend(2, q, scale=0.125)
    bad = v.clone()
    bad[1, 0, 3, 5] = value
    kv.append(2, k, bad)
    kv.append(2, k[:, :, :0], v[:, :, :0])
    for act in (kv.check, lambda: kv.crop(1), lambda: kv.reorder([0]), lambda: kv.layers[2].sealed_page(0, 1)):
        with pytest.raises(NotFinite, match="layer 2, values: expected finite values, got NaN or infinity"):
            act()
    kv.layers[0].check()
    kv.clear()
    kv.check()
    kv.append(2, k, v)
    kv.check()


def test_on_the_cpu_nothing_is_due() -> None:
    _, k, v = tensors(70)
    kv = cache()
    kv.append(0, k, v)
    kv.check()
    assert not kv.checks_due
    k[0, 0, 0, 0] = torch.inf
    with pytest.raises(NotFinite, match="layer 0, keys: expected finite values, got 1 of"):
        kv.append(0, k, v)


# ---- a fixed capacity ----------------------------------------------------------------------------------------------


def test_a_fixed_capacity_never_moves_and_refuses_more() -> None:
    q, k, v = tensors(1500)
    kv = cache("int4+sink64+window64", layers=2, capacity_tokens=2 * 1472, capacity_sequences=2)
    storage = [store.pages.data_ptr() for layer in kv.layers for store in (layer.sealed, layer.open)]
    allocated = kv.footprint().allocated_bytes
    expected = cache("int4+sink64+window64")
    for layer in range(2):
        out = kv.extend(layer, *(x[:, :, :1472] for x in (q, k, v)), scale=0.125)
        if layer == 0:
            assert torch.equal(out, expected.extend(0, *(x[:, :, :1472] for x in (q, k, v)), scale=0.125))
    for i in range(1472, 1500):
        step(kv, *(x[:, :, i : i + 1] for x in (q, k, v)))
    assert storage == [store.pages.data_ptr() for layer in kv.layers for store in (layer.sealed, layer.open)]
    assert kv.footprint().allocated_bytes == allocated
    layer = kv.layers[0]
    before = ([(row.length, list(row.packed), dict(row.raw)) for row in layer.rows], layer.open.pool.used_pages)
    with pytest.raises(OutOfPages):
        kv.append(0, k[:, :, :600], v[:, :, :600])
    assert before == ([(row.length, list(row.packed), dict(row.raw)) for row in layer.rows], layer.open.pool.used_pages)
    step(kv, *(x[:, :, :1] for x in (q, k, v)))


def test_a_refused_first_append_leaves_no_sequences() -> None:
    _, k, v = tensors(640)
    kv = cache(capacity_tokens=128, capacity_sequences=2)
    with pytest.raises(OutOfPages):
        kv.append(0, k, v)
    assert kv.layers[0].rows == []
    with pytest.raises(UsageError, match="k: expected at most 2 sequences"):
        kv.append(0, torch.zeros(3, 2, 1, 64), torch.zeros(3, 2, 1, 64))
    kv.append(0, k[:1, :, :64], v[:1, :, :64])
    with pytest.raises(UsageError, match="rows: expected at most 2 sequences"):
        kv.reorder([0, 0, 0])
    with pytest.raises(UsageError, match="capacity_tokens"):
        cache(capacity_tokens=0)


def test_a_sliding_layer_needs_no_more_than_its_window_and_a_run() -> None:
    q, k, v = tensors(5000, rows=1)
    kv = cache(sliding=100, capacity_tokens=1 << 20)
    assert len(kv.layers[0].sealed.pages) < 30
    torch.testing.assert_close(
        kv.extend(0, q, k, v, scale=0.125), cache(sliding=100).extend(0, q, k, v, scale=0.125), rtol=1e-4, atol=1e-5
    )


# ---- which kernel --------------------------------------------------------------------------------------------------


def test_the_first_kernel_that_supports_the_pages_is_taken_and_named(monkeypatch: pytest.MonkeyPatch) -> None:
    class Packed(Spy):
        name = "packed-only"

        def supports(self, layout: Any, *_: Any) -> Support:
            return Support(None if layout.k.fields[0].name.startswith("codes") else "raw pages")

    monkeypatch.setattr(binding, "KERNELS", (Packed, *binding.KERNELS))
    kv = cache("int4")
    assert kv.kernel_names == "numba, packed-only"
    assert (kv.layers[0].kernel.name, kv.layers[0].raw_kernel.name) == ("packed-only", "numba")
    assert cache("fp32").kernel_names == "numba"
