"""llama.cpp inside this process, a chosen cache type and the logits of every token: what its server does not tell.

The library is that of the wheel `xllamacpp` (which `peers_serve.py` uses as a server): its C interface is exported, and called here through ctypes.
The structures below are llama.h's of BUILD; a library whose defaults do not read as llama.h's is refused, since it would have another layout.
"""

from __future__ import annotations

import ctypes as c
import time
from collections.abc import Iterator, Sequence
from contextlib import contextmanager
from pathlib import Path
from typing import Any

import numpy as np
import torch
from torch import Tensor

PACKAGE, BUILD = "xllamacpp", "2026.10.11549"
KINDS = {"f16": 1, "q8_0": 8, "q5_1": 7, "q4_0": 2}
"""ggml_type by name."""
_FLASH_ATTENTION = 1  # Without it values cannot be quantized.
_SLACK_TOKENS = 64


def _structure(name: str, **fields: Any) -> type[c.Structure]:
    return type(name, (c.Structure,), {"_fields_": [*fields.items()]})


_I, _U, _F, _P, _B, _Z = c.c_int32, c.c_uint32, c.c_float, c.c_void_p, c.c_bool, c.c_size_t
_Model = _structure(
    "llama_model_params",
    devices=_P, tensor_buft_overrides=_P, n_gpu_layers=_I, split_mode=_I, load_mode=_I, lazy_mode=_I, main_gpu=_I, tensor_split=_P,
    progress_callback=_P, progress_callback_user_data=_P, kv_overrides=_P,
    vocab_only=_B, check_tensors=_B, use_extra_bufts=_B, no_host=_B, no_alloc=_B, load_mtp=_B,
)  # fmt: skip
_Context = _structure(
    "llama_context_params",
    n_ctx=_U, n_batch=_U, n_ubatch=_U, n_seq_max=_U, n_rs_seq=_U, n_outputs_max=_U, n_outputs_max_per_seq=_U, n_threads=_I, n_threads_batch=_I,
    ctx_type=_I, rope_scaling_type=_I, pooling_type=_I, attention_type=_I, flash_attn_type=_I,
    rope_freq_base=_F, rope_freq_scale=_F, yarn_ext_factor=_F, yarn_attn_factor=_F, yarn_beta_fast=_F, yarn_beta_slow=_F,
    yarn_orig_ctx=_U, defrag_thold=_F, cb_eval=_P, cb_eval_user_data=_P, type_k=_I, type_v=_I, moe_cache_size=_Z,
    abort_callback=_P, abort_callback_data=_P,
    embeddings=_B, offload_kqv=_B, no_perf=_B, op_offload=_B, swa_full=_B, kv_unified=_B, samplers=_P, n_samplers=_Z, ctx_other=_P,
)  # fmt: skip
_Batch = _structure(
    "llama_batch",
    n_tokens=_I, token=c.POINTER(_I), embd=_P, pos=c.POINTER(_I), n_seq_id=c.POINTER(_I), seq_id=c.POINTER(c.POINTER(_I)),
    logits=c.POINTER(c.c_int8),
)  # fmt: skip
_LOG = c.CFUNCTYPE(None, c.c_int, c.c_char_p, c.c_void_p)
_FUNCTIONS = {
    "llama_backend_init": (None, ()),
    "llama_log_set": (None, (_LOG, _P)),
    "llama_print_system_info": (c.c_char_p, ()),
    "llama_model_default_params": (_Model, ()),
    "llama_model_load_from_file": (_P, (c.c_char_p, _Model)),
    "llama_model_get_vocab": (_P, (_P,)),
    "llama_vocab_n_tokens": (_I, (_P,)),
    "llama_context_default_params": (_Context, ()),
    "llama_init_from_model": (_P, (_P, _Context)),
    "llama_free": (None, (_P,)),
    "llama_batch_init": (_Batch, (_I, _I, _I)),
    "llama_batch_free": (None, (_Batch,)),
    "llama_decode": (_I, (_P, _Batch)),
    "llama_get_logits": (c.POINTER(_F), (_P,)),
    "llama_state_seq_get_size": (_Z, (_P, _I)),
}


