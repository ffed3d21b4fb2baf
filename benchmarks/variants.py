"""Ways to read keys and values back, one idea each, put together: frames (a mean, a scale, a rotation) around a rounding.

    x [B, Hkv, P, S, D] --frame--> --frame--> --rounding--> --frame back--> --frame back--> what is read

Simulations in float32, with terms rounded as they would be stored; bits are counted by formula, all terms included. `codec` is what ships, through
its own `encode` and `decode`. Sources: docs/ablation.md.
"""

from __future__ import annotations

from collections.abc import Callable, Sequence
from dataclasses import dataclass
from functools import partial

import torch
from torch import Tensor

from kvarto.codecs import affine, hadamard, registry
from kvarto.codecs.base import Codec
from kvarto.layout import PAGE_TOKENS, Side

FLOAT16_MAX = 65504.0
SMALLEST_STEP = 2.0**-24
# Where a range is best cut for a Gaussian group of 128 (kept to half a percent by groups of 64).
CLIP = {4: 0.93, 3: 0.8, 2: 0.6}


@dataclass(frozen=True)
class Moments:
    """What a record would know of a layer, from other documents: float32 [Hkv, 1, 1, D] each.

    k_mean, v_mean   of tokens behind the first page, keys after RoPE
    balance          (E q^2 / E (k - page mean)^2)^(1/4), equal within a RoPE pair, of geometric mean 1
    """

    k_mean: Tensor
    v_mean: Tensor
    balance: Tensor


Back = Callable[[Tensor], Tensor]


@dataclass(frozen=True)
class Frame:
    """x to (y, the way back); `bits` a number that it stores."""

    into: Callable[[Tensor, Moments], tuple[Tensor, Back]]
    bits: float = 0.0


@dataclass(frozen=True)
class Rounding:
    """y to what its codes say; `bits` a number with all terms, by head dimension."""

    read: Callable[[Tensor], Tensor]
    bits: Callable[[int], float]


@dataclass(frozen=True)
class Variant:
    """`read`: float32 [B, Hkv, P, S, D], of whole pages, to what is read back. `bits` of a number, by head dimension."""

    name: str
    read: Callable[[Tensor, Moments], Tensor]
    bits: Callable[[int], float]


def variant(name: str, rounding: Rounding, *frames: Frame) -> Variant:
    """The frames around the rounding, the first outermost."""

    def read(x: Tensor, moments: Moments) -> Tensor:
        backs = []
        for frame in frames:
            x, back = frame.into(x, moments)
            backs.append(back)
        x = rounding.read(x)
        for back in reversed(backs):
            x = back(x)
        return x

    return Variant(name, read, lambda dim: rounding.bits(dim) + sum(frame.bits for frame in frames))


def codec(name: str, side: Side, label: str = "") -> Variant:
    """A codec as it ships."""
    found: Codec = registry[name]

    def read(x: Tensor, moments: Moments) -> Tensor:
        layout = found.layout(side, PAGE_TOKENS, x.shape[-1])
        return found.decode(found.encode(x.contiguous(), layout), layout)

    return Variant(label or name, read, lambda dim: found.layout(side, PAGE_TOKENS, dim).bits_per_element)


# ---- frames ----------------------------------------------------------------------------------------------------------


def _page_mean(x: Tensor, moments: Moments) -> tuple[Tensor, Back]:
    """A float16 vector for each page: what is the same for all tokens of a page costs no codes."""
    mean = half(x.mean(-2, keepdim=True))
    return x - mean, lambda y: y + mean


def _static_mean(x: Tensor, moments: Moments) -> tuple[Tensor, Back]:
    """Of the record. A constant off all keys shifts all scores of a query alike, so a server need not add it back."""
    return x - moments.k_mean, lambda y: y + moments.k_mean


def _value_mean(x: Tensor, moments: Moments) -> tuple[Tensor, Back]:
    """Of the record; probabilities add up to 1, so it can be folded into the output projection's bias."""
    return x - moments.v_mean, lambda y: y + moments.v_mean


