"""What others offer for paged attention on a GPU, called as their own engines call it. What cannot be imported or built is said and left out.

FlashAttention-3 is the library that vLLM ships: found through the package vllm, or named by the environment variable FA3_LIBRARY (the file
_vllm_fa3_C.abi3.so); else the package flash_attn_interface. FlashInfer compiles with nvcc at first use. All read bfloat16 or E4M3 pages of
PAGE_TOKENS tokens in random order, queries are bfloat16 (E4M3 where FlashAttention-3 wants that), and each is planned before it is timed.
"""

from __future__ import annotations

import os
from collections.abc import Callable, Iterator
from dataclasses import dataclass, field
from functools import cached_property
from typing import Any

import torch
from torch import Tensor
from torch.nn.functional import scaled_dot_product_attention as sdpa

from measure_gpu import DEVICE, randperm

PAGE_TOKENS = 16  # vLLM's default


@dataclass(frozen=True)
class Work:
    """`rows` sequences of `context` tokens, the last `queries` of which attend: 1 in a decode step, all in a prefill."""

    rows: int
    context: int
    queries: int = 1

    def __str__(self) -> str:
        if self.queries == 1:
            return f"{self.rows}x{self.context}"
        return f"{self.queries} on {self.context - self.queries}"


@dataclass(frozen=True)
class Peer:
    """kind: "bf16", "fp8", "dense" (not paged: a bound, not a competitor) or "other"; nbytes: of K and V that a call reads.

    out   where the output lies after a call, as many numbers as q has; None if it is not kept or would say nothing
    """

    name: str
    kind: str
    nbytes: int
    call: Callable[[], Any]
    out: Tensor | None = None


@dataclass
class Paged:
    """K and V of some work as the peers store them, and all that their calls need. Hq, Hkv, D as given."""

    work: Work
    hq: int
    hkv: int
    dim: int
    scratch: dict[str, Tensor] = field(default_factory=dict)

    def __post_init__(self) -> None:
        rows, per_row = self.work.rows, self.work.context // PAGE_TOKENS
        self.scale = self.dim**-0.5
        self.tokens = rows * self.work.queries
        self.q = torch.randn(self.tokens, self.hq, self.dim, device=DEVICE, dtype=torch.bfloat16)
        self.out = torch.empty_like(self.q)
        self.table = randperm(rows * per_row).view(rows, per_row)
        self.lengths = torch.full((rows,), self.work.context, dtype=torch.int32, device=DEVICE)
        self.starts = torch.arange(rows + 1, dtype=torch.int32, device=DEVICE)
        self.q_starts = self.starts * self.work.queries
        self.bf16 = torch.randn(self.pages_shape, device=DEVICE, dtype=torch.bfloat16)

    @property
    def pages_shape(self) -> tuple[int, ...]:
        """[K and V, pages, tokens, Hkv, D]."""
        return (2, self.table.numel(), PAGE_TOKENS, self.hkv, self.dim)

    @cached_property
    def fp8(self) -> Tensor:
        """E4M3, `pages_shape`."""
        return self.bf16.to(torch.float8_e4m3fn)

    def error(self, out: Tensor) -> float:
        """Of an output, for the last query of the first sequence: relative to plain attention in float32 over the bfloat16 pages."""
        row, ids = self.work.queries - 1, self.table[0].long()
        k, v = (self.bf16[side, ids].flatten(0, 1).float() for side in range(2))
        q = self.q[row].float().view(self.hkv, -1, self.dim)
        p = (torch.einsum("hrd,nhd->hrn", q, k) * self.scale).softmax(dim=-1)
        expected = torch.einsum("hrn,nhd->hrd", p, v).flatten()
        return float((out.view(self.tokens, -1)[row].float() - expected).norm() / expected.norm())

    def workspace(self, name: str, count: int, dtype: torch.dtype) -> Tensor:
        """Zeros that a library asks for, shared by its calls."""
        if name not in self.scratch:
            self.scratch[name] = torch.zeros(count, dtype=dtype, device=DEVICE)
        return self.scratch[name]


# ---- FlashAttention-3 ------------------------------------------------------------------------------------------------


