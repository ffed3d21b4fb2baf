"""Pages from addresses and from files. Whatever is there, it takes a bounded time and a bounded memory, and what is wrong is said in one line."""

from __future__ import annotations

import http.client
import json
import re
import socket
import time
import urllib.error
import urllib.parse
import urllib.request
from collections.abc import Callable, Mapping, Sequence
from dataclasses import dataclass
from pathlib import Path
from typing import Any

from kvarto.diagnose.exposition import Page, parse
from kvarto.diagnose.window import slim
from kvarto.errors import Unreachable, UsageError
from kvarto.files import write_whole

MOST_BYTES = 32 * 2**20
"""A page of an engine has some 100 KB; many engines behind one address some MB."""
MOST_SCRAPES = 2000
"""A longer window is watched less often."""
_PATHS = ("/metrics", "/prometheus/metrics")
_CHUNK_BYTES = 65536
_STAMP = re.compile(r"\A# scraped at ([0-9]+(?:\.[0-9]+)?)\s*$", re.MULTILINE)
_HINTS = {
    401: "give a key: --header 'Authorization: Bearer ...'",
    403: "give a key: --header 'Authorization: Bearer ...'",
    **dict.fromkeys((301, 302, 303, 307, 308), "give that address"),
    404: "are its metrics on? SGLang: --enable-metrics, llama.cpp: --metrics",
    501: "llama.cpp: start it with --metrics",
}


class _NoRedirect(urllib.request.HTTPRedirectHandler):
    """A redirect is an answer: following it could take a key to somebody else."""

    def redirect_request(self, *_: Any) -> None:
        """None: it is an HTTPError."""


_OPENER = urllib.request.build_opener(_NoRedirect)


def is_url(text: str) -> bool:
    """An address, not a file: http://, or host:port."""
    return re.match(r"https?://", text, re.IGNORECASE) is not None or (
        re.fullmatch(r"[\w.-]+:[0-9]{1,5}(/\S*)?", text) is not None and not Path(text).exists()
    )


def read_headers(lines: Sequence[str]) -> dict[str, str]:
    """'NAME: VALUE' each. Raises UsageError, which shows no value: it may be a key."""
    found = {}
    for line in lines:
        name, colon, value = line.partition(":")
        if not colon or not name.strip() or not value.strip() or not line.isprintable():
            raise UsageError("--header", "'NAME: VALUE'", f"{name[:20]!r} ..." if colon else "one without a colon")
        found[name.strip()] = value.strip()
    return found


def base_of(url: str) -> str:
    """scheme://host:port of an address. Raises UsageError."""
    try:
        parts = urllib.parse.urlsplit(url if "://" in url else f"http://{url}")
        good = parts.scheme.lower() in ("http", "https") and parts.hostname and parts.port != 0
    except ValueError:
        raise UsageError("address", "http://HOST:PORT", repr(url)) from None
    if not good:
        raise UsageError("address", "http://HOST:PORT", repr(url))
    return f"{parts.scheme}://{parts.netloc}"


def get(
    url: str, *, headers: Mapping[str, str] | None = None, body: Mapping[str, Any] | None = None, seconds: float = 5.0
) -> str:
    """What an address answers, as text; POSTs `body` as JSON if there is one. Raises Unreachable: also after `seconds` in all."""
    data = None if body is None else json.dumps(body).encode()
    sent = {
        "User-Agent": "kvarto",
        **({"Content-Type": "application/json"} if data else {}),
        **(headers or {}),
    }
    deadline = time.monotonic() + seconds
    try:
        request = urllib.request.Request(url, data=data, headers=sent)
        with _OPENER.open(request, timeout=seconds) as answer:
            return _read(answer, url, deadline, seconds)
    except urllib.error.HTTPError as error:
        with error:
            said = error.read(400).decode(errors="replace")
        said = _line(re.sub(r"<[^>]*>", " ", said))[:120]
        where = error.headers.get("Location", "") if 300 <= error.code < 400 else ""
        said = f"to {_line(where)[:120]}" if where else said
        reason = f"answered {error.code} {_line(str(error.reason))[:60]}".rstrip() + (f" ({said})" if said else "")
        raise Unreachable(url, reason, _HINTS.get(error.code, "")) from error
    except urllib.error.URLError as error:
        raise _unreachable(url, error.reason if isinstance(error.reason, Exception) else error, seconds) from error
    except (OSError, http.client.HTTPException, ValueError) as error:
        raise _unreachable(url, error, seconds) from error


def _read(answer: http.client.HTTPResponse, url: str, deadline: float, seconds: float) -> str:
    read, size = [], 0
    while chunk := answer.read1(_CHUNK_BYTES):
        read.append(chunk)
        size += len(chunk)
        if size > MOST_BYTES:
            raise Unreachable(
                url, f"answered with more than {MOST_BYTES // 2**20} MiB", "is this the engine's own page?"
            )
        if time.monotonic() > deadline:
            raise TimeoutError
    if answer.length:
        raise Unreachable(url, f"broke off {answer.length:,} bytes before the end of its answer")
    try:
        return b"".join(read).decode()
    except UnicodeDecodeError as error:
        raise Unreachable(url, "answered with bytes that are no text", "is this the engine's own page?") from error


