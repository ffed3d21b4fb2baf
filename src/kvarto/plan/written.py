"""A format of any engine as a planner sees it: what a part of a layer costs for a sequence of some length. No torch."""

from __future__ import annotations

from abc import ABC, abstractmethod
from collections import Counter
from dataclasses import dataclass
from fractions import Fraction
from functools import lru_cache

from kvarto.plan.cached import FAR_TOKENS, CachedModel, Part, State


class Writer(ABC):
    """How the parts of one layer are written. Hashable."""

    @abstractmethod
    def nbytes(self, part: Part, tokens: int) -> int:
        """Memory that a sequence of so many tokens takes for one part on one rank, pages rounded up."""

    def peak_nbytes(self, part: Part, tokens: int) -> int:
        """What must be there for the sequence to come so far, if that is more."""
        return self.nbytes(part, tokens)

    @abstractmethod
    def growth(self, part: Part) -> Fraction:
        """Bytes that a further token adds to that, far beyond every window."""

    @abstractmethod
    def read_nbytes(self, part: Part, tokens: int) -> Fraction:
        """Bytes that a decode step must read of it, without rounding: a lower bound."""


class KvFormat(ABC):
    """A format under a name. `name` is unique over all engines: ours have none in front, others as in vllm:fp8_e4m3.

    engine      whose it is
    page_tokens tokens of a page
    is_raw      16 bits, without a codec
    windows_kept  whether what left a sliding window is freed
    boundary_layers  how many layers at each end stay in 16 bits
    """

    name: str
    engine: str
    page_tokens: int
    windows_kept: bool = True
    boundary_layers: int = 0
    is_raw: bool = False
    needs: str = ""
    source: str = ""
    flag: str = ""
    measured: tuple[str, ...] = ()

    @abstractmethod
    def refuses(self, model: CachedModel) -> str | None:
        """Why the format cannot keep this model, or None."""

    @abstractmethod
    def writers(self, model: CachedModel) -> list[Writer]:
        """Who writes each layer. Only for models that are not refused."""

    def refuses_gpu(self, sm: int) -> str | None:
        """Why it does not run on a GPU of this compute capability (90 is 9.0), or None."""
        return None


@dataclass(frozen=True)
class Bytes:
    """A model in a format: how often each part is written by each writer, on one rank and stage."""

    counts: tuple[tuple[Writer, Part, int], ...]

    def sequence(self, tokens: int) -> int:
        """Memory of a sequence of so many tokens."""
        return sum(count * writer.nbytes(part, tokens) for writer, part, count in self.counts)

    def peak(self, tokens: int) -> int:
        """What must be there for a sequence to come so far."""
        return sum(count * writer.peak_nbytes(part, tokens) for writer, part, count in self.counts)

    @property
    def growth(self) -> Fraction:
        """Bytes a token, far beyond every window."""
        return sum((count * writer.growth(part) for writer, part, count in self.counts), Fraction(0))

    @property
    def constant(self) -> int:
        """What a long sequence has beside that: windows, states, sinks, the open page. May be negative where a cheap page stands for raw ones."""
        return int(self.sequence(FAR_TOKENS) - self.growth * FAR_TOKENS)

    def read(self, tokens: int) -> Fraction:
        """What a decode step reads of a sequence."""
        return sum((count * writer.read_nbytes(part, tokens) for writer, part, count in self.counts), Fraction(0))

    def attention_reads(self, tokens: int) -> list[tuple[Fraction, int]]:
        """(Bytes read by one layer's part, how many such there are), states left out: for kernels that were measured."""
        return [
            (writer.read_nbytes(part, tokens), count)
            for writer, part, count in self.counts
            if not isinstance(part, State)
        ]


@lru_cache(maxsize=4096)
def bytes_of(kv: KvFormat, model: CachedModel, tp: int = 1, start: int = 0, end: int | None = None) -> Bytes:
    """The layers `start` to `end` of a model in a format, as one of `tp` ranks holds them."""
    ranked = model.rank(tp).layers[start:end]
    counted = Counter(
        (writer, part)
        for writer, layer in zip(kv.writers(model)[start:end], ranked, strict=True)
        for part in layer
    )  # fmt: skip
    return Bytes(tuple((writer, part, count) for (writer, part), count in counted.items()))