def _fa3_operations() -> Any:
    """vLLM's FlashAttention-3 as torch operations."""
    if library := os.environ.get("FA3_LIBRARY"):
        torch.ops.load_library(library)
    else:
        import vllm.vllm_flash_attn  # type: ignore[import-not-found]  # noqa: F401
    return torch.ops._vllm_fa3_C


def flash_attention(paged: Paged) -> Iterator[Peer]:
    """Of vLLM, BF16 and FP8, paged; and on dense K and V, where that is prefill."""
    try:
        operations = _fa3_operations()
    except (ImportError, OSError, RuntimeError):
        yield from _flash_attention_package(paged)
        return
    work, one = paged.work, torch.ones(paged.work.rows, paged.hkv, device=DEVICE)
    yield Peer("FA3 bf16", "bf16", _nbytes(paged.bf16), _fa3(operations, paged, paged.q, paged.bf16, None), paged.out)
    if work.queries == 1:
        q8 = paged.q.to(torch.float8_e4m3fn)
        yield Peer("FA3 fp8", "fp8", _nbytes(paged.fp8), _fa3(operations, paged, q8, paged.fp8, one), paged.out)
    else:
        yield Peer("FA3 bf16, dense", "dense", _nbytes(paged.bf16), _fa3_dense(operations, paged))


def _fa3(operations: Any, paged: Paged, q: Tensor, pages: Tensor, descale: Tensor | None) -> Callable[[], Any]:
    """The operation `fwd` as vllm_flash_attn calls it: q flat, K and V paged, a plan made before."""
    work = paged.work
    plan = operations.get_scheduler_metadata(
        work.rows, work.queries, work.context, paged.hq, paged.hkv, paged.dim, paged.dim, q.dtype, paged.lengths, paged.q_starts,
        None, None, None, None, PAGE_TOKENS, 0, True, -1, -1, False, 0, None, 0,
    )  # fmt: skip
    return lambda: operations.fwd(
        q, pages[0], pages[1], None, None, None, paged.out, paged.q_starts, None, None, None, paged.lengths, work.queries, work.context,
        paged.table, None, None, None, None, None, descale, descale, descale, paged.scale, True, -1, -1, 0.0, True, plan, 0, None, 0, None,
        1, 0, None,
    )  # fmt: skip


def _fa3_dense(operations: Any, paged: Paged) -> Callable[[], Any]:
    """The same operation on q, K and V [B, tokens, H, D]."""
    work = paged.work
    k, v = paged.bf16.view(2, work.rows, work.context, paged.hkv, paged.dim)
    q = paged.q.view(work.rows, work.queries, paged.hq, paged.dim)
    nothing = [None] * 13
    return lambda: operations.fwd(
        q, k, v, None, None, None, torch.empty_like(q), *nothing, None, None, None, paged.scale, True, -1, -1, 0.0, True, None, 1, None, 0,
        None, 1, 0, None,
    )  # fmt: skip


def _flash_attention_package(paged: Paged) -> Iterator[Peer]:
    """The package of FlashAttention's own authors."""
    from flash_attn_interface import flash_attn_with_kvcache  # type: ignore[import-not-found]

    q = paged.q.view(paged.work.rows, paged.work.queries, paged.hq, paged.dim)
    options = {"cache_seqlens": paged.lengths, "page_table": paged.table, "softmax_scale": paged.scale, "causal": True}
    k, v = paged.bf16
    yield Peer("FA3 bf16", "bf16", _nbytes(paged.bf16), lambda: flash_attn_with_kvcache(q, k, v, **options))
    if paged.work.queries == 1:
        q8, (k8, v8) = q.to(torch.float8_e4m3fn), paged.fp8
        yield Peer("FA3 fp8", "fp8", _nbytes(paged.fp8), lambda: flash_attn_with_kvcache(q8, k8, v8, **options))


# ---- FlashInfer ------------------------------------------------------------------------------------------------------


def flashinfer_bf16(paged: Paged) -> Iterator[Peer]:
    """Its tensor core decode, or its FA2 prefill."""
    make = _flashinfer_decode if paged.work.queries == 1 else _flashinfer_prefill
    yield Peer("FlashInfer bf16", "bf16", _nbytes(paged.bf16), make(paged, paged.bf16), paged.out)