def _library() -> Any:
    import xllamacpp.xllamacpp

    lib = c.CDLL(xllamacpp.xllamacpp.__file__)
    for name, (result, arguments) in _FUNCTIONS.items():
        function = getattr(lib, name)
        function.restype, function.argtypes = result, arguments
    options = lib.llama_context_default_params()
    read = (
        options.n_batch,
        options.n_seq_max,
        options.type_k,
        options.type_v,
        options.offload_kqv,
        options.n_samplers,
        options.ctx_other,
    )
    if read != (2048, 1, KINDS["f16"], KINDS["f16"], True, 0, None):
        raise RuntimeError(f"{PACKAGE}: its structures are not those of build {BUILD}: pip install {PACKAGE}=={BUILD}")
    return lib


class Llama:
    """A model on the CPU. `read` opens a context of its own each time: a cache's type is fixed with its context."""

    def __init__(self, gguf: Path, threads: int) -> None:
        self._lib, self._threads, self._silent = _library(), threads, _LOG(lambda *_: None)
        self._lib.llama_log_set(self._silent, None)
        self._lib.llama_backend_init()
        options = self._lib.llama_model_default_params()
        options.n_gpu_layers = 0
        self._model = self._lib.llama_model_load_from_file(str(gguf).encode(), options)
        if not self._model:
            raise RuntimeError(f"llama.cpp does not load {gguf}")
        self._words = self._lib.llama_vocab_n_tokens(self._lib.llama_model_get_vocab(self._model))

    def system(self) -> str:
        """What it was compiled for, in its own words."""
        return str(self._lib.llama_print_system_info().decode())

    def read(self, kind: str, tokens: Sequence[int], scored: int, chunk: int) -> tuple[Tensor, float, list[int]]:
        """Tokens in chunks through a cache of this type: logits float32 [scored, vocabulary], seconds of CPU, and after each chunk the bytes
        that the sequence takes when it is saved.
        """
        kept, sizes, seconds = [], [], 0.0
        with self._context(kind, len(tokens), chunk) as context:
            for first in range(0, len(tokens), chunk):
                piece, begin = tokens[first : first + chunk], time.process_time()
                logits = self._decode(context, piece, first)
                seconds += time.process_time() - begin
                wanted = min(len(piece), first + len(piece) - (len(tokens) - scored))
                if wanted > 0:
                    kept.append(logits[-wanted:].clone())
                sizes.append(int(self._lib.llama_state_seq_get_size(context, 0)))
        return torch.cat(kept), seconds, sizes

    @contextmanager
    def _context(self, kind: str, tokens: int, chunk: int) -> Iterator[Any]:
        options = self._lib.llama_context_default_params()
        options.n_ctx, options.n_batch, options.n_ubatch = tokens + _SLACK_TOKENS, chunk, chunk
        options.n_threads = options.n_threads_batch = self._threads
        options.type_k = options.type_v = KINDS[kind]
        options.flash_attn_type = _FLASH_ATTENTION
        context = self._lib.llama_init_from_model(self._model, options)
        if not context:
            raise RuntimeError(f"llama.cpp refuses a cache of {kind}")
        try:
            yield context
        finally:
            self._lib.llama_free(context)

    def _decode(self, context: Any, tokens: Sequence[int], first: int) -> Tensor:
        """Logits [T, vocabulary] that the next call overwrites."""
        count, batch = len(tokens), self._lib.llama_batch_init(len(tokens), 0, 1)
        try:
            batch.n_tokens = count
            for i, token in enumerate(tokens):
                batch.token[i], batch.pos[i], batch.logits[i] = token, first + i, 1
                batch.n_seq_id[i], batch.seq_id[i][0] = 1, 0
            if code := self._lib.llama_decode(context, batch):
                raise RuntimeError(f"llama_decode answers {code}")
        finally:
            self._lib.llama_batch_free(batch)
        return torch.from_numpy(np.ctypeslib.as_array(self._lib.llama_get_logits(context), shape=(count, self._words)))
