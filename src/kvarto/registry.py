"""Things that are added with one file: every module of a folder is looked through, and entry points of other packages after it.

A module offers a tuple under one agreed attribute (codecs: `CODECS`). Nothing is imported before the first look-up. A module of ours may offer
nothing; an entry point must offer what ours do, or is refused by name.
"""

from __future__ import annotations

import importlib
import pkgutil
from collections.abc import Iterable, Iterator, Mapping
from importlib.metadata import EntryPoint, entry_points
from threading import RLock
from typing import Any, Generic, Protocol, TypeVar

from kvarto.errors import UnknownName, UsageError


class Named(Protocol):
    """What a registry holds: anything with a name."""

    @property
    def name(self) -> str:
        """The name that users write."""


T = TypeVar("T", bound=Named)


class Registry(Mapping[str, T], Generic[T]):
    """A read-only mapping from name to thing, filled at first use and sorted by name.

    `kind` is the word for messages, `package` the folder to look through, `attribute` the tuple that each module offers, `group` the entry
    point group. Looking up an unknown name raises UnknownName; two things of one name raise UsageError.
    """

    def __init__(self, kind: str, *, package: str, attribute: str, group: str) -> None:
        self.kind, self._package, self._attribute, self._group = kind, package, attribute, group
        self._found: dict[str, T] | None = None
        self._lock = RLock()

    def __getitem__(self, name: str) -> T:
        found = self._load()
        if name not in found:
            raise UnknownName(self.kind, name, found)
        return found[name]

    def __iter__(self) -> Iterator[str]:
        return iter(self._load())

    def __len__(self) -> int:
        return len(self._load())

    def __contains__(self, name: object) -> bool:
        return name in self._load()

    def _load(self) -> dict[str, T]:
        with self._lock:
            if self._found is None:
                self._found = self._collect()
            return self._found

    def _collect(self) -> dict[str, T]:
        found: dict[str, T] = {}
        origin: dict[str, str] = {}
        ours = list(self._ours())
        for module, things in [*ours, *self._plugged_in(_common_class(ours))]:
            for thing in things:
                if thing.name in found:
                    raise UsageError(
                        f"{self.kind} {thing.name!r}",
                        "a name of its own",
                        f"one in {origin[thing.name]} and one in {module}",
                        "rename one of them",
                    )
                found[thing.name], origin[thing.name] = thing, module
        return dict(sorted(found.items()))

    def _ours(self) -> Iterator[tuple[str, Iterable[T]]]:
        """For each module of the folder its name and what it offers."""
        package = importlib.import_module(self._package)
        for info in pkgutil.iter_modules(package.__path__):
            name = f"{self._package}.{info.name}"
            yield name, getattr(importlib.import_module(name), self._attribute, ())

    def _plugged_in(self, expected: type) -> Iterator[tuple[str, Iterable[T]]]:
        """The same of the entry points, which must offer instances of `expected`."""
        for point in sorted(entry_points(group=self._group), key=lambda point: point.name):
            name = f"entry point {point.name!r} of {self._group}"
            remedy = f"repair or uninstall {point.dist.name if point.dist else point.value}"
            things = self._load_point(point, name, remedy)
            wrong = [thing for thing in things if not _is_named(thing, expected)]
            if wrong:
                raise UsageError(name, f"{expected.__name__} objects with a name", f"{wrong[0]!r:.100}", remedy)
            yield point.value, things

    def _load_point(self, point: EntryPoint, name: str, remedy: str) -> tuple[Any, ...]:
        try:
            module = point.load()
        except Exception as error:
            got = f"{type(error).__name__}: {error}"
            raise UsageError(name, f"{point.value} to import", got, remedy) from error
        things = getattr(module, self._attribute, None)
        if not isinstance(things, tuple):
            got = f"{point.value} with {'none' if things is None else type(things).__name__}"
            raise UsageError(name, f"a module with a tuple {self._attribute}", got, remedy)
        return things


def _is_named(thing: object, expected: type) -> bool:
    return isinstance(thing, expected) and isinstance(getattr(thing, "name", None), str)


def _common_class(ours: Iterable[tuple[str, Iterable[Any]]]) -> type:
    """The narrowest class that everything of ours is an instance of."""
    things = [thing for _, offered in ours for thing in offered]
    classes: Iterable[type] = type(things[0]).__mro__ if things else ()
    return next((each for each in classes if all(isinstance(thing, each) for thing in things)), object)
