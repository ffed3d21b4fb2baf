"""Peers of `quality.py`: other projects' caches for transformers models, their quantizers for tensors, and llama.cpp.

Nothing here quantizes: every number comes from the project that the row names, driven as it is. What each is, and how it is driven:

transformers' QuantizedCache   `quanto` and `hqq` quantize what is older than a residual (128 tokens that fill, then are quantized at once, together
                               with the whole dequantized past); `fp8` every token, by a scale from the first chunk. All hand the keys and values
                               of the current call to attention as they are: a prompt in one call never meets a quantized key.
turbokv                        TurboQuant (MSE) as a subclass of the above, so with the same residual; its first layer stays raw by default
tqai                           TurboQuant (MSE). Its cache refuses what this transformers hands over, and has no layers, from which the mask of a
                               second chunk is made; its quantizer runs, once for every chunk
tiny-turboquant                KIVI by its own account: keys by channel and values by token in blocks of 128, behind a residual of 128 and more
llama.cpp                      (llama_engine.py) every key and value goes through the cache, rotated before it is quantized
"""

from __future__ import annotations

from collections.abc import Callable
from dataclasses import dataclass
from importlib.metadata import PackageNotFoundError, version
from typing import Any

import numpy as np
import torch
from torch import Tensor
from transformers import QuantizedCache
from transformers.cache_utils import Cache, DynamicLayer

PROJECTS = {
    "transformers": "transformers",
    "quanto": "optimum-quanto",
    "hqq": "hqq",
    "turbokv": "turbokv",
    "tqai": "tqai",
    "tiny-turboquant": "tiny-turboquant",
    "llama.cpp": "xllamacpp",
}
"""The package of each peer."""
NOT_RUN = {
    "turbo-attn 0.70.1": "needs an NVIDIA GPU (its prefill one of compute capability 8 or 12)",
    "turboquant 0.2.0": "calls numpy.trapz, which numpy 2.4 no longer has",
    "turboquant-torch 0.4.0": "keeps float keys until told to compress, then holds them decompressed; is the module `turboquant`, as turbokv is",
    "turboquant-kv 1.0.0": "is the module `turboquant`, as turbokv is: both cannot be installed",
}
"""Packages that were looked at and are not measured, with why."""

ERRORS = (RuntimeError, ValueError, TypeError, AttributeError, LookupError, ImportError, OSError, AssertionError)
"""What other people's code may raise: it ends that row, and says so in it."""

_RESIDUAL = "one call for the whole prompt reads float keys; up to 127 tokens, and what one call brings, stay raw"


def missing(project: str) -> str | None:
    """Why a peer cannot be measured here, or None."""
    try:
        version(PROJECTS[project])
    except PackageNotFoundError:
        return f"not installed: pip install {PROJECTS[project]}"
    return None


def versions() -> dict[str, str]:
    """Of the peers that are installed."""
    return {package: version(package) for project, package in PROJECTS.items() if missing(project) is None}


# ---- caches for transformers models ----------------------------------------------------------------------------------


@dataclass(frozen=True)
class CachePeer:
    """`make` gives an empty cache for a model of this config; `default` says what a user gets who changes nothing."""

    name: str
    project: str
    make: Callable[[Any], Cache]
    default: str


def _quantized(backend: str, **options: Any) -> Callable[[Any], Cache]:
    return lambda config: QuantizedCache(backend, config, **options)


def _turbokv(bits: int) -> Callable[[Any], Cache]:
    def make(config: Any) -> Cache:
        from turboquant.cache import TurboQuantCache

        return TurboQuantCache(config, nbits=bits, device="cpu")

    return make


def _tiny(preset: str) -> Callable[[Any], Cache]:
    def make(config: Any) -> Cache:
        from tiny_turboquant import TinyKVCache

        cache = TinyKVCache(compression=preset)
        update = cache.update
        # It was written for a transformers that handed over `cache_kwargs`; this one hands over `kwargs`, and neither is used.
        cache.update = lambda k, v, layer, *_, **__: update(k, v, layer)
        return cache

    return make