def _balanced(x: Tensor, moments: Moments) -> tuple[Tensor, Back]:
    """Channels scaled so that each has as much part in the error of a score. Equal within a RoPE pair, so it folds into the weights."""
    return x * moments.balance, lambda y: y / moments.balance


def _rotated(x: Tensor, moments: Moments) -> tuple[Tensor, Back]:
    """Hadamard over channels: outliers are spread."""
    return hadamard.transform(x), partial(hadamard.transform, inverse=True)


PAGE_MEAN = Frame(_page_mean, bits=16 / PAGE_TOKENS)
STATIC_MEAN, VALUE_MEAN, BALANCED, ROTATED = (Frame(f) for f in (_static_mean, _value_mean, _balanced, _rotated))


# ---- roundings -------------------------------------------------------------------------------------------------------


def of_tokens(bits: int, *, clip: float = 1.0, unbiased: bool = False, group: int = 0) -> Rounding:
    """A scale and a zero, float16, for each token, or for each `group` channels of it."""

    def read(y: Tensor) -> Tensor:
        if not group:
            return _from_range(y, -1, bits, clip, unbiased)
        return _from_range(y.unflatten(-1, (-1, group)), -1, bits, clip, unbiased).flatten(-2)

    return Rounding(read, lambda dim: bits + 32 / (group or dim))


