"""A step as the model's layers see it: each layer stores, seals and attends by its plan (plan.py), which is on the device in one piece."""

from __future__ import annotations

from typing import TYPE_CHECKING

from kvarto.cache.tables import Parcel
from kvarto.engine.memory import Layer, Memory
from kvarto.engine.plan import GroupPlan, StepPlan
from kvarto.jit import torch
from kvarto.kernels.base import Queries

if TYPE_CHECKING:
    from torch import Tensor


class Step:
    """`plan`, sent to the device.

    aside   a stream for sealing beside attention, where that is not waited for: a page that fills with the token of a decode step is read raw by
            that token, and packed only from the next step on
    """

    def __init__(self, memory: Memory, plan: StepPlan, device: torch.device, aside: torch.cuda.Stream | None = None) -> None:  # fmt: skip
        self.plan, self._memory, self._aside = plan, memory, aside
        self._parcel = Parcel(plan.arrays, device)
        self._largest: Tensor | None = None

    def refill(self, plan: StepPlan) -> None:
        """Another step of the same shape, at the same addresses."""
        self.plan = plan
        self._parcel.refill(plan.arrays)

    def _sent(self, number: int) -> Tensor:
        return self._parcel.tensors[number]

    @property
    def tokens(self) -> Tensor:
        """int64 [T]."""
        return self._sent(self.plan.tokens)

    @property
    def positions(self) -> Tensor:
        """int64 [T]: the place of each token in its sequence."""
        return self._sent(self.plan.positions)

    @property
    def wanted(self) -> Tensor:
        """See `StepPlan.wanted`."""
        return self._sent(self.plan.wanted)

    def attend(
        self, layer: int, q: Tensor, k: Tensor, v: Tensor, *, scale: float, softcap: float | None = None, sinks: Tensor | None = None
    ) -> Tensor:  # fmt: skip
        """Store and seal k [tokens, Hkv, Dk] and v [tokens, Hkv, Dv] of a layer, and attend: q [tokens, Hq, Dk] to [tokens, Hq, Dv], in q's dtype."""
        self.store(layer, k, v)
        outs = []
        for part in self.plan.parts:
            own = self._memory.offers[part.policy].layers[layer]
            places = part.groups[own.group]
            queries = Queries(q[part.tokens], self._sent(part.start), self._sent(part.position), part.longest)
            packed = None if places.packed_table is None else (own.sealed, self._sent(places.packed_table))
            raw = own.raw, self._sent(places.raw_table)
            outs.append(own.pages.attend_pages(queries, raw, packed, scale=scale, softcap=softcap, sinks=sinks).out)
        return (outs[0] if len(outs) == 1 else torch.cat(outs)).to(q.dtype)

    def store(self, layer: int, k: Tensor, v: Tensor) -> None:
        """The part of `attend` that needs no queries."""
        k, v = self._finite(k), self._finite(v)
        for part in self.plan.parts:
            own = self._memory.offers[part.policy].layers[layer]
            places, at = part.groups[own.group], part.tokens
            own.pages.store(own.raw_numbers, k[at], v[at], self._sent(places.pages), self._sent(places.slots))
            self._seal(own, places, beside=part.longest == 1)

    def _seal(self, own: Layer, places: GroupPlan, *, beside: bool) -> None:
        if places.seal is None:
            return
        raw_ids, sealed_ids, first = self._sent(places.seal)
        if self._aside is None or not beside:
            own.pages.seal(own.raw, own.raw_numbers, raw_ids, own.sealed, sealed_ids, first)
            return
        self._aside.wait_stream(torch.cuda.current_stream())
        with torch.cuda.stream(self._aside):
            own.pages.seal(own.raw, own.raw_numbers, raw_ids, own.sealed, sealed_ids, first)

    def begin(self) -> None:
        """The first layer comes next."""
        self._largest = None

    def finish(self) -> Tensor | None:
        """All layers have attended, and what comes next on this stream finds the pages sealed.

        Returns the largest magnitude of each token's keys and values, float32 [T], in which NaN and infinity stay; None if all were finite.
        """
        if self._aside is not None:
            torch.cuda.current_stream().wait_stream(self._aside)
        return self._largest

    def _finite(self, x: Tensor) -> Tensor:
        """Note whose numbers are not finite; they become 0, so that one sequence's NaN ends no other. A GPU is not waited for, and notes only."""
        if x.device.type == "cpu":
            lowest, highest = torch.aminmax(x)
            if bool(torch.isfinite(highest - lowest)):
                return x
        largest = torch.linalg.vector_norm(x.flatten(1), torch.inf, dim=1, dtype=torch.float32)
        self._largest = largest if self._largest is None else torch.maximum(self._largest, largest)
        return torch.where(torch.isfinite(x), x, 0.0) if x.device.type == "cpu" else x
