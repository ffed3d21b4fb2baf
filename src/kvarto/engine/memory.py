"""The engine's memory: one stretch of bytes under one budget, and what each layer of each offered policy sees of it.

A block holds the pages of all layers of a group one after another. So page tables are shared by the layers of a group, and layer i looks at the same
addresses i pages further on. Behind the arena lies the scratch (holding.py), for raw pages that live for a layer's part of a step.
"""

from __future__ import annotations

import bisect
from collections import Counter
from collections.abc import Callable, Sequence
from dataclasses import dataclass
from typing import TYPE_CHECKING

from kvarto.cache.arena import UNIT_BYTES, Arena
from kvarto.cache.prefix import PrefixCache
from kvarto.engine.holding import Group, Holding, Scratch
from kvarto.engine.plan import Shape, StepPlan
from kvarto.engine.request import Request
from kvarto.engine.scheduler import Work
from kvarto.formats import Format, Policy, raw_format
from kvarto.jit import torch
from kvarto.layer_pages import LayerPages, LayerSpec
from kvarto.rule import Rule

if TYPE_CHECKING:
    from torch import Tensor


Kind = tuple[int, ...]
"""What a block holds: the bytes of a page of each layer of its group."""

# Sliding windows alone never fill a memory.
ENDLESS = 1 << 40


@dataclass(frozen=True)
class Compute:
    """What the model computes in and where; `kernel` names the attention kernel, None is the best."""

    dtype: torch.dtype
    device: torch.device
    kernel: str | None = None

    @property
    def raw_format(self) -> Format:
        """Of raw pages. Raises Unsupported."""
        return raw_format(str(self.dtype).removeprefix("torch."))


@dataclass(frozen=True)
class Layer:
    """A layer under a policy: what is done with its pages, the number of its group, and its bytes: views whose rows are addresses."""

    pages: LayerPages
    group: int
    raw: Tensor
    raw_numbers: tuple[Tensor, Tensor]
    sealed: Tensor


@dataclass(frozen=True)
class Offer:
    """A policy that the engine offers: groups for the books, layers for the model."""

    policy: Policy
    groups: list[Group]
    layers: list[Layer]

    @property
    def kernel_names(self) -> str:
        """The kernels really used, for packed pages and for raw ones: one name when all agree."""
        names = {kernel.name for layer in self.layers for kernel in (layer.pages.kernel, layer.pages.raw_kernel)}
        return ", ".join(sorted(names))

    @property
    def saturated_elements(self) -> int:
        """Numbers that were beyond their codec's range when their page was sealed, ever. Waits for the device."""
        return int(sum(layer.pages.saturated for layer in self.layers))

    @property
    def bits_per_number(self) -> float:
        """Bits that a cached number costs in sealed pages, on average over all layers."""
        layouts = [layer.pages.layout for layer in self.layers]
        numbers = sum(layout.geometry.elements_per_token for layout in layouts)
        return 8 * sum(layout.bytes_per_token for layout in layouts) / numbers