class EncodedLayer(DynamicLayer):
    """A layer for a quantizer without a cache of its own: what a call brings is attended raw, encoded once, and read decoded ever after.

    `encode` takes [1, Hkv, T, D] of a side ("k" or "v"), `decode` gives it back.
    """

    def __init__(self, encode: Callable[[str, Tensor], Any], decode: Callable[[str, Any], Tensor]) -> None:
        super().__init__()
        self._encode, self._decode, self._tokens = encode, decode, 0
        self.encoded: dict[str, list[Any]] = {"k": [], "v": []}

    def update(self, key_states: Tensor, value_states: Tensor, *_: Any, **__: Any) -> tuple[Tensor, Tensor]:
        if not self.is_initialized:
            self.lazy_initialization(key_states, value_states)
        self._tokens += key_states.shape[-2]
        k, v = (self._append(side, x) for side, x in (("k", key_states), ("v", value_states)))
        return k, v

    def _append(self, side: str, x: Tensor) -> Tensor:
        past = [self._decode(side, each).to(x.dtype) for each in self.encoded[side]]
        self.encoded[side].append(self._encode(side, x))
        return torch.cat([*past, x], dim=-2)

    def get_seq_length(self) -> int:
        return self._tokens


def _tqai(bits_k: int, bits_v: int) -> Callable[[Any], Cache]:
    def make(config: Any) -> Cache:
        decoder = config.get_text_config(decoder=True)
        return Cache(
            layers=[
                EncodedLayer(*_tqai_codec(_head_dim(decoder), bits_k, bits_v, layer))
                for layer in range(decoder.num_hidden_layers)
            ]
        )

    return make


def _tqai_codec(
    dim: int, bits_k: int, bits_v: int, layer: int = 0
) -> tuple[Callable[[str, Tensor], Any], Callable[[str, Any], Tensor]]:
    """Seeds as its own cache has them."""
    from tqai.backend import get_backend
    from tqai.quantizer import PolarQuantizer

    ops = get_backend("torch", "cpu")
    both = {
        side: PolarQuantizer(dim, bits, 42 + layer + shift, ops)
        for side, bits, shift in (("k", bits_k, 0), ("v", bits_v, 10000))
    }
    return lambda side, x: both[side].quantize(x), lambda side, each: both[side].dequantize(*each)


