"""How a codec seals a slab, as plain data, for compiled code that seals (kernels/numba_seal.py, triton_seal.py). No torch.

`Codec.encode` is the truth; a codec whose encoding is one of these three says so with `Codec.sealing`, and a kernel then writes the same bytes:

    Cast     each number, divided by a scale, becomes a float of another type               bf16 fp16 fp32 fp8
    Range    codes in even steps from the lowest to the highest number of a group           int8 kivi          (codecs/affine.py: fit, short_fit)
    Refine   codes, scale and zero of each tile column, fitted in turns by least squares    int4 int3 int2     (codecs/affine.py: refine)

Where the bytes go is the `tile` of each (kvarto/tile.py): codes into its planes, scale and zero where its terms lie.
"""

from __future__ import annotations

from dataclasses import dataclass

from kvarto.tile import Tile

FLOAT16_MAX = 65504.0
SMALLEST_STEP = 2.0**-24
"""float16's smallest number: no scale is below it."""
ROUNDS = 3
"""How often `Refine` fits the scale by least squares and rounds again, before a fit that keeps the variance."""


@dataclass(frozen=True)
class Cast:
    """Floats of the kind of the tile's one plane, clamped to +-limit, its largest finite number.

    scales   numbers are divided by: one, or one for each KV head; () without a scale, or where each token has its own (a term per row or
             column of the tile), its largest magnitude / limit, rounded to bfloat16, or 1 if that is 0
    """

    tile: Tile
    limit: float
    scales: tuple[float, ...] = ()


@dataclass(frozen=True)
class Range:
    """Codes 0 .. 2^bits - 1, bits being those of the tile's planes together, for the groups that share a scale and a zero in the tile.

    Terms are float16; of columns of one group the scale may be "short", rounded up.
    """

    tile: Tile


@dataclass(frozen=True)
class Rotation:
    """A Hadamard matrix of order m * 2^k, m = len(minus), over channels: a Paley matrix of order m (x) Sylvester's (codecs/hadamard.py).

    minus   for each column j of the Paley matrix the rows i in which it holds -1, as bits 2^i; (0,) for order 1
    """

    minus: tuple[int, ...] = (0,)


@dataclass(frozen=True)
class Refine:
    """Codes of the bits of the tile's planes together; a plane that stands for some columns gives only those its bits.

    Terms are of columns: a "short" scale and a float16 zero, or a float16 scale with a "low" zero (kvarto/tile.py).

    rotation   of the channels, before; numbers are drawn into +-rotation_limit first
    """

    tile: Tile
    rotation: Rotation | None = None
    rotation_limit: float = 1e30


Sealing = Cast | Range | Refine