class Memory:
    """Storage of `budget_bytes` at most (and a little for the scratch) for the layers of a model under some policies.

    Raises UsageError if the budget is too small, and whatever LayerPages raises.
    """

    def __init__(
        self, specs: Sequence[LayerSpec], policies: Sequence[Policy], compute: Compute, *,
        budget_bytes: int, step_tokens: int, poison: bool = False,
    ) -> None:  # fmt: skip
        self.step_tokens, self.page_tokens = step_tokens, specs[0].geometry.page_tokens
        plans = [_Plan(specs, policy, compute) for policy in policies]
        kinds: list[Kind] = []
        for plan in plans:
            plan.choose_kinds(kinds)
        self.arena = Arena(budget_bytes, [sum(pages) for pages in kinds])
        self.prefixes = PrefixCache(self.arena, move=self._move, freed=self._poison if poison else _ignore)
        scratch_pages = step_tokens // self.page_tokens
        scratch = max(
            (scratch_pages + len(group)) * group[0].raw_layout.nbytes
            for plan in plans
            for group in plan.groups.values()
        )
        self._bytes = torch.empty(self.arena.nbytes + scratch, dtype=torch.uint8, device=compute.device)
        if poison:
            self._bytes.fill_(0xFF)  # NaN in every float
        self.offers = [plan.offer(self._view) for plan in plans]
        page_units = {
            kind: pages[0] // UNIT_BYTES for kind, pages in enumerate(kinds)
        }  # raw pages of a group are alike
        self._sealed: Counter[tuple[int, int]] = Counter()  # blocks, by policy and group
        self.scratch = Scratch(self.arena.nbytes // UNIT_BYTES, page_units, scratch_pages)

    def begin(self, request: Request, *, keep: bool = True) -> Holding:
        """Open the books of a request. Prefixes are shared by policy and by the request's own identity; `keep`: they should outlive it."""
        groups = self.offers[request.policy].groups
        return Holding(self.prefixes, (request.policy, request.identity), groups, keep=keep)

    def plan(
        self, works: Sequence[Work], *, shape: Shape | None = None, wanted: Sequence[int] | None = None
    ) -> StepPlan:  # fmt: skip
        """A step of works whose blocks are reserved; see `StepPlan`. The next plan takes its scratch."""
        return StepPlan(works, [offer.groups for offer in self.offers], self.scratch, shape=shape, wanted=wanted)

    def count_sealed(self, plan: StepPlan) -> None:
        """The step of this plan is over."""
        for part in plan.parts:
            for number, group in enumerate(part.groups):
                self._sealed[part.policy, number] += group.sealed

    def sealed(self, policy: int) -> tuple[int, int]:
        """(Pages sealed under a policy, each of one layer; numbers in them), ever."""
        pages = numbers = 0
        for layer in self.offers[policy].layers:
            count, geometry = self._sealed[policy, layer.group], layer.pages.spec.geometry
            pages += count
            numbers += count * geometry.elements_per_token * geometry.page_tokens
        return pages, numbers

    def why_not(self, request: Request) -> str | None:
        """Why a request could never run to its end, or None."""
        counts = self._blocks(request.policy, request.most_tokens, 1)
        if self.arena.fits(counts):
            return None
        return f"{request.most_tokens} tokens need {self._bytes_of(counts)} bytes of cache, of {self.arena.nbytes}"

    def has_room(self, request: Request) -> bool:
        """It could run to its end beside what is held now, as far as bytes say."""
        needed = self._bytes_of(self._blocks(request.policy, request.most_tokens, 1))
        return needed <= self.arena.nbytes - self.prefixes.held_bytes

    def capacity_tokens(self, policy: int, sequences: int = 1) -> int:
        """How many tokens each of so many sequences under a policy can have, if nothing else is in memory; ENDLESS - 1 if of any length."""
        least, beyond = 0, 1
        while beyond < ENDLESS and self.arena.fits(self._blocks(policy, beyond, sequences)):
            least, beyond = beyond, 2 * beyond
        return bisect.bisect_left(
            range(beyond), True, least + 1, key=lambda tokens: not self.arena.fits(self._blocks(policy, tokens, sequences))
        ) - 1  # fmt: skip

    def _blocks(self, policy: int, tokens: int, sequences: int) -> dict[int, int]:
        """The most blocks of each kind that sequences of so many tokens each hold."""
        counts: dict[int, int] = {}
        for group in self.offers[policy].groups:
            counts |= group.most_blocks(tokens, self.step_tokens, sequences)
        return counts

    def _bytes_of(self, counts: dict[int, int]) -> int:
        return sum(count * self.arena.block_bytes(kind) for kind, count in counts.items())

    def _view(self, offset: int, nbytes: int) -> Tensor:
        """uint8 [addresses, nbytes]: the bytes from `offset` behind each address on."""
        rows = (len(self._bytes) - offset - nbytes) // UNIT_BYTES + 1
        return self._bytes.as_strided((rows, nbytes), (UNIT_BYTES, 1), offset)

    def read(self, kind: int, block: int) -> Tensor:
        """uint8 [block bytes]: a block where it lies."""
        first = block * UNIT_BYTES
        return self._bytes[first : first + self.arena.block_bytes(kind)]

    def write(self, kind: int, block: int, data: Tensor) -> None:
        """The pages of a block, uint8, from anywhere; what the block has behind them stays."""
        self.read(kind, block)[: len(data)].copy_(data)

    def _move(self, kind: int, moves: list[tuple[int, int]]) -> None:
        for source, target in moves:
            self.write(kind, target, self.read(kind, source))

    def _poison(self, kind: int, blocks: list[int]) -> None:
        """What must not be read any more is made NaN: for tests."""
        for block in blocks:
            self.read(kind, block).fill_(0xFF)


def _ignore(_kind: int, _blocks: list[int]) -> None:
    """Freed blocks keep their bytes."""


class _Plan:
    """The layers of a policy before there is memory, in groups of equal geometry and rule: pages that come and go together, whatever their codecs."""

    def __init__(self, specs: Sequence[LayerSpec], policy: Policy, compute: Compute) -> None:
        self._policy, self._kinds = policy, list[tuple[int, int]]()
        raw = compute.raw_format
        formats = [policy.for_layer(i, len(specs), raw) for i in range(len(specs))]
        self._layers = [
            LayerPages(spec, chosen, raw, dtype=compute.dtype, device=compute.device, kernel=compute.kernel)
            for spec, chosen in zip(specs, formats, strict=True)
        ]
        self.groups: dict[tuple[LayerSpec, Rule], list[LayerPages]] = {}
        for layer in self._layers:
            self.groups.setdefault((layer.spec, layer.rule), []).append(layer)

    def choose_kinds(self, kinds: list[Kind]) -> None:
        """A kind for the raw and for the sealed blocks of each group; what another policy has already will do."""
        mine: set[int] = set()
        for group in self.groups.values():
            raw = self._kind(tuple(pages.raw_layout.nbytes for pages in group), kinds, mine)
            sealed = self._kind(tuple(pages.layout.nbytes for pages in group), kinds, mine)
            self._kinds.append((raw, sealed))

    @staticmethod
    def _kind(wanted: Kind, kinds: list[Kind], mine: set[int]) -> int:
        kind = next((kind for kind, other in enumerate(kinds) if other == wanted and kind not in mine), len(kinds))
        if kind == len(kinds):
            kinds.append(wanted)
        mine.add(kind)
        return kind

    def offer(self, view: Callable[[int, int], Tensor]) -> Offer:
        """With views of the memory."""
        numbers = {key: number for number, key in enumerate(self.groups)}
        ends = dict.fromkeys(self.groups, (0, 0))  # of the raw and of the sealed pages of a group so far
        layers = []
        for pages in self._layers:
            key = (pages.spec, pages.rule)
            raw_at, sealed_at = ends[key]
            raw, sealed = view(raw_at, pages.raw_layout.nbytes), view(sealed_at, pages.layout.nbytes)
            ends[key] = (raw_at + pages.raw_layout.nbytes, sealed_at + pages.layout.nbytes)
            layers.append(Layer(pages, numbers[key], raw, pages.raw_views(raw), sealed))
        groups = [
            Group(group[0].rule, raw, sealed)
            for group, (raw, sealed) in zip(self.groups.values(), self._kinds, strict=True)
        ]
        return Offer(self._policy, groups, layers)
