"""Real documents to measure a model on, from what is already on the machine.

    builtin         the language reference that every CPython carries for help(): English with some code, no download
    handbook        The Debian Administrator's Handbook, English; handbook:zh-CN and the like for its other languages
    perl            the Perl manual, without its release notes
    FILE or FOLDER  a text file, or every .txt and .md file below a folder

Documents come sorted by name and do not repeat one another, so one part can calibrate and another be held out.
"""

from __future__ import annotations

import hashlib
import importlib
import re
from collections.abc import Iterable
from dataclasses import dataclass
from pathlib import Path

from kvarto.errors import FetchError, UnknownName, UsageError
from kvarto.models.prose import html_text, pod_text, rst_text

SOURCES = ("builtin", "handbook", "perl")
HANDBOOK = Path("/usr/share/doc/debian-handbook/html")
PERL = Path("/usr/share/perl")
SUFFIXES = (".txt", ".md")
# Release notes, a list of every heading and a table of Unicode properties are no prose; four pages are not in English.
_NOT_PERL_PROSE = re.compile(r"perl(\w*delta|toc|uniprops|cn|jp|ko|tw)")
# Below this a page is a title and a list of links.
_SHORTEST_CHARS = 400


@dataclass(frozen=True)
class Document:
    """One text with a name that is unique within its source."""

    name: str
    text: str


def texts(source: str = "builtin", *, handbook_root: Path = HANDBOOK, perl_root: Path = PERL) -> list[Document]:
    """The documents of `source` (see the module), sorted by name; never empty.

    Raises FetchError when the text is not installed, UnknownName or UsageError when `source` means nothing.
    """
    if source == "builtin":
        return _builtin()
    if source == "handbook" or source.startswith("handbook:"):
        return _handbook(handbook_root, source.partition(":")[2] or "en-US")
    if source == "perl":
        return _perl(perl_root)
    path = Path(source).expanduser()
    if path.is_file():
        return _nonempty(source, [Document(path.name, _read(path))])
    if path.is_dir():
        files = (file for file in path.rglob("*") if file.suffix.lower() in SUFFIXES and file.is_file())
        return _nonempty(source, [Document(file.relative_to(path).as_posix(), _read(file)) for file in files])
    raise UnknownName("text", source, [*SOURCES, "a file", "a folder"])


def fingerprint(documents: Iterable[Document]) -> str:
    """SHA-256 over names and texts, to say in a report: `builtin` differs from one Python version to the next."""
    digest = hashlib.sha256()
    for document in documents:
        for part in (document.name, document.text):
            data = part.encode()
            digest.update(len(data).to_bytes(8, "little") + data)
    return digest.hexdigest()


def _builtin() -> list[Document]:
    try:
        topics: dict[str, str] = importlib.import_module("pydoc_data.topics").topics
    except ImportError as error:
        raise FetchError(
            "this Python lacks pydoc_data; install the full standard library, or give a text file or folder"
        ) from error
    return _without_repeats([Document(name, rst_text(topics[name])) for name in sorted(topics)])


def _without_repeats(documents: list[Document]) -> list[Document]:
    """Drop documents that stand word for word inside another: `if` and `with` are also sections of `compound`."""
    bodies = {document.name: " ".join(document.text.partition("\n")[2].split()) for document in documents}
    kept: list[Document] = []
    texts_kept: list[str] = []
    for document in sorted(documents, key=lambda document: (-len(bodies[document.name]), document.name)):
        body = bodies[document.name]
        if body and not any(body in longer for longer in texts_kept):
            kept.append(document)
            texts_kept.append(body)
    return sorted(kept, key=lambda document: document.name)


def _handbook(root: Path, language: str) -> list[Document]:
    folder = root / language
    if not root.is_dir():
        raise FetchError("the Debian handbook is not installed; run: apt-get install debian-handbook")
    languages = [path.name for path in root.iterdir() if (path / "index.html").is_file()]
    if language not in languages:
        raise UnknownName("handbook language", language, languages)
    pages = [Document(file.stem, html_text(_read(file))) for file in folder.glob("*.html")]
    return _nonempty("handbook", [page for page in pages if len(page.text) >= _SHORTEST_CHARS])


def _perl(root: Path) -> list[Document]:
    folders = sorted(folder for folder in root.glob("*/pod") if (folder / "perlintro.pod").is_file())
    if not folders:
        raise FetchError("the Perl manual is not installed; run: apt-get install perl-doc")
    files = [file for file in folders[-1].glob("perl*.pod") if not _NOT_PERL_PROSE.fullmatch(file.stem)]
    pages = [Document(file.stem, pod_text(_read(file))) for file in files]
    return _nonempty("perl", [page for page in pages if len(page.text) >= _SHORTEST_CHARS])


def _read(path: Path) -> str:
    data = path.read_bytes()
    try:
        return data.decode("utf-8-sig")
    except UnicodeDecodeError as error:
        if path.suffix == ".pod":  # POD without an =encoding line is CP1252 by its specification
            return data.decode("cp1252", errors="replace")
        raise UsageError(
            "text", "a UTF-8 file", f"{path} with byte {data[error.start]:#04x} at {error.start}"
        ) from error


def _nonempty(source: str, documents: list[Document]) -> list[Document]:
    kept = sorted((document for document in documents if document.text.strip()), key=lambda document: document.name)
    if not kept:
        raise UsageError(
            "text", f"a file, or a folder with {' or '.join(SUFFIXES)} files in it", f"nothing to read in {source}"
        )
    return kept
