"""The books of a layer as tensors on its device, kept in step without ever waiting for it.

While no page fills, a decode step sends nothing: tables are as they were, and a cursor already knows the next places. What changes is sent
through pinned memory, which torch keeps until the copy has happened.
"""

from __future__ import annotations

from collections.abc import Sequence
from typing import TYPE_CHECKING, Any

import numpy as np

from kvarto.jit import torch

if TYPE_CHECKING:
    from torch import Tensor

_SMALLEST_WIDTH = 16
# Of an array in a parcel, in bytes.
_ALIGNMENT = 16


def send(array: Any, device: torch.device) -> Tensor:
    """A numpy array as a tensor on `device`. On the CPU it is the same memory, so the array must not change afterwards."""
    tensor = torch.from_numpy(array)
    return tensor.pin_memory().to(device, non_blocking=True) if device.type == "cuda" else tensor.to(device)


class Parcel:
    """Arrays that go to a device together, in one copy. `tensors` are they there, in order, at addresses that stay."""

    def __init__(self, arrays: Sequence[Any], device: torch.device) -> None:
        self._pinned = device.type == "cuda"
        self._arrays, self._ends = [(array.dtype, array.shape) for array in arrays], [0]
        for array in arrays:
            self._ends.append(-(-(self._ends[-1] + array.nbytes) // _ALIGNMENT) * _ALIGNMENT)
        self._bytes = self._pack(arrays).to(device, non_blocking=True)
        self.tensors = [
            self._bytes[first : first + array.nbytes].view(_torch_dtype(array)).view(array.shape)
            for array, first in zip(arrays, self._ends, strict=False)
        ]

    def refill(self, arrays: Sequence[Any]) -> None:
        """Others of the same dtypes and shapes take their place."""
        assert [(array.dtype, array.shape) for array in arrays] == self._arrays, "another parcel"
        self._bytes.copy_(self._pack(arrays), non_blocking=True)

    def _pack(self, arrays: Sequence[Any]) -> Tensor:
        packed = torch.empty(self._ends[-1], dtype=torch.uint8, pin_memory=self._pinned)
        view = packed.numpy()
        for array, first in zip(arrays, self._ends, strict=False):
            view[first : first + array.nbytes] = np.ascontiguousarray(array).view(np.uint8).reshape(-1)
        return packed


def _torch_dtype(array: Any) -> torch.dtype:
    dtype: torch.dtype = getattr(torch, array.dtype.name)
    return dtype


class PageTable:
    """For each sequence and page the page's id in a store, or -1 if it is not there: int32 [B, N].

    N is a power of two and only grows, so that shapes, and on a GPU addresses, seldom change. On the CPU `tensor` is the books' own copy; for
    other devices changes are gathered, and sent together when the tensor is asked for.
    """

    def __init__(self, device: torch.device) -> None:
        self._device, self._shared = device, device.type == "cpu"
        self._ids = np.empty((0, _SMALLEST_WIDTH), np.int32)
        self._tensor: Tensor | None = None
        self._changed: dict[int, int] = {}

    def reset(self, sequences: int) -> None:
        """`sequences` sequences without pages."""
        self._replace(np.full((sequences, self._ids.shape[1]), -1, np.int32))

    def select(self, rows: Sequence[int]) -> None:
        """Sequence i has the pages that sequence rows[i] had."""
        self._replace(self._ids[np.asarray(rows, np.intp)])

    def set(self, row: int, page: int, page_id: int) -> None:
        """Page `page` of sequence `row` is `page_id`, or gone: -1."""
        if page >= self._ids.shape[1]:
            wider = np.full((len(self._ids), 1 << page.bit_length()), -1, np.int32)
            wider[:, : self._ids.shape[1]] = self._ids
            self._replace(wider)
        self._ids[row, page] = page_id
        if self._tensor is not None and not self._shared:
            self._changed[row * self._ids.shape[1] + page] = page_id

    @property
    def tensor(self) -> Tensor:
        """int32 [B, N] on the device; valid until the next change."""
        if self._tensor is None:
            # A copy for other devices, because the books may change before it is sent.
            self._tensor = send(self._ids if self._shared else self._ids.copy(), self._device)
        elif self._changed:
            changes = send(np.array([[*self._changed], [*self._changed.values()]], np.int64), self._device)
            self._tensor.view(-1)[changes[0]] = changes[1].int()
            self._changed = {}
        return self._tensor

    def _replace(self, ids: Any) -> None:
        self._ids, self._tensor, self._changed = ids, None, {}


class Cursor:
    """Where each sequence writes its next token while all are given one token at a time.

    It is placed for all steps until a page fills, so that a step only takes the next of its tensors. `room`: how many steps those are.
    """

    def __init__(self, page_tokens: int, device: torch.device) -> None:
        self._page_tokens, self._device = page_tokens, device
        self._pages: Tensor
        self._ahead: list[tuple[Tensor, Tensor]] = []

    @property
    def room(self) -> int:
        """Tokens that each sequence can still be given before the cursor must be placed anew."""
        return len(self._ahead)

    def place(self, pages: Sequence[int], lengths: Sequence[int]) -> None:
        """Sequence b has lengths[b] tokens and writes the next ones into raw page pages[b], which is its own."""
        steps = self._page_tokens - max(length % self._page_tokens for length in lengths)
        positions = np.arange(steps)[::-1, None] + np.array(lengths, np.int64)
        places = send(np.concatenate([[pages], positions % self._page_tokens, positions]), self._device)
        self._pages, *slots = places[: 1 + steps].unbind()
        self._ahead = list(zip(slots, places[1 + steps :].int().unbind(), strict=True))

    @property
    def next(self) -> tuple[Tensor, Tensor, Tensor]:
        """Raw pages int64 [B], slots int64 [B], and each token's place in its sequence, int32 [B]."""
        return (self._pages, *self._ahead[-1])

    def move(self) -> None:
        """Every sequence was given its token."""
        self._ahead.pop()

    def lose(self) -> None:
        """Pages or lengths changed in another way."""
        self._ahead = []