def flashinfer_fp8(paged: Paged) -> Iterator[Peer]:
    """Decode of E4M3 pages."""
    if paged.work.queries == 1:
        yield Peer("FlashInfer fp8", "fp8", _nbytes(paged.fp8), _flashinfer_decode(paged, paged.fp8), paged.out)


def _flashinfer_pages(paged: Paged) -> tuple[Tensor, Tensor, Tensor]:
    """First page of each sequence [B + 1], pages, and tokens in each last page [B], int32."""
    firsts = paged.starts * paged.table.shape[1]
    return firsts, paged.table.flatten(), torch.full_like(paged.lengths, PAGE_TOKENS)


def _flashinfer_decode(paged: Paged, pages: Tensor) -> Callable[[], Any]:
    import flashinfer  # type: ignore[import-not-found]

    # A workspace for each wrapper: the plan lies in it.
    space = torch.zeros(512 << 20, dtype=torch.uint8, device=DEVICE)
    wrapper = flashinfer.BatchDecodeWithPagedKVCacheWrapper(space, "NHD", use_tensor_cores=True)
    wrapper.plan(
        *_flashinfer_pages(paged), paged.hq, paged.hkv, paged.dim, PAGE_TOKENS,
        q_data_type=torch.bfloat16, kv_data_type=pages.dtype,
    )  # fmt: skip
    return lambda: wrapper.run(paged.q, (pages[0], pages[1]), out=paged.out)


def _flashinfer_prefill(paged: Paged, pages: Tensor) -> Callable[[], Any]:
    import flashinfer

    space = torch.zeros(512 << 20, dtype=torch.uint8, device=DEVICE)
    wrapper = flashinfer.BatchPrefillWithPagedKVCacheWrapper(space, "NHD", backend="fa2")
    wrapper.plan(
        paged.q_starts, *_flashinfer_pages(paged), paged.hq, paged.hkv, paged.dim, PAGE_TOKENS, causal=True,
        q_data_type=torch.bfloat16, kv_data_type=pages.dtype,
    )  # fmt: skip
    return lambda: wrapper.run(paged.q, (pages[0], pages[1]), out=paged.out)


def flashinfer_xqa(paged: Paged) -> Iterator[Peer]:
    """TensorRT-LLM's decode kernel as FlashInfer ships it, on E4M3 pages."""
    if paged.work.queries != 1:
        return
    import flashinfer

    xqa = getattr(flashinfer.xqa, "xqa", flashinfer.xqa)
    shape = (paged.work.rows, 1, paged.hq, paged.dim)
    q, out, lengths = (
        paged.q.view(shape),
        torch.empty_like(paged.q).view(shape),
        paged.lengths.view(-1, 1).to(torch.uint32),
    )
    space = paged.workspace("xqa", 512 << 20, torch.uint8)
    semaphores = paged.workspace("xqa semaphores", 8 << 20, torch.uint32)
    (k, v), table = paged.fp8, paged.table
    call = lambda: xqa(q, k, v, table, lengths, out, space, semaphores, paged.hkv, PAGE_TOKENS)  # noqa: E731
    yield Peer("FlashInfer XQA fp8", "fp8", _nbytes(paged.fp8), call, out)


# ---- vLLM's Triton attention, and torch ------------------------------------------------------------------------------


