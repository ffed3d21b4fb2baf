"""Codecs and kernels meet here: a codec bound to a slab layout is what a kernel reads, and the kernel is chosen by what it supports."""

from __future__ import annotations

from collections.abc import Callable
from dataclasses import dataclass
from functools import cache, cached_property
from typing import TYPE_CHECKING, Any

from kvarto.codecs import Codec
from kvarto.errors import BackendUnavailable, UnknownName
from kvarto.jit import compile_reader
from kvarto.kernels import numba_seal, triton_seal
from kvarto.kernels.base import Kernel, SlabReader
from kvarto.kernels.numba import NumbaKernel
from kvarto.kernels.reference import ReferenceKernel
from kvarto.kernels.triton import TritonKernel
from kvarto.layout import PageLayout, SlabLayout
from kvarto.tile import Tile

if TYPE_CHECKING:
    from torch import Tensor

KERNELS: tuple[type[Kernel], ...] = (NumbaKernel, TritonKernel, ReferenceKernel)
"""In the order of preference."""

SEALERS = {"cuda": triton_seal, "cpu": numba_seal}
"""By device: modules with `supports` and `seal_pages`."""


@dataclass(frozen=True)
class BoundCodec:
    """A codec bound to a slab layout: what kernels know as a SlabReader."""

    codec: Codec
    layout: SlabLayout

    @property
    def name(self) -> str:
        """Of the codec."""
        return self.codec.name

    def encode(self, x: Tensor, first: Tensor | None = None) -> Tensor:
        """See `Codec.encode`, or with places `Codec.encode_at`."""
        return self.codec.encode(x, self.layout) if first is None else self.codec.encode_at(x, self.layout, first)

    def decode(self, slabs: Tensor) -> Tensor:
        """See `Codec.decode`."""
        return self.codec.decode(slabs, self.layout)

    def rotate(self, x: Tensor) -> Tensor:
        """See `Codec.rotate`."""
        return self.codec.rotate(x, self.layout.side)

    def unrotate(self, y: Tensor) -> Tensor:
        """See `Codec.unrotate`."""
        return self.codec.unrotate(y, self.layout.side)

    def saturated(self, x: Tensor, first: Tensor | None = None) -> int:
        """See `Codec.saturated`, or with places `Codec.saturated_at`."""
        side = self.layout.side
        return self.codec.saturated(x, side) if first is None else self.codec.saturated_at(x, side, first)

    def fitted(self, x: Tensor) -> BoundCodec:
        """See `Codec.fitted`."""
        return BoundCodec(self.codec.fitted(x, self.layout.side), self.layout)

    @property
    def numba(self) -> Any | None:
        """The compiled tile reader, or None if the codec has none. Compiled once in a process."""
        told = self.constants
        return _compiled_reader(self.codec.as_read, self.layout, 0 if told is None else told.shape[1])

    @cached_property
    def constants(self) -> Any | None:
        """See `Codec.constants`."""
        return self.codec.constants(self.layout)

    @cached_property
    def tile(self) -> Tile | None:
        """See `Codec.tile`."""
        return self.codec.tile(self.layout)


@cache
def _compiled_reader(codec: Codec, layout: SlabLayout, constants: int) -> Any | None:
    reader = codec.numba_reader(layout)
    return None if reader is None else compile_reader(reader, layout, constants)


def choose_kernel(wanted: str | None, layout: PageLayout, k: SlabReader, v: SlabReader, device: str) -> Kernel:
    """The kernel called `wanted`, or the first of KERNELS that supports the pages.

    Raises UnknownName, or BackendUnavailable with the reason when the wanted one does not support them.
    """
    if wanted is None:
        return next(kernel for kind in KERNELS if (kernel := kind()).supports(layout, k, v, device))
    named = {kernel.name: kernel for kernel in (kind() for kind in KERNELS)}
    if wanted not in named:
        raise UnknownName("kernel", wanted, named)
    support = named[wanted].supports(layout, k, v, device)
    if not support:
        raise BackendUnavailable(
            f"kernel {wanted}", str(support.reason), "leave the kernel unnamed to get one that supports it"
        )
    return named[wanted]


Sealer = Callable[["Tensor", "Tensor", "Tensor", "Tensor", "Tensor | None"], None]
"""(raw_pages, raw_ids, sealed_pages, sealed_ids, saturated) as in `kernels.triton_seal.seal_pages`."""


def choose_sealer(
    raw_layout: PageLayout, layout: PageLayout, k: BoundCodec, v: BoundCodec, device: str
) -> Sealer | None:
    """What seals pages in one call, with the bytes of `encode`, or None: then they go through `encode`, a torch operation at a time."""
    sealings = k.codec.sealing(layout.k), v.codec.sealing(layout.v)
    kernel = SEALERS.get(device)
    if kernel is None or not kernel.supports(raw_layout, layout, *sealings, device):
        return None

    def seal(
        raw_pages: Tensor, raw_ids: Tensor, sealed_pages: Tensor, sealed_ids: Tensor, saturated: Tensor | None
    ) -> None:
        assert sealings[0] is not None and sealings[1] is not None, "seal without supports"  # noqa: PT018
        kernel.seal_pages(
            raw_pages, raw_layout, raw_ids, sealed_pages, layout, sealed_ids, sealings[0], sealings[1], saturated
        )

    return seal
