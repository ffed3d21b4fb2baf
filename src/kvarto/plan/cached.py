"""What a model keeps of a sequence, layer by layer: the terms in which all formats of all engines are counted. Plain integers, no torch.

A layer holds parts. Most hold one `KeyValue`; a layer without any (a no-op of an architecture search, one that shares another's cache) holds none.

    KeyValue   K and V of Hkv heads, of all tokens or of the last `window_tokens`
    Latent     one vector that stands for K and V of all heads (MLA), of every `ratio` tokens; the same on every tensor-parallel rank
    IndexKey   one key by which sparse attention chooses tokens (DSA); the same on every rank
    State      a recurrent state: bytes that do not grow and that no format makes smaller
"""

from __future__ import annotations

from collections import Counter
from collections.abc import Iterator, Sequence
from dataclasses import dataclass, replace

from kvarto.errors import UsageError

FAR_TOKENS = 1 << 22
"""A context beyond every window, and a multiple of every page size and ratio: what is constant there is constant."""


@dataclass(frozen=True)
class KeyValue:
    """`heads` = Hkv, `k_dim` = Dk, `v_dim` = Dv. `window_tokens`: of a sliding window, or, if `chunked`, of the chunk that attention stays in.

    read_entries  the most that one decode step reads, where attention is sparse
    """

    heads: int
    k_dim: int
    v_dim: int
    window_tokens: int | None = None
    chunked: bool = False
    read_entries: int | None = None

    def rank(self, tp: int) -> KeyValue:
        """What one of `tp` ranks holds: heads are spread, and where there are fewer of them than ranks each is held several times."""
        return replace(self, heads=max(1, -(-self.heads // tp)))


@dataclass(frozen=True)
class Latent:
    """A vector of `dim` numbers, the last `rope_dim` of them rotary, for each `ratio` tokens.

    `window_tokens`: only of the last ones; `read_entries` as above.
    """

    dim: int
    rope_dim: int = 0
    ratio: int = 1
    window_tokens: int | None = None
    read_entries: int | None = None

    def rank(self, tp: int) -> Latent:
        """Replicated."""
        return self


@dataclass(frozen=True)
class IndexKey:
    """A key of `dim` numbers for each `ratio` tokens."""

    dim: int
    ratio: int = 1

    def rank(self, tp: int) -> IndexKey:
        """Replicated."""
        return self


@dataclass(frozen=True)
class State:
    """`heads` times `head_nbytes` bytes for each sequence."""

    heads: int
    head_nbytes: int

    def rank(self, tp: int) -> State:
        """Heads are spread."""
        return replace(self, heads=max(1, -(-self.heads // tp)))

    @property
    def nbytes(self) -> int:
        """Of one sequence."""
        return self.heads * self.head_nbytes


Part = KeyValue | Latent | IndexKey | State
Layer = tuple[Part, ...]


def held(part: KeyValue | Latent | IndexKey, tokens: int) -> int:
    """How many entries of a part a sequence of so many tokens needs, without pages: tokens, or vectors of `ratio` tokens each."""
    if isinstance(part, KeyValue):
        return tokens if part.window_tokens is None else min(tokens, part.window_tokens)
    window = part.window_tokens if isinstance(part, Latent) else None
    return -(-(tokens if window is None else min(tokens, window)) // part.ratio)


@dataclass(frozen=True)
class CachedModel:
    """The caches of a model.

    name           what it is called: a path, a catalog name or a hub id
    family         its `model_type`, or "flags"
    layers         the parts of each layer
    query_heads    Hq, 0 if unknown
    max_tokens     positions the model was made for, None if the config does not say
    notes          what is not counted, or counted in a way worth knowing
    """

    name: str
    family: str
    layers: tuple[Layer, ...]
    query_heads: int = 0
    max_tokens: int | None = None
    notes: tuple[str, ...] = ()

    def __post_init__(self) -> None:
        if not any(self.layers):
            raise UsageError("model", "a layer that caches something", f"{len(self.layers)} layers without any")

    @property
    def short_name(self) -> str:
        """For titles: of a path the end."""
        pieces = [piece for piece in self.name.split("/") if piece not in ("", "config.json")]
        return (
            pieces[-1].removesuffix(".json").removesuffix("_config")
            if self.name.startswith((".", "/", "~"))
            else self.name
        )

    @property
    def parts(self) -> Counter[Part]:
        """How often each part is there."""
        return Counter(part for layer in self.layers for part in layer)

    @property
    def caching_layers(self) -> int:
        """Layers whose cache grows with the context, or slides with it."""
        return sum(any(not isinstance(part, State) for part in layer) for layer in self.layers)

    @property
    def has_states(self) -> bool:
        """Some layers are recurrent."""
        return any(isinstance(part, State) for part in self.parts)

    def rank(self, tp: int) -> CachedModel:
        """What one tensor-parallel rank holds."""
        return replace(self, layers=tuple(tuple(part.rank(tp) for part in layer) for layer in self.layers))

    def stages(self, pp: int) -> Iterator[CachedModel]:
        """The layers of each pipeline stage."""
        start = 0
        for count in stage_layers(len(self.layers), pp):
            yield replace(self, layers=self.layers[start : start + count]) if pp > 1 else self
            start += count

    @property
    def attention(self) -> str:
        """One line that says what kind of attention it is."""
        return describe(self.layers)


def stage_layers(layers: int, pp: int) -> list[int]:
    """How many layers each pipeline stage has: those left over go to the stages before the last one, from behind, as in vLLM."""
    if pp > layers:
        raise UsageError("pipeline stages", f"at most the model's {layers} layers", pp)
    counts = [layers // pp] * pp
    for back in range(layers % pp):
        counts[-2 - back if pp > 1 else 0] += 1
    return counts


def describe(layers: Sequence[Layer]) -> str:
    """Such as "8 full, 40 sliding of 1,024"."""
    words = Counter(
        ", ".join(dict.fromkeys(_word(part) for part in layer if not isinstance(part, IndexKey))) for layer in layers
    )
    none = words.pop("", 0)
    said = [f"{count} {word}" for word, count in words.items()]
    if any(isinstance(part, IndexKey) for layer in layers for part in layer):
        said.append(f"index keys in {sum(any(isinstance(part, IndexKey) for part in layer) for layer in layers)}")
    return "; ".join(said + ([f"{none} without a cache"] if none else []))


def _word(part: Part) -> str:
    if isinstance(part, State):
        return "recurrent"
    if isinstance(part, IndexKey):
        return "index key"
    if isinstance(part, Latent):
        window = f" sliding over {part.window_tokens:,}" if part.window_tokens else ""
        return f"latent {part.dim}" + (f" per {part.ratio} tokens" if part.ratio > 1 else "") + window
    shape = f"{part.heads} x {part.k_dim}" if part.k_dim == part.v_dim else f"{part.heads} x {part.k_dim}/{part.v_dim}"
    if part.window_tokens is None:
        return f"full ({shape})"
    return f"{'chunked' if part.chunked else 'sliding'} over {part.window_tokens:,} ({shape})"
