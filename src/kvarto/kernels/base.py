"""What every kernel takes and gives.

A kernel attends a ragged batch of queries to sets of pages (raw pages, packed pages) that do not overlap, and returns a partial result: the
softmax-weighted mean of the values it saw, and the log of the softmax's denominator. Partials merge exactly, so a kernel may read one set
after another and know one format at a time (`attend_each`), or read all of them in one launch.
Which tokens a query reads, and in which form, kvarto/rule.py says.
"""

from __future__ import annotations

from collections.abc import Callable, Hashable, Sequence
from dataclasses import dataclass
from typing import TYPE_CHECKING, Any, Protocol

from kvarto.jit import torch
from kvarto.layout import PageLayout, SlabLayout
from kvarto.rule import Rule
from kvarto.tile import Tile

if TYPE_CHECKING:
    from torch import Tensor


class SlabReader(Hashable, Protocol):
    """One side of a page as kernels see it: a codec bound to a slab layout. Equal readers read alike."""

    @property
    def name(self) -> str:
        """Of the codec, for tables of what was tuned."""

    @property
    def layout(self) -> SlabLayout:
        """Where the fields lie."""

    def decode(self, slabs: Tensor) -> Tensor:
        """uint8 [..., slab_nbytes] to float32 [..., S, D], the truth."""

    def rotate(self, x: Tensor) -> Tensor:
        """[..., D] into the domain of the tile."""

    def unrotate(self, y: Tensor) -> Tensor:
        """[..., D] out of it."""

    @property
    def numba(self) -> Any | None:
        """The compiled tile reader for the CPU (`kvarto.jit.compile_reader`), or None."""

    @property
    def constants(self) -> Any | None:
        """What `numba` is told of each head besides slabs: numpy float32 [Hkv or 1, C], rows contiguous, or None."""

    @property
    def tile(self) -> Tile | None:
        """The slab as planes and affine terms, for kernels that read tiles, or None."""


@dataclass(frozen=True)
class PageSet:
    """Pages of one format, raw or packed, that a batch reads.

    pages  uint8 [P, page_nbytes], rows contiguous; the storage of the pool
    table  int32 [B, N]: for page j of a sequence its row in `pages`, or -1 if it is not in this set. N may be larger than any sequence needs,
           and tables of two sets may differ in N, but each has a column for every page up to that of the last query; -1 beyond a sequence's
           last page
    raw    which half of the rule this set answers
    """

    pages: Tensor
    table: Tensor
    layout: PageLayout
    k: SlabReader
    v: SlabReader
    raw: bool


@dataclass(frozen=True)
class Queries:
    """A ragged batch of queries, the newest tokens of each sequence, flattened.

    q          float32, bfloat16 or float16 [T, Hq, Dk], any strides; sequence b owns rows start[b] to start[b + 1]
    start      int32 [B + 1]
    position   int32 [B]: the place in its sequence (0-based, padding not counted) of each sequence's first query
    longest    most queries of one sequence, known on the host: a kernel chooses its grid without asking the device. 1 in a decode step, in
               which start is 0 .. B unless a sequence has no query

    A kernel computes as if q were float32. All tensors lie on the device of the pages; a GPU kernel never needs their values on the host.
    """

    q: Tensor
    start: Tensor
    position: Tensor
    longest: int


@dataclass(frozen=True)
class Partial:
    """out float32 [T, Hq, Dv], lse float32 [T, Hq]. A query that saw nothing (nor a learned sink) has lse -inf and out 0."""

    out: Tensor
    lse: Tensor


@dataclass(frozen=True)
class Support:
    """Whether a kernel takes a page set; `reason` says why not. True in a boolean context if it does."""

    reason: str | None = None

    def __bool__(self) -> bool:
        return self.reason is None


class Kernel(Protocol):
    """A way to attend. Stateless; found by `binding.choose_kernel`."""

    @property
    def name(self) -> str:
        """As reported and exported."""

    def supports(self, layout: PageLayout, k: SlabReader, v: SlabReader, device: str) -> Support:
        """Whether `attend` takes pages of this layout, read by these readers, on this device ("cpu", "cuda")."""

    def attend(
        self,
        queries: Queries,
        sets: Sequence[PageSet],
        rule: Rule,
        *,
        scale: float,
        softcap: float | None,
        sinks: Tensor | None = None,
    ) -> Partial:
        """Attend every query to what `rule` lets it read of the sets: one or more, of one geometry, that do not overlap, merged.

        Scores are q.k * scale, then softcap * tanh(score / softcap) if softcap is given. Query head h reads KV head h // R.
        sinks: float [Hq], learned logits, as in `merge`; they are not scaled or capped.
        """


def attend_each(attend: Callable[[PageSet], Partial], sets: Sequence[PageSet], sinks: Tensor | None) -> Partial:
    """`Kernel.attend` of a kernel that reads one set at a time."""
    return merge([attend(pages) for pages in sets], sinks)


def merge(partials: Sequence[Partial], sinks: Tensor | None = None) -> Partial:
    """Combine partials over disjoint tokens: exact up to float32 rounding.

    sinks: float32 [Hq], a learned logit per head that takes part in the softmax but has no value (gpt-oss); None if the model has none.
    A query that saw nothing anywhere gives out 0.
    """
    if len(partials) == 1 and sinks is None:
        return partials[0]
    lses = [partial.lse for partial in partials]
    if sinks is not None:
        lses.append(sinks.float().expand_as(lses[0]))
    stacked = torch.stack(lses)
    total = torch.logsumexp(stacked, dim=0)
    weights = torch.exp(stacked - torch.where(total == -torch.inf, 0.0, total))
    out = torch.zeros_like(partials[0].out)
    for partial, weight in zip(partials, weights, strict=False):
        out = out + partial.out * weight.unsqueeze(-1)
    return Partial(out, total)
