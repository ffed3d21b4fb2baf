"""What the Triton programs take besides pages: queries in 16 bits, rotations, constants of layers. Host code; made once for a reader and device."""

from __future__ import annotations

from dataclasses import dataclass
from functools import cache
from math import tau
from typing import TYPE_CHECKING, Any

import numpy as np

from kvarto.jit import torch
from kvarto.kernels.base import PageSet, SlabReader
from kvarto.tile import Tile

if TYPE_CHECKING:
    from torch import Tensor

# Half a page turns a pair by less than so many radians: then its keys are nearer to the middle of their range than to 0.
_SLOW = 1.0


# ---- queries and rotations -------------------------------------------------------------------------------------------


def sixteen_bits(reader: SlabReader, q: Tensor) -> Tensor:
    """q in the domain of the reader's tile, in 16 bits and readable as words of two; float32 becomes what the pages hold, or float16."""
    if _rotates(reader, q.device):
        q = reader.rotate(q.float()).to(q.dtype)
    if q.dtype == torch.float32:
        q = q.bfloat16() if is_bfloat16(reader.tile) else q.half()
    in_words = q.stride(-1) == 1 and not (q.stride(0) | q.stride(1)) & 1 and q.data_ptr() % 4 == 0
    return q if in_words else q.clone(memory_format=torch.contiguous_format)


def is_bfloat16(tile: Tile | None) -> bool:
    """The codes are such floats."""
    return tile is not None and tile.planes[0].kind == "bfloat16"


@cache
def _rotates(reader: SlabReader, device: torch.device) -> bool:
    """True unless `rotate` is the identity."""
    eye = torch.eye(reader.layout.dim, device=device)
    return not torch.equal(reader.rotate(eye), eye)


@cache
def rotation_out(reader: SlabReader, device: torch.device) -> tuple[str, Tensor | None]:
    """What `combine` calls the rotation that `unrotate` is, and its matrix float32 [D, D] if that is needed: unrotate(y) is y times it."""
    matrix = matrix_out(reader, device)
    if matrix is None:
        return "", None
    sylvester = torch.ones(1, 1, device=device)
    while len(sylvester) < len(matrix):
        sylvester = torch.kron(torch.tensor([[1.0, 1.0], [1.0, -1.0]], device=device), sylvester)
    if len(sylvester) == len(matrix) and torch.allclose(matrix * len(matrix) ** 0.5, sylvester, rtol=1e-5, atol=1e-5):
        return "hadamard", None
    return "matrix", matrix


@cache
def matrix_out(reader: SlabReader, device: torch.device) -> Tensor | None:
    """float32 [D, D]: unrotate(y) is y times it. None for the identity."""
    eye = torch.eye(reader.layout.dim, device=device)
    matrix = reader.unrotate(eye).contiguous()
    return None if torch.equal(matrix, eye) else matrix


# ---- constants of layers ---------------------------------------------------------------------------------------------


@dataclass(frozen=True)
class Told:
    """What programs know of a reader with a table (triton_levels.py); `told` may have one row for all heads, whose stride is then 0."""

    told: Tensor
    stride: int
    turns: Tensor | None
    phases: Tensor | None


def tables(pages: PageSet | None, device: torch.device) -> dict[str, Any]:
    """The arguments of the programs that read tables; None, which compiles to nothing, for what is not there."""
    k, v = (None, None) if pages is None else (told_of(reader, device) for reader in (pages.k, pages.v))
    return {
        "k_told": k and k.told, "k_told_stride": k and k.stride, "v_told": v and v.told, "v_told_stride": v and v.stride,
        "turns": k and k.turns, "phases": k and k.phases,
    }  # fmt: skip


def told_of(reader: SlabReader, device: torch.device) -> Told | None:
    """The constants of a reader on a device; None without a table. Kept, so that a graph may hold their addresses."""
    return None if reader.tile is None or reader.tile.table is None else _told(reader, device)


@cache
def _told(reader: SlabReader, device: torch.device) -> Told:
    tile, constants = reader.tile, reader.constants
    assert tile is not None, "no tile"
    assert tile.table is not None, "no table"
    assert constants is not None, "a table without constants"
    if not tile.table.ranged:
        return Told(_on(constants, device), _stride(constants), None, None)
    D, S, pairs = reader.layout.dim, reader.layout.page_tokens, tile.table.pairs
    angles = constants[0, constants.shape[1] - pairs :]
    numbers = constants[:, : (1 << sum(plane.bits for plane in tile.planes)) + 2 * D]
    slow = np.ones(D, np.float32)
    slow[: 2 * pairs] = np.concatenate([np.abs(angles) * (S / 2) < _SLOW] * 2)
    rows = np.concatenate([numbers, numbers[:, -2 * D : -D] * slow], axis=1)
    turns, phases = _turns(tuple(map(float, angles)), S, device) if pairs else (None, None)
    return Told(_on(rows, device), _stride(rows), turns, phases)


@cache
def _turns(angles: tuple[float, ...], tokens: int, device: torch.device) -> tuple[Tensor, Tensor]:
    """(turns, phases) of triton_levels.py, which layers of one model share."""
    turns = [((round(angle / tau * 2.0**64) + (1 << 63)) % (1 << 64)) - (1 << 63) for angle in angles]
    radians = (np.arange(tokens) - tokens // 2)[:, None] * np.array(angles)
    return _on(np.array(turns, np.int64), device), _on(np.stack([np.cos(radians), np.sin(radians)]), device)


def _stride(rows: Any) -> int:
    return 0 if len(rows) == 1 else int(rows.shape[1])


def _on(numbers: Any, device: torch.device) -> Tensor:
    """As a tensor of its own, whole numbers as int64 and others as float32."""
    kept = np.int64 if numbers.dtype.kind == "i" else np.float32
    return torch.from_numpy(np.array(numbers, kept, order="C")).to(device)


def told_heads(reader: SlabReader) -> int | None:
    """For how many heads a reader with a table has constants; None without a table."""
    if reader.tile is None or reader.tile.table is None or reader.constants is None:
        return None
    return len(reader.constants)