def of_channels(bits: int, *, group_tokens: int = PAGE_TOKENS) -> Rounding:
    """A scale and a zero, float16, for each channel of a page, or of `group_tokens` tokens."""

    def read(y: Tensor) -> Tensor:
        groups = y.unflatten(-2, (PAGE_TOKENS // group_tokens, group_tokens))
        return _from_range(groups, -2, bits).flatten(-3, -2)

    return Rounding(read, lambda dim: bits + 32 / group_tokens)


def fitted_tokens(bits: int) -> Rounding:
    """Least squares between roundings, variance kept (affine.refine), for each token."""
    return Rounding(lambda y: _fitted(y, -1, y.new_full((), 2.0**bits)), lambda dim: bits + 32 / dim)


def fitted_channels(bits: int, *, slow_share: int = 0, slow_bits: int = 0) -> Rounding:
    """The same for each channel of a page; one in `slow_share` channels, those that RoPE turns slowest, has `slow_bits` more."""

    def wide(dim: int) -> list[int]:
        each, end = (dim // (2 * slow_share), dim // 2) if slow_share else (0, 0)
        return [*range(end - each, end), *range(dim - each, dim)] if each else []

    def read(y: Tensor) -> Tensor:
        levels = torch.full((y.shape[-1],), 2.0**bits)
        levels[wide(y.shape[-1])] = 2.0 ** (bits + slow_bits)
        return _fitted(y, -2, levels.to(y.device))

    return Rounding(read, lambda dim: bits + len(wide(dim)) * slow_bits / dim + 32 / PAGE_TOKENS)


def half(x: Tensor) -> Tensor:
    """Rounded to float16, float32."""
    return x.clamp(-FLOAT16_MAX, FLOAT16_MAX).half().float()


def _from_range(y: Tensor, dim: int, bits: int, clip: float = 1.0, unbiased: bool = False) -> Tensor:
    """From minimum to maximum, drawn in to `clip` of it about its middle. `unbiased`: scale and zero such that the product with y is |y|^2."""
    lo, hi = y.amin(dim, keepdim=True), y.amax(dim, keepdim=True)
    middle, reach, top = (lo + hi) / 2, (hi - lo) / 2 * clip, 2**bits - 1
    scale, zero = half(2 * reach / top).clamp_min(SMALLEST_STEP), half(middle - reach)
    codes = ((y - zero) / scale).round().clamp(0, top)
    if unbiased:
        read = codes * scale + zero
        product = (read * y).sum(dim, keepdim=True)
        factor = torch.where(product > 0, (y * y).sum(dim, keepdim=True) / product.clamp_min(1e-30), 1.0)
        scale, zero = half(scale * factor), half(zero * factor)
    return codes * scale + zero


def _fitted(y: Tensor, dim: int, levels: Tensor) -> Tensor:
    fit = affine.refine(y, dim, levels)
    scale = half(fit.scale).clamp_min(SMALLEST_STEP)
    zero = half(fit.mean - scale * fit.code_mean)
    return affine.nearest(fit.x, scale, zero, levels).float() * scale + zero


# ---- what is compared ------------------------------------------------------------------------------------------------


def key_variants(bits: int) -> list[Variant]:
    """The ladder for keys, from the plainest on, and what ships."""
    clipped, slow = of_tokens(bits, clip=CLIP[bits]), (8, 1) if bits == 4 else (4, 2)
    unbiased = of_tokens(bits, clip=CLIP[bits], unbiased=True)
    quarter = [] if slow == (4, 2) else [(4, 2)]
    return [
        variant("per token", of_tokens(bits)),
        variant("page mean", of_tokens(bits), PAGE_MEAN),
        variant("static mean", of_tokens(bits), STATIC_MEAN),
        variant("Hadamard", of_tokens(bits), ROTATED),
        variant("Hadamard, clip", clipped, ROTATED),
        variant("Hadamard, clip, unbiased", unbiased, ROTATED),
        variant("Hadamard, fitted", fitted_tokens(bits), ROTATED),
        variant("page mean, Hadamard, clip", clipped, PAGE_MEAN, ROTATED),
        variant("static mean, Hadamard, clip", clipped, STATIC_MEAN, ROTATED),
        variant("page mean, balanced, Hadamard, clip", clipped, PAGE_MEAN, BALANCED, ROTATED),
        variant("static mean, balanced, Hadamard, clip", clipped, STATIC_MEAN, BALANCED, ROTATED),
        variant("page mean, balanced, Hadamard, clip, unbiased", unbiased, PAGE_MEAN, BALANCED, ROTATED),
        variant("page mean, balanced, Hadamard, fitted", fitted_tokens(bits), PAGE_MEAN, BALANCED, ROTATED),
        variant("per channel", of_channels(bits)),
        variant("per channel, groups of 32", of_channels(bits, group_tokens=32)),
        variant("per channel, fitted", fitted_channels(bits)),
        *(
            variant(f"per channel, fitted, slow 1/{share} + {more}", fitted_channels(bits, slow_share=share, slow_bits=more))
            for share, more in [slow, *quarter]
        ),
        codec(f"int{bits}", Side.K),
        codec(f"turbo{bits}", Side.K),
    ]  # fmt: skip


def value_variants(bits: int) -> list[Variant]:
    """The ladder for values, and what ships."""
    clipped = of_tokens(bits, clip=CLIP[bits])
    return [
        variant("per token", of_tokens(bits)),
        variant("per token, groups of 32", of_tokens(bits, group=32)),
        variant("mean folded", of_tokens(bits), VALUE_MEAN),
        variant("Hadamard", of_tokens(bits), ROTATED),
        variant("Hadamard, clip", clipped, ROTATED),
        variant("Hadamard, clip, unbiased", of_tokens(bits, clip=CLIP[bits], unbiased=True), ROTATED),
        variant("Hadamard, fitted", fitted_tokens(bits), ROTATED),
        variant("mean folded, Hadamard, clip", clipped, VALUE_MEAN, ROTATED),
        variant("mean folded, Hadamard, fitted", fitted_tokens(bits), VALUE_MEAN, ROTATED),
        variant("per channel", of_channels(bits)),
        codec(f"int{bits}", Side.V),
        codec(f"turbo{bits}", Side.V),
    ]


def formats(bits: int) -> list[tuple[Variant, Variant]]:
    """Both sides: what ships, what others ship, and the ladder's rungs put together."""
    keys, values = ({each.name: each for each in ladder(bits)} for ladder in (key_variants, value_variants))
    shipped = [f"int{bits}", f"kivi{bits}", *([f"kivi{bits}-g32"] if bits != 3 else []), f"turbo{bits}"]
    pairs = (
        ("per token", "per token"),
        ("Hadamard, clip", "Hadamard, clip"),
        ("page mean, Hadamard, clip", "Hadamard, clip"),
        ("page mean, balanced, Hadamard, clip", "Hadamard, clip"),
        ("per channel, fitted", "Hadamard, fitted"),
    )
    return [
        *((codec(name, Side.K), codec(name, Side.V)) for name in shipped),
        *((keys[key], values[value]) for key, value in pairs),
    ]


KEY_STEPS = (
    ("page mean", "per token", "page mean"),
    ("static mean", "per token", "static mean"),
    ("Hadamard", "per token", "Hadamard"),
    ("clip, after Hadamard", "Hadamard", "Hadamard, clip"),
    ("fit instead of clip", "Hadamard, clip", "Hadamard, fitted"),
    ("unbiased scale", "Hadamard, clip", "Hadamard, clip, unbiased"),
    ("page mean, before Hadamard", "Hadamard, clip", "page mean, Hadamard, clip"),
    ("Hadamard and clip, after page mean", "page mean", "page mean, Hadamard, clip"),
    ("static instead of page mean", "page mean, Hadamard, clip", "static mean, Hadamard, clip"),
    ("balanced scale, with page mean", "page mean, Hadamard, clip", "page mean, balanced, Hadamard, clip"),
    ("balanced scale, with static mean", "static mean, Hadamard, clip", "static mean, balanced, Hadamard, clip"),
    ("unbiased scale, with all of these", "page mean, balanced, Hadamard, clip", "page mean, balanced, Hadamard, clip, unbiased"),
    ("fit instead of clip, with all of these", "page mean, balanced, Hadamard, clip", "page mean, balanced, Hadamard, fitted"),
    ("per channel instead of per token", "per token", "per channel"),
    ("per channel instead of all of these", "page mean, balanced, Hadamard, clip", "per channel"),
    ("groups of 32", "per channel", "per channel, groups of 32"),
    ("fit instead of range", "per channel", "per channel, fitted"),
    ("slow 1/8 + 1 bit", "per channel, fitted", "per channel, fitted, slow 1/8 + 1"),
    ("slow 1/4 + 2 bits", "per channel, fitted", "per channel, fitted, slow 1/4 + 2"),
)  # fmt: skip
"""(what is added, without it, with it): where the second has less KL than the first, the step pays."""

VALUE_STEPS = (
    ("groups of 32", "per token", "per token, groups of 32"),
    ("mean folded", "per token", "mean folded"),
    ("Hadamard", "per token", "Hadamard"),
    ("clip, after Hadamard", "Hadamard", "Hadamard, clip"),
    ("unbiased scale", "Hadamard, clip", "Hadamard, clip, unbiased"),
    ("fit instead of clip", "Hadamard, clip", "Hadamard, fitted"),
    ("fit instead of range", "Hadamard", "Hadamard, fitted"),
    ("mean folded, with Hadamard and clip", "Hadamard, clip", "mean folded, Hadamard, clip"),
    ("mean folded, with Hadamard and fit", "Hadamard, fitted", "mean folded, Hadamard, fitted"),
    ("per channel instead of per token", "per token", "per channel"),
)


def sink_variants() -> Sequence[Variant]:
    """Keys at 4 bits, with and without their mean: whose error carries the attention's mass."""
    wanted = (
        "per token", "page mean", "static mean", "Hadamard, clip", "page mean, Hadamard, clip", "static mean, Hadamard, clip",
        "page mean, balanced, Hadamard, clip", "per channel", "int4",
    )  # fmt: skip
    known = {each.name: each for each in key_variants(4)}
    return [known[name] for name in wanted]
