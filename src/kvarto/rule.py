"""The rule (path invariance): which tokens a query reads, and in which form. No torch.

A query in page p reads page j
    raw      if j is a sink page (j < sink_pages), or a recent one (p - window_pages <= j <= p; its own page always is),
    packed   otherwise (then j < p, so the page is sealed),
never a token after its own, nor one that the model's sliding window hides. The rule depends on positions alone, never on how the tokens arrived.
"""

from __future__ import annotations

from dataclasses import dataclass


@dataclass(frozen=True)
class Rule:
    """See the module docstring. `sliding_tokens`: a query reads only the last so many tokens, itself included."""

    page_tokens: int
    sink_pages: int = 0
    window_pages: int = 0
    sliding_tokens: int | None = None

    def reads_raw(self, page: int, query_page: int) -> bool:
        """True if a query in `query_page` reads `page` raw."""
        return page < self.sink_pages or page >= query_page - self.window_pages

    def first_page(self, token: int) -> int:
        """The first page that a query at place `token` of its sequence reads: all before lie behind the sliding window."""
        return 0 if self.sliding_tokens is None else max(0, token - self.sliding_tokens + 1) // self.page_tokens