def _head_dim(config: Any) -> int:
    return int(getattr(config, "head_dim", None) or config.hidden_size // config.num_attention_heads)


CACHES = (
    CachePeer("quanto 4", "quanto", _quantized("quanto", nbits=4), f"groups of 64 within a token; {_RESIDUAL}"),
    CachePeer("quanto 4, axis_key=-1", "quanto", _quantized("quanto", nbits=4, axis_key=-1), "no default: keys by channel, groups of 64 tokens"),
    CachePeer("quanto 2", "quanto", _quantized("quanto", nbits=2), f"groups of 64 within a token; {_RESIDUAL}"),
    CachePeer("hqq 4, axis 1", "hqq", _quantized("hqq", nbits=4, axis_key=1, axis_value=1), f"its documented axis (0 by default); {_RESIDUAL}"),
    CachePeer("hqq 2, axis 1", "hqq", _quantized("hqq", nbits=2, axis_key=1, axis_value=1), f"its documented axis (0 by default); {_RESIDUAL}"),
    CachePeer("transformers fp8", "transformers", _quantized("fp8"), "one scale for a layer's keys, from the first call, which reads float keys"),
    CachePeer("turbokv 4", "turbokv", _turbokv(4), f"layer 0 raw; {_RESIDUAL}"),
    CachePeer("turbokv 2", "turbokv", _turbokv(2), f"layer 0 raw; {_RESIDUAL}"),
    CachePeer("tqai 4", "tqai", _tqai(4, 4), "keys 4 bits, values 2; its cache keeps a decoded copy of everything"),
    CachePeer("tqai 4/2", "tqai", _tqai(4, 2), "these bits; its cache keeps a decoded copy of everything"),
    CachePeer("tiny-turboquant safe", "tiny-turboquant", _tiny("safe"), "4 bits; the last 128 to 255 tokens raw"),
    CachePeer("tiny-turboquant aggressive", "tiny-turboquant", _tiny("aggressive"), "keys 3 bits, values 2; the last 128 to 255 tokens raw"),
)  # fmt: skip


# ---- quantizers for tensors ------------------------------------------------------------------------------------------


@dataclass(frozen=True)
class TensorPeer:
    """`codec` gives (encode, decode) for a head dimension; see `EncodedLayer`."""

    name: str
    project: str
    codec: Callable[[int], tuple[Callable[[str, Tensor], Any], Callable[[str, Any], Tensor]]]


def _layer_codec(make: Callable[[Any], Cache]) -> Callable[[int], Any]:
    """The quantizer of a QuantizedCache, without its residual."""

    def codec(dim: int) -> Any:
        from transformers import LlamaConfig

        layer = make(
            LlamaConfig(hidden_size=dim, num_attention_heads=1, num_key_value_heads=1, num_hidden_layers=2)
        ).layers[1]

        def encode(side: str, x: Tensor) -> Any:
            layer.lazy_initialization(x, x)
            axis = () if not hasattr(layer, "axis_key") else (layer.axis_key if side == "k" else layer.axis_value,)
            return layer._quantize(x.contiguous(), *axis)

        return encode, lambda _, each: layer._dequantize(each)

    return codec


def _tiny_codec(bits_k: int, bits_v: int, group: int | None) -> Callable[[int], Any]:
    """Blocks of 128 tokens, as its cache makes them; packed and in float16 as it holds them."""

    def codec(_: int) -> Any:
        from tiny_turboquant import cache as tiny

        def encode(side: str, x: Tensor) -> Any:
            bits, how = (
                (bits_k, {"axis": "channel"}) if side == "k" else (bits_v, {"axis": "token", "group_size": group})
            )
            parts = (tiny._get_quantizer(bits).quantize_block(block, **how) for block in x.split(128, dim=-2))
            mode = tiny._pack_mode(bits, x.shape[-1])
            return [
                (tiny._pack(codes, mode), scale.half(), zero.half(), mode, x.shape[-1]) for codes, scale, zero in parts
            ]

        def decode(_: str, blocks: Any) -> Tensor:
            return torch.cat(
                [_affine(tiny._unpack(codes, mode, dim), scale, zero) for codes, scale, zero, mode, dim in blocks],
                dim=-2,
            )

        return encode, decode

    return codec


def _affine(codes: Tensor, scale: Tensor, zero: Tensor) -> Tensor:
    """What its cache does inline: code * scale + zero, the scales of groups spread over their channels."""
    spread = codes.shape[-1] // scale.shape[-1] if scale.shape[-1] > 1 else 1
    return codes.float() * scale.float().repeat_interleave(spread, -1) + zero.float().repeat_interleave(spread, -1)


def _gguf_codec(kind: str) -> Callable[[int], Any]:
    """llama.cpp's blocks by its own Python package."""

    def codec(_: int) -> Any:
        import gguf

        code = gguf.GGMLQuantizationType[kind.upper()]

        def encode(_: str, x: Tensor) -> Any:
            return gguf.quantize(x.float().numpy(), code)

        return encode, lambda _, each: torch.from_numpy(gguf.dequantize(each, code))

    return codec


_OF_TRANSFORMERS = ("transformers", "quanto", "hqq", "turbokv")
TENSORS = (
    *(TensorPeer(peer.name, peer.project, _layer_codec(peer.make)) for peer in CACHES if peer.project in _OF_TRANSFORMERS),
    TensorPeer("tqai 4", "tqai", lambda dim: _tqai_codec(dim, 4, 4)),
    TensorPeer("tqai 4/2", "tqai", lambda dim: _tqai_codec(dim, 4, 2)),
    TensorPeer("tiny-turboquant safe", "tiny-turboquant", _tiny_codec(4, 4, None)),
    TensorPeer("tiny-turboquant aggressive", "tiny-turboquant", _tiny_codec(3, 2, 32)),
    *(TensorPeer(f"llama.cpp {kind}, no rotation", "llama.cpp", _gguf_codec(kind)) for kind in ("q8_0", "q5_1", "q4_0")),
)  # fmt: skip


# ---- bytes -----------------------------------------------------------------------------------------------------------

_SHARED = ("quantizer", "optimizer")  # Rotations and codebooks are the model's, whatever it caches.


def held_bytes(thing: Any, seen: set[int] | None = None) -> int:
    """Bytes of all tensors and arrays that an object holds, each storage once; a tensor made of tensors counts as these."""
    seen = set() if seen is None else seen
    if isinstance(thing, np.ndarray):
        return int(thing.nbytes)
    if type(thing) in (Tensor, torch.nn.Parameter):
        storage = thing.untyped_storage()
        if storage.data_ptr() in seen:
            return 0
        seen.add(storage.data_ptr())
        return int(thing.numel() * thing.element_size())
    if (
        id(thing) in seen
        or isinstance(thing, (str, bytes, int, float, type, torch.dtype, torch.device))
        or callable(thing)
    ):
        return 0
    seen.add(id(thing))
    if isinstance(thing, dict):
        return sum(held_bytes(each, seen) for each in thing.values())
    if isinstance(thing, (list, tuple)):
        return sum(held_bytes(each, seen) for each in thing)
    return sum(held_bytes(each, seen) for name, each in getattr(thing, "__dict__", {}).items() if name not in _SHARED)
