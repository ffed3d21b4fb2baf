"""What every kernel takes and gives.

A kernel attends a ragged batch of queries to one set of pages and returns a partial result: the softmax-weighted mean of the values it saw,
and the log of the softmax's denominator. Partials of different page sets (packed pages, raw pages) merge exactly, so a kernel never has to
know more than one format at a time.

**The rule** (path invariance): a query in page p reads page j
    raw      if j is a sink page (j < sink_pages), or a recent one (p - window_pages <= j <= p; its own page always is),
    packed   otherwise (then j < p, so the page is sealed),
never a token after its own, nor one that the model's sliding window hides. The rule depends on positions alone, never on how the tokens arrived.
"""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass
from typing import TYPE_CHECKING, Any, Protocol

from kvarto.jit import torch
from kvarto.layout import PageLayout, SlabLayout

if TYPE_CHECKING:
    from torch import Tensor


class SlabReader(Protocol):
    """One side of a page as kernels see it: a codec bound to a slab layout."""

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


@dataclass(frozen=True)
class Rule:
    """Which tokens a query reads, and in which form (module docstring). `sliding_tokens`: it reads only the last so many, itself included."""

    page_tokens: int
    sink_pages: int = 0
    window_pages: int = 0
    sliding_tokens: int | None = None

    def reads_raw(self, page: int, query_page: int) -> bool:
        """True if a query in `query_page` reads `page` raw."""
        return page < self.sink_pages or page >= query_page - self.window_pages


@dataclass(frozen=True)
class PageSet:
    """Pages of one format, raw or packed, that a batch reads.

    pages  uint8 [P, page_nbytes], rows contiguous; the storage of the pool
    table  int32 [B, N]: for page j of a sequence its row in `pages`, or -1 if it is not in this set
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

    q          float32 [T, Hq, Dk]; sequence b owns rows start[b] to start[b + 1]
    start      int32 [B + 1]
    position   int32 [B]: the place in its sequence (0-based, padding not counted) of each sequence's first query
    """

    q: Tensor
    start: Tensor
    position: Tensor


@dataclass(frozen=True)
class Partial:
    """out float32 [T, Hq, Dv], lse float32 [T, Hq]. A query that saw nothing has lse -inf and out 0."""

    out: Tensor
    lse: Tensor


@dataclass(frozen=True)
class Support:
    """Whether a kernel takes a page set; `reason` says why not. True in a boolean context if it does."""

    reason: str | None = None

    def __bool__(self) -> bool:
        return self.reason is None


class Kernel(Protocol):
    """A way to attend. Stateless; found by `attention.choose_kernel`."""

    @property
    def name(self) -> str:
        """As reported and exported."""

    def supports(self, layout: PageLayout, k: SlabReader, v: SlabReader, device: str) -> Support:
        """Whether `attend` takes pages of this layout, read by these readers, on this device ("cpu", "cuda")."""

    def attend(self, queries: Queries, pages: PageSet, rule: Rule, *, scale: float, softcap: float | None) -> Partial:
        """Attend every query to what `rule` lets it read of `pages`.

        Scores are q.k * scale, then softcap * tanh(score / softcap) if softcap is given. Query head h reads KV head h // R.
        """


def merge(partials: Sequence[Partial], sinks: Tensor | None = None) -> Partial:
    """Combine partials over disjoint tokens: exact up to float32 rounding.

    sinks: float32 [Hq], a learned logit per head that takes part in the softmax but has no value (gpt-oss); None if the model has none.
    A query that saw nothing anywhere gives out 0.
    """
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
