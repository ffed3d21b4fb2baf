"""A sealed page as bytes that can leave the process: a header that says what it is, then the payload.

Everything that a reader must know to refuse a wrong page is in the header, and everything in the header is checked, each with an error of
its own. The payload is what `layout.PageLayout` describes; this module does not look inside.
"""

from __future__ import annotations

import hashlib
import re
import struct
from dataclasses import dataclass

from kvarto.errors import BadMagic, ChecksumMismatch, PageMismatch, ShapeError, UnsupportedVersion
from kvarto.layout import Geometry

MAGIC = b"KVRT"
FORMAT_VERSION = 1
_NAME_BYTES = 24
_DIGEST_BYTES = 16
_NAME = re.compile(rf"[a-z0-9._-]{{1,{_NAME_BYTES}}}")
# magic, format version, K codec version, V codec version, reserved, K codec, V codec, S, Hkv, Dk, Dv, payload bytes, digest
_HEADER = struct.Struct(f"<4sHHH6s{_NAME_BYTES}s{_NAME_BYTES}sIIIIQ{_DIGEST_BYTES}s")
HEADER_BYTES = _HEADER.size


@dataclass(frozen=True)
class CodecId:
    """Name and version of a codec as pages record it."""

    name: str
    version: int

    def __str__(self) -> str:
        return f"{self.name} v{self.version}"


@dataclass(frozen=True)
class Page:
    """One sealed page of one layer: who wrote it, its geometry, and its payload. Immutable, so it can be shared and hashed."""

    k_codec: CodecId
    v_codec: CodecId
    geometry: Geometry
    payload: bytes

    def to_bytes(self) -> bytes:
        """Header and payload. The digest covers the header too, so that a flipped bit anywhere is found."""
        return self._header(self._digest()) + self.payload

    @classmethod
    def from_bytes(cls, data: bytes) -> Page:
        """Read what `to_bytes` wrote.

        Raises BadMagic, UnsupportedVersion, PageMismatch (size, geometry) or ChecksumMismatch; each says what was expected and what was found.
        """
        data = bytes(data)
        if len(data) < HEADER_BYTES or data[:4] != MAGIC:
            raise BadMagic(
                f"page: expected {MAGIC!r} and a header of {HEADER_BYTES} bytes, got {data[:4]!r} and {len(data)} bytes"
            )
        _, version, k_version, v_version, reserved, k_name, v_name, *shape, nbytes, digest = _HEADER.unpack_from(data)
        if version != FORMAT_VERSION:
            raise UnsupportedVersion(
                f"page: expected format version {FORMAT_VERSION}, got {version}; read it with the kvarto that wrote it"
            )
        if len(data) - HEADER_BYTES != nbytes:
            raise PageMismatch("payload bytes", nbytes, len(data) - HEADER_BYTES)
        # The digest is checked before anything else in the header is believed.
        stated = data[: HEADER_BYTES - _DIGEST_BYTES]
        if _digest(stated, data[HEADER_BYTES:]) != digest:
            raise ChecksumMismatch(
                "page: expected the digest in its header, got another; its bytes changed after sealing, fetch or compute it again"
            )
        if any(reserved):
            raise PageMismatch("reserved bytes", "zeros", reserved.hex())
        try:
            tokens, heads, k_dim, v_dim = shape
            page_geometry = Geometry(heads, k_dim, v_dim, tokens)
        except ShapeError as error:
            raise PageMismatch("geometry", f"{error.name} of {error.expected}", error.got) from None
        return cls(_codec_id(k_name, k_version), _codec_id(v_name, v_version), page_geometry, data[HEADER_BYTES:])

    def expect(self, k_codec: CodecId, v_codec: CodecId, geometry: Geometry, nbytes: int) -> Page:
        """This page, if it is one of the given codecs, geometry and payload size.

        Raises UnsupportedVersion for another version of the right codec, else PageMismatch.
        """
        for side, expected, got in (("K codec", k_codec, self.k_codec), ("V codec", v_codec, self.v_codec)):
            if expected.name != got.name:
                raise PageMismatch(side, expected, got)
            if expected.version != got.version:
                raise UnsupportedVersion(f"page {side}: expected {expected}, got {got}; seal it again from its tokens")
        if geometry != self.geometry:
            raise PageMismatch("geometry", geometry, self.geometry)
        if nbytes != len(self.payload):
            raise PageMismatch("payload bytes", nbytes, len(self.payload))
        return self

    def _digest(self) -> bytes:
        return _digest(self._header(bytes(_DIGEST_BYTES))[:-_DIGEST_BYTES], self.payload)

    def _header(self, digest: bytes) -> bytes:
        shape = self.geometry
        try:
            return _HEADER.pack(
                MAGIC, FORMAT_VERSION, self.k_codec.version, self.v_codec.version, bytes(6), _name(self.k_codec), _name(self.v_codec),
                shape.page_tokens, shape.heads, shape.k_dim, shape.v_dim, len(self.payload), digest,
            )  # fmt: skip
        except struct.error as error:
            raise PageMismatch(
                "header", "versions below 2^16 and dimensions below 2^32", f"{self.k_codec}, {self.v_codec}, {shape}"
            ) from error


def _digest(header: bytes, payload: bytes) -> bytes:
    digest = hashlib.blake2b(header, digest_size=_DIGEST_BYTES)
    digest.update(payload)
    return digest.digest()


def _name(codec: CodecId) -> bytes:
    if not _NAME.fullmatch(codec.name):
        raise PageMismatch("codec name", f"1 to {_NAME_BYTES} of a-z, 0-9, dot, hyphen, underscore", repr(codec.name))
    return codec.name.encode("ascii")


def _codec_id(name: bytes, version: int) -> CodecId:
    text = name.rstrip(b"\0").decode("ascii", errors="replace")
    if not _NAME.fullmatch(text):
        raise PageMismatch("codec name", f"1 to {_NAME_BYTES} of a-z, 0-9, dot, hyphen, underscore", repr(text))
    return CodecId(text, version)
