"""Things that are added with one file: every module of a folder is looked through, and entry points of other packages after it.

A module offers a tuple under one agreed attribute (codecs: `CODECS`). Nothing is imported before the first look-up.
"""

from __future__ import annotations

import importlib
import pkgutil
from collections.abc import Iterable, Iterator, Mapping
from importlib.metadata import entry_points
from threading import RLock
from types import ModuleType
from typing import Generic, Protocol, TypeVar

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
        for module in self._modules():
            for thing in self._offered(module):
                if thing.name in found:
                    raise UsageError(
                        f"{self.kind} {thing.name!r}",
                        "a name of its own",
                        f"one in {origin[thing.name]} and one in {module.__name__}",
                        "rename one of them",
                    )
                found[thing.name], origin[thing.name] = thing, module.__name__
        return dict(sorted(found.items()))

    def _modules(self) -> Iterator[ModuleType]:
        package = importlib.import_module(self._package)
        for info in pkgutil.iter_modules(package.__path__):
            yield importlib.import_module(f"{self._package}.{info.name}")
        for point in sorted(entry_points(group=self._group), key=lambda point: point.name):
            yield point.load()

    def _offered(self, module: ModuleType) -> Iterable[T]:
        offered: Iterable[T] = getattr(module, self._attribute, ())
        return offered
