"""kvarto's own formats in the planner: pages as `Format.layout` lays them out, the open page, sinks and windows raw. No torch.

Counted as the engine's books do (engine/holding.py): `nbytes` is what a sequence holds between steps, raw and sealed pages and the one that fills;
`peak_nbytes` is what must be there for it to come so far (`Group.most_blocks`), sealed places of pages that fill included.
"""

from __future__ import annotations

from dataclasses import dataclass
from fractions import Fraction
from functools import lru_cache

from kvarto.codecs import registry
from kvarto.engine.holding import Group
from kvarto.errors import ShapeError, Unsupported, UsageError
from kvarto.formats import Format, Policy, parse_policy, raw_format
from kvarto.layout import PAGE_TOKENS, Geometry
from kvarto.plan.cached import CachedModel, IndexKey, KeyValue, Latent, Part, State, held
from kvarto.plan.written import KvFormat, Writer
from kvarto.rule import Rule

ENGINE = "kvarto"
_RAW_BYTES = 2
_RAW_KIND, _SEALED_KIND = 0, 1
_RAW = raw_format("bfloat16")


@lru_cache(maxsize=4096)
def _page_nbytes(kv: Format, heads: int, k_dim: int, v_dim: int) -> int:
    return kv.layout(Geometry(heads, k_dim, v_dim)).nbytes


@dataclass(frozen=True)
class PageWriter(Writer):
    """Pages of one format."""

    kv: Format

    def nbytes(self, part: Part, tokens: int) -> int:
        """Sealed and raw pages; latents and index keys as raw pages of 64."""
        if isinstance(part, State):
            return part.nbytes
        if not isinstance(part, KeyValue):
            return _vectors(part, tokens) * part.dim * _RAW_BYTES
        sealed, raw = self._pages(part, tokens)
        return sealed * self._sealed(part) + raw * self._raw(part)

    def growth(self, part: Part) -> Fraction:
        """A page's bytes over its tokens."""
        if isinstance(part, KeyValue):
            return Fraction(0) if part.window_tokens else Fraction(self._sealed(part), PAGE_TOKENS)
        if isinstance(part, State) or (isinstance(part, Latent) and part.window_tokens):
            return Fraction(0)
        return Fraction(part.dim * _RAW_BYTES, part.ratio)

    def read_nbytes(self, part: Part, tokens: int) -> Fraction:
        """Sinks, window and on average half a page raw, the rest sealed."""
        if isinstance(part, State):
            return Fraction(2 * part.nbytes)
        entries = read_entries(part, tokens)
        if not isinstance(part, KeyValue):
            return Fraction(entries * part.dim * _RAW_BYTES)
        raw_tokens = min(entries, self.kv.sink_tokens + self.kv.window_tokens + PAGE_TOKENS // 2)
        sealed = (entries - raw_tokens) * Fraction(self._sealed(part), PAGE_TOKENS)
        return sealed + raw_tokens * Fraction(self._raw(part), PAGE_TOKENS)

    def peak_nbytes(self, part: Part, tokens: int) -> int:
        """The most pages until then, in steps of a page at most."""
        if not isinstance(part, KeyValue):
            return self.nbytes(part, tokens)
        counts = Group(self._rule(part), _RAW_KIND, _SEALED_KIND).most_blocks(tokens, PAGE_TOKENS)
        return counts[_SEALED_KIND] * self._sealed(part) + counts[_RAW_KIND] * self._raw(part)

    def _pages(self, part: KeyValue, tokens: int) -> tuple[int, int]:
        """(Sealed, raw) ones that a sequence of so many tokens holds."""
        rule, full = self._rule(part), tokens // PAGE_TOKENS
        first = rule.first_page(tokens)
        sinks = range(first, min(rule.sink_pages, full))
        recent = range(max(first, rule.sink_pages, full - rule.window_pages), full)
        sealed = range(max(first, rule.sink_pages), full)
        return len(sealed), len(sinks) + len(recent) + (tokens % PAGE_TOKENS > 0)

    def _rule(self, part: KeyValue) -> Rule:
        return Rule(
            PAGE_TOKENS, self.kv.sink_tokens // PAGE_TOKENS, self.kv.window_tokens // PAGE_TOKENS, part.window_tokens
        )

    def _sealed(self, part: KeyValue) -> int:
        return _page_nbytes(self.kv, part.heads, part.k_dim, part.v_dim)

    def _raw(self, part: KeyValue) -> int:
        return _page_nbytes(_RAW, part.heads, part.k_dim, part.v_dim)


def read_entries(part: KeyValue | Latent | IndexKey, tokens: int) -> int:
    """Entries that a decode step reads: all that are held, or those that sparse attention chooses."""
    entries = held(part, tokens)
    most = None if isinstance(part, IndexKey) else part.read_entries
    return entries if most is None else min(entries, most)


def _vectors(part: Latent | IndexKey, tokens: int) -> int:
    """Vectors that pages of 64 tokens hold."""
    window = part.window_tokens if isinstance(part, Latent) else None
    pages = -(-tokens // PAGE_TOKENS) - Rule(PAGE_TOKENS, sliding_tokens=window).first_page(tokens)
    return -(-pages * PAGE_TOKENS // part.ratio)


class OwnFormat(KvFormat):
    """A format or policy of kvarto."""

    def __init__(self, policy: Policy) -> None:
        self.policy = policy
        self.name, self.engine, self.page_tokens = str(policy), ENGINE, PAGE_TOKENS
        self.source, self.flag = policy.format.k.source, f"--kv {policy.origin or policy}"
        self.is_raw = not policy.layers and policy.format.k == policy.format.v == _RAW.k
        self.measured = (str(policy.format.k.name),) if policy.format.k == policy.format.v else ()

    def refuses(self, model: CachedModel) -> str | None:
        """Latents and index keys have only raw pages; a codec may not write a geometry."""
        try:
            writers = self.writers(model)
            for layer, writer in zip(model.layers, writers, strict=True):
                for part in layer:
                    if isinstance(part, KeyValue):
                        writer.nbytes(part, 1)
                    elif not isinstance(part, State) and not self.is_raw:
                        return "kvarto has no packed pages for latents and index keys, only raw ones"
        except (Unsupported, ShapeError, UsageError) as error:
            return str(error)
        return None

    def writers(self, model: CachedModel) -> list[Writer]:
        """By the policy, which counts the layers that cache keys and values."""
        caching = [any(isinstance(part, KeyValue) for part in layer) for layer in model.layers]
        count, at, writers = sum(caching), 0, list[Writer]()
        for caches in caching:
            writers.append(PageWriter(self.policy.for_layer(at, count, _RAW) if caches else self.policy.format))
            at += caches
        return writers


def own_formats() -> list[OwnFormat]:
    """All codecs as formats, the headline ones first."""
    codecs = sorted(registry.values(), key=lambda codec: (not codec.headline, -codec.bits, codec.name))
    return [OwnFormat(parse_policy(codec.name)) for codec in codecs]


def headline(name: str) -> bool:
    """A codec that a quick study looks at too."""
    return name in registry and registry[name].headline