def vllm_triton(paged: Paged) -> Iterator[Peer]:
    """Decode of BF16 pages, and of pages with 8 and 4 bits and a scale for each token and head."""
    if paged.work.queries != 1:
        return
    from vllm.v1.kv_cache_interface import KVQuantMode  # type: ignore[import-not-found]

    call = _unified(paged, paged.bf16, KVQuantMode.NONE, None)
    yield Peer("vLLM Triton bf16", "other", _nbytes(paged.bf16), call, paged.out)
    *two, dim = paged.pages_shape
    scales = torch.rand(two, device=DEVICE) * 0.02
    int8 = torch.randint(-127, 128, (*two, dim), device=DEVICE, dtype=torch.int8)
    mode = KVQuantMode.INT8_PER_TOKEN_HEAD
    yield Peer("vLLM Triton int8", "other", _nbytes(int8) + _nbytes(scales), _unified(paged, int8, mode, scales))
    int4 = torch.randint(0, 256, (*two, dim // 2), device=DEVICE, dtype=torch.uint8)
    mode = KVQuantMode.INT4_PER_TOKEN_HEAD
    yield Peer("vLLM Triton int4", "other", _nbytes(int4) + _nbytes(scales), _unified(paged, int4, mode, scales))


def _unified(paged: Paged, pages: Tensor, mode: Any, scales: Tensor | None) -> Callable[[], Any]:
    from vllm.v1.attention.ops.triton_unified_attention import unified_attention  # type: ignore[import-not-found]

    rows, heads = paged.work.rows, paged.hq
    segments = 64 if rows * paged.hkv < 128 else 16
    parts = torch.empty(max(rows, 128), heads, segments, paged.dim, device=DEVICE)
    tops, sums = (torch.empty(max(rows, 128), heads, segments, device=DEVICE) for _ in range(2))
    k_scales, v_scales = (None, None) if scales is None else scales
    return lambda: unified_attention(
        paged.q, pages[0], pages[1], paged.out, paged.q_starts, 1, paged.lengths, paged.work.context, paged.scale, True, (-1, -1),
        paged.table, 0.0, None, None, None, seq_threshold_3D=128 // paged.hkv, num_par_softmax_segments=segments,
        softmax_segm_output=parts, softmax_segm_max=tops, softmax_segm_expsum=sums, kv_quant_mode=mode,
        k_scale_cache=k_scales, v_scale_cache=v_scales,
    )  # fmt: skip


def torch_cudnn(paged: Paged) -> Iterator[Peer]:
    """torch SDPA with cuDNN on dense K and V, prefill only. A chunk takes two calls, history and itself, that are not merged: less than the work."""
    if paged.work.queries == 1:
        return
    from torch.nn.attention import SDPBackend, sdpa_kernel

    backend = SDPBackend.CUDNN_ATTENTION if DEVICE == "cuda" else SDPBackend.MATH
    history, shape = (
        paged.work.context - paged.work.queries,
        (paged.work.rows, paged.work.context, paged.hkv, paged.dim),
    )
    q = paged.q.view(paged.work.rows, paged.work.queries, paged.hq, paged.dim).transpose(1, 2)
    k, v = (x.view(shape).transpose(1, 2) for x in paged.bf16)

    def call() -> None:
        with sdpa_kernel(backend):
            if history:
                sdpa(q, k[:, :, :history], v[:, :, :history], enable_gqa=True)
            sdpa(q, k[:, :, history:], v[:, :, history:], is_causal=True, enable_gqa=True)

    yield Peer("torch SDPA cuDNN, dense", "dense", _nbytes(paged.bf16), call)


def _nbytes(x: Tensor) -> int:
    return x.numel() * x.element_size()


ADAPTERS: dict[str, Callable[[Paged], Iterator[Peer]]] = {
    "FlashAttention-3": flash_attention,
    "FlashInfer bf16": flashinfer_bf16,
    "FlashInfer fp8": flashinfer_fp8,
    "FlashInfer XQA": flashinfer_xqa,
    "vLLM Triton": vllm_triton,
    "torch SDPA": torch_cudnn,
}


def gather(paged: Paged, skipped: dict[str, str], errors: dict[str, float] | None = None) -> list[Peer]:
    """Every peer that imports, builds and runs once. Why an adapter broke off is noted in `skipped` and never raised; what is not there is not
    looked for again. `errors` is given each peer's `Paged.error`, so that none is timed at something else.
    """
    found: list[Peer] = []
    for name, adapter in ADAPTERS.items():
        if skipped.get(name, "").startswith(("ModuleNotFoundError", "ImportError")):
            continue
        try:
            for peer in adapter(paged):
                peer.call()
                if DEVICE == "cuda":
                    torch.cuda.synchronize()
                if errors is not None and peer.out is not None:
                    errors[peer.name] = paged.error(peer.out)
                found.append(peer)
        except Exception as error:  # noqa: BLE001 - whatever someone else's library does, ours is measured
            first_line = (str(error).strip() or "no message").splitlines()[0]
            skipped[name] = f"{type(error).__name__}: {first_line[:160]}"
    return found