def _unreachable(url: str, error: Exception, seconds: float) -> Unreachable:
    if isinstance(error, TimeoutError):
        return Unreachable(url, f"no answer within {seconds:g} s", "is the engine busy or hung? --timeout waits longer")
    if isinstance(error, ConnectionRefusedError):
        return Unreachable(url, "connection refused", "is the engine running, and is this its port?")
    if isinstance(error, socket.gaierror):
        return Unreachable(url, "no such host", "is the name right?")
    if isinstance(error, http.client.BadStatusLine) and not isinstance(error, http.client.RemoteDisconnected):
        return Unreachable(url, "answered with something that is no HTTP", "is this its port?")
    said = _line(str(getattr(error, "strerror", None) or error or type(error).__name__))
    return Unreachable(url, said[:200] or type(error).__name__)


def _line(text: str) -> str:
    """What another server said, on one line and without control characters: a terminal would obey them."""
    return " ".join("".join(c if c.isprintable() else " " for c in text).split())


def get_json(url: str, **options: Any) -> Any:
    """What an address answers, as JSON. Raises Unreachable."""
    text = get(url, **options)
    try:
        return json.loads(text)
    except ValueError as error:
        raise Unreachable(url, "answered with something that is no JSON") from error


@dataclass(frozen=True)
class Watched:
    """Pages, and what is to be said of how they came about."""

    pages: list[Page]
    notes: list[str]


class Live:
    """The metrics page of a running engine. `headers`: such as a key; they are never shown."""

    def __init__(self, url: str, headers: Mapping[str, str] | None = None, seconds: float = 5.0) -> None:
        self.base, self._headers, self._seconds = base_of(url), headers, seconds
        path = urllib.parse.urlsplit(url if "://" in url else f"http://{url}").path.rstrip("/")
        self._paths: Sequence[str] = _PATHS if path in ("", "/v1") else (path,)

    def text(self) -> tuple[str, str]:
        """The page, and its address: the first place with a page. Raises Unreachable or UsageError."""
        first: Unreachable | None = None
        for number, path in enumerate(self._paths):
            try:
                text = get(self.base + path, headers=self._headers, seconds=self._seconds)
            except Unreachable as error:
                first = first or error
                if "answered 404" not in error.reason:
                    break
                continue
            if text.lstrip()[:1] in ("{", "[") and number + 1 < len(self._paths):
                continue  # TensorRT-LLM's /metrics is JSON of iterations
            self._paths = (path,)
            return text, self.base + path
        assert first is not None
        raise first

    def page(self) -> Page:
        """One scrape. Raises Unreachable or UsageError."""
        text, address = self.text()
        return parse(text, address, time.time())

    def watch(
        self,
        seconds: float,
        every_seconds: float,
        *,
        save: Path | None = None,
        told: Callable[[int, float], None] = lambda _count, _left: None,
    ) -> Watched:
        """Scrapes from now until `seconds` from now, or until somebody interrupts.

        `save`: a folder that gets them as files. `told`: after each, how many, and seconds left. A busy engine may miss a scrape: that is noted.
        Raises Unreachable if the first is missed, or most of them.
        """
        begin, every = time.monotonic(), max(every_seconds, seconds / MOST_SCRAPES)
        pages, notes, missed = [self._keep(save, 1)], [], 0
        told(1, seconds)
        try:
            while (left := begin + seconds - time.monotonic()) > 0:
                time.sleep(max(0.0, min(left, begin + every * (len(pages) + missed) - time.monotonic())))
                try:
                    pages.append(self._keep(save, len(pages) + 1))
                except Unreachable as error:
                    missed, last = missed + 1, error
                    if missed > max(2, len(pages)):
                        raise
                told(len(pages), max(0.0, begin + seconds - time.monotonic()))
        except KeyboardInterrupt:
            notes.append(f"interrupted after {time.monotonic() - begin:.0f} of {seconds:.0f} s")
        if missed:
            notes.append(f"{missed} of {missed + len(pages)} scrapes were not answered ({last.reason})")
        return Watched(pages, notes)

    def _keep(self, save: Path | None, number: int) -> Page:
        text, address = self.text()
        at = time.time()
        page = slim(parse(text, address, at))
        if save is not None:
            write_whole(save / f"{number:05}.prom", (f"# scraped at {at:.3f}\n" + text).encode())
        return page


def read_pages(paths: Sequence[Path]) -> list[Page]:
    """Pages from files, in this order; of a folder its files by name. Raises UsageError."""
    files = [file for path in paths for file in (sorted(_files_of(path)) if path.is_dir() else [path])]
    return [_read_page(file) for file in files]


def _files_of(folder: Path) -> list[Path]:
    found = [each for each in folder.iterdir() if each.is_file() and not each.name.startswith(".")]
    if not found:
        raise UsageError(str(folder), "a folder with saved pages", "an empty one")
    return found


def _read_page(path: Path) -> Page:
    try:
        with path.open("rb") as file:
            data = file.read(MOST_BYTES + 1)
    except OSError as error:
        raise UsageError(
            str(path), "an address, or a file with a metrics page", error.strerror or "it cannot be read"
        ) from error
    if len(data) > MOST_BYTES:
        raise UsageError(str(path), "a metrics page", f"a file of more than {MOST_BYTES // 2**20} MiB", "is it a log?")
    try:
        text = data.decode()
    except UnicodeDecodeError as error:
        raise UsageError(str(path), "a metrics page", "bytes that are no text") from error
    stamp = _STAMP.match(text)
    return parse(text, str(path), float(stamp.group(1)) if stamp else None)
