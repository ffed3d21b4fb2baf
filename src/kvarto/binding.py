"""Codecs and kernels meet here: a codec bound to a slab layout is what a kernel reads, and the kernel is chosen by what it supports."""

from __future__ import annotations

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
from kvarto.sealing import Sealing
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


@dataclass(frozen=True)
class Sealer:
    """Seals pages in one call, with the bytes of `encode`: plain data, so that a layer that has one can be copied and pickled."""

    device: str
    raw_layout: PageLayout
    layout: PageLayout
    k: Sealing
    v: Sealing

    def __call__(
        self, raw_pages: Tensor, raw_ids: Tensor, sealed_pages: Tensor, sealed_ids: Tensor, saturated: Tensor | None
    ) -> None:
        """See `kernels.triton_seal.seal_pages`."""
        SEALERS[self.device].seal_pages(
            raw_pages, self.raw_layout, raw_ids, sealed_pages, self.layout, sealed_ids, self.k, self.v, saturated
        )


def choose_sealer(
    raw_layout: PageLayout, layout: PageLayout, k: BoundCodec, v: BoundCodec, device: str
) -> Sealer | None:
    """What seals pages in one call, or None: then they go through `encode`, a torch operation at a time."""
    kernel, k_sealing, v_sealing = SEALERS.get(device), k.codec.sealing(layout.k), v.codec.sealing(layout.v)
    if kernel is None or not kernel.supports(raw_layout, layout, k_sealing, v_sealing, device):
        return None
    assert k_sealing is not None and v_sealing is not None, "supported without sealings"  # noqa: PT018
    return Sealer(device, raw_layout, layout, k_sealing, v_sealing)
