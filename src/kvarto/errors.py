"""Every exception that kvarto raises on purpose.

    KvartoError                      one clear line; `exit_code` is what the command line returns (2 unless stated)
    ├── UsageError                   the caller gave something wrong: name, expected, got, remedy
    │   ├── UnknownName              no codec, format, model ... of that name; says which is near
    │   └── ShapeError               a tensor or geometry does not fit
    ├── Unsupported                  this model, geometry or operation is refused, with the reason
    ├── NotFinite                    NaN or infinity in K or V
    ├── OutOfPages                   a fixed pool has no page left
    ├── PageFormatError              bytes that are not a page we can read
    │   ├── BadMagic
    │   ├── UnsupportedVersion
    │   ├── ChecksumMismatch
    │   └── PageMismatch             a sound page of another codec, geometry or size
    ├── Overloaded                   the engine has as many requests waiting as it takes
    ├── EngineClosed                 the engine is closing, or closed
    ├── BackendUnavailable           an optional package is missing or does not work here
    ├── Unreachable                  another server does not answer, or not with what it was asked for
    ├── FetchError                   a model or text could not be fetched
    └── IntegrityError               bytes are not those that were promised: fetched, or of a damaged file

Refusals that a caller handles in the ordinary course (a kernel that does not support a shape) are values, not exceptions.
"""

from __future__ import annotations

import difflib
from collections.abc import Iterable


class KvartoError(Exception):
    """Base of all errors raised on purpose. `str(error)` is one line that a user can act on."""

    exit_code = 2


class UsageError(KvartoError):
    """A value from the user is wrong. The message always has name, expected and got, and a remedy if there is one."""

    def __init__(self, name: str, expected: object, got: object, remedy: str = "") -> None:
        self.name, self.expected, self.got, self.remedy = name, expected, got, remedy
        super().__init__(f"{name}: expected {expected}, got {got}" + (f"; {remedy}" if remedy else ""))


class UnknownName(UsageError):
    """No such name in a registry. Says the nearest names, and all of them when they are few."""

    def __init__(self, kind: str, got: str, known: Iterable[str]) -> None:
        names = sorted(known)
        near = difflib.get_close_matches(got, names, n=3, cutoff=0.5)
        hint = f"did you mean {' or '.join(near)}?" if near else ""
        super().__init__(kind, f"one of {', '.join(names) or '(none registered)'}", repr(got), hint)


class ShapeError(UsageError):
    """A tensor's shape, dtype or a geometry does not fit what it is used for."""


class Unsupported(KvartoError):
    """The thing asked for exists but is not supported here. The message gives the reason and what to do instead."""


class NotFinite(KvartoError):
    """K or V holds NaN or infinity: quantizing it would spread it over a whole group, so it is refused."""


class OutOfPages(KvartoError):
    """A pool of fixed capacity has too few free pages."""

    def __init__(self, needed_pages: int, free_pages: int) -> None:
        self.needed_pages, self.free_pages = needed_pages, free_pages
        super().__init__(f"pages: expected {needed_pages} free, got {free_pages}; free sequences or enlarge the pool")


class PageFormatError(KvartoError):
    """Bytes that cannot be read as a page."""


class BadMagic(PageFormatError):
    """The bytes do not begin as a kvarto page, or are too short to."""


class UnsupportedVersion(PageFormatError):
    """A page written by another version of the page format or of a codec."""


class ChecksumMismatch(PageFormatError):
    """The page's bytes changed after they were sealed."""


class PageMismatch(PageFormatError):
    """A sound page, but not the one expected: other codecs, geometry or size."""

    def __init__(self, name: str, expected: object, got: object) -> None:
        self.name, self.expected, self.got = name, expected, got
        super().__init__(f"page {name}: expected {expected}, got {got}")


class BackendUnavailable(KvartoError):
    """An optional package is not installed, or does not work on this machine."""

    def __init__(self, name: str, reason: str, remedy: str) -> None:
        self.name, self.reason, self.remedy = name, reason, remedy
        super().__init__(f"{name} is not available: {reason}; {remedy}")


class Overloaded(KvartoError):
    """So many requests wait that one more is refused. Try again later."""


class EngineClosed(KvartoError):
    """The engine takes no more requests."""


class Unreachable(KvartoError):
    """Another server does not answer, or not with what it was asked for: its address, why, and what to do."""

    def __init__(self, address: str, reason: str, remedy: str = "") -> None:
        self.address, self.reason, self.remedy = address, reason, remedy
        super().__init__(f"{address}: {reason}" + (f"; {remedy}" if remedy else ""))


class FetchError(KvartoError):
    """A model or text could not be fetched or converted."""


class IntegrityError(KvartoError):
    """Fetched bytes, or those of a checkpoint or a record, are not what they should be."""
