"""Blocks to bytes and back: what leaves the arena goes to the tiers (cache/tiers.py), and a prefix that is met again brings it back.

A key is a digest of the model, the policy with the versions of its codecs, the tenant, and all tokens up to the end of the page; the label says which
group and form. A block travels as its key and then one page for each layer, each with a header and a checksum of its own (page.py). What does not say
just what was expected is forgotten, and computed again.
"""

from __future__ import annotations

import hashlib
import logging
from dataclasses import dataclass
from functools import partial

import numpy as np
import torch

from kvarto.cache.prefix import Node, Piece
from kvarto.cache.tiers import Key, Tiers
from kvarto.engine.memory import Layer, Memory, Offer
from kvarto.errors import PageFormatError, PageMismatch
from kvarto.formats import Format
from kvarto.layout import Geometry
from kvarto.page import HEADER_BYTES, CodecId, Page

_log = logging.getLogger(__name__)


@dataclass(frozen=True)
class _Record:
    """What a page of a block is, for the reader."""

    k: CodecId
    v: CodecId
    geometry: Geometry
    nbytes: int


@dataclass(frozen=True)
class _Form:
    """A kind of block of a policy: its label, and what it holds of each layer, in order."""

    label: str
    records: tuple[_Record, ...]


class Offload:
    """What `PrefixCache.below` asks for. `identity` says which model it is, weights and all."""

    def __init__(self, memory: Memory, tiers: Tiers, identity: str) -> None:
        self._memory, self.tiers = memory, tiers
        self._forms = [_forms(offer) for offer in memory.offers]
        self._seeds = [
            repr((identity, offer.policy.identity, [form for _, form in sorted(forms.items())]))
            for offer, forms in zip(memory.offers, self._forms, strict=True)
        ]

    def knows(self, node: Node, kind: int) -> bool:
        """A tier has it."""
        return self._key(node, kind) in self.tiers

    def save(self, piece: Piece) -> None:
        """Into the nearest tier, unless one has it."""
        assert piece.node is not None, "a piece that nobody may know has no key"
        key = self._key(piece.node, piece.kind)
        if key not in self.tiers:
            self.tiers.put(key, self._packed(piece, key))

    def load(self, node: Node, kind: int, block: int) -> bool:
        """From the nearest tier; what is not sound is forgotten there."""
        key, form = self._key(node, kind), self._form(node, kind)
        packed = self.tiers.get(key)
        if packed is None:
            return False
        try:
            data = self._unpack(key, form, packed)
        except PageFormatError as error:
            _log.warning("a block of %s is computed again: %s", form.label, error)
            self.tiers.refuse(key)
            return False
        self._memory.write(kind, block, torch.from_numpy(np.frombuffer(data, np.uint8)))
        return True

    def close(self) -> None:
        """Files keep what was used last, for the next engine."""
        last = []
        for piece in self._memory.prefixes.idle:
            assert piece.node is not None, "an idle piece has a node"
            key = self._key(piece.node, piece.kind)
            nbytes = len(key[0]) + sum(
                HEADER_BYTES + record.nbytes for record in self._form(piece.node, piece.kind).records
            )
            last.append((key, nbytes, partial(self._packed, piece, key)))
        self.tiers.close(last)

    # ---- keys ------------------------------------------------------------------------------------------------------

    def _key(self, node: Node, kind: int) -> Key:
        return self._digest(node), self._form(node, kind).label

    def _digest(self, node: Node) -> bytes:
        """Of all that a page depends on. Kept in the node."""
        waiting = []
        current: Node | None = node
        while current is not None and current.digest is None:
            waiting.append(current)
            current = current.parent
        for each in reversed(waiting):
            if each.parent is None:
                policy, tenant = _identity(each)
                said = repr((self._seeds[policy], tenant)).encode()
            else:
                assert each.parent.digest is not None
                said = each.parent.digest + np.array(each.tokens, np.int64).tobytes()
            each.digest = hashlib.sha256(said).digest()
        assert node.digest is not None
        return node.digest

    def _form(self, node: Node, kind: int) -> _Form:
        return self._forms[_identity(node)[0]][kind]

    # ---- bytes -----------------------------------------------------------------------------------------------------

    def _packed(self, piece: Piece, key: Key) -> bytes:
        assert piece.node is not None, "a piece that nobody may know has no form"
        data = self._memory.read(piece.kind, piece.block).cpu().numpy().tobytes()
        return self._pack(key, self._form(piece.node, piece.kind), data)

    @staticmethod
    def _pack(key: Key, form: _Form, data: bytes) -> bytes:
        parts, first = [key[0]], 0
        for record in form.records:
            payload = data[first : first + record.nbytes]
            parts.append(Page(record.k, record.v, record.geometry, payload).to_bytes())
            first += record.nbytes
        return b"".join(parts)

    @staticmethod
    def _unpack(key: Key, form: _Form, packed: bytes) -> bytearray:
        """Raises PageFormatError if it is not just what the key promises."""
        expected = len(key[0]) + sum(HEADER_BYTES + record.nbytes for record in form.records)
        if len(packed) != expected:
            raise PageMismatch("block bytes", expected, len(packed))
        if packed[: len(key[0])] != key[0]:
            raise PageMismatch("block of prefix", key[0].hex(), packed[: len(key[0])].hex())
        data, first = bytearray(), len(key[0])
        for record in form.records:
            page = Page.from_bytes(packed[first : first + HEADER_BYTES + record.nbytes])
            data += page.expect(record.k, record.v, record.geometry, record.nbytes).payload
            first += HEADER_BYTES + record.nbytes
        return data


def _identity(node: Node) -> tuple[int, object]:
    """(policy, tenant), as `Memory.begin` gives it."""
    assert isinstance(node.identity, tuple)
    return node.identity[0], node.identity[1]


def _forms(offer: Offer) -> dict[int, _Form]:
    forms = {}
    for number, group in enumerate(offer.groups):
        layers = [layer for layer in offer.layers if layer.group == number]
        forms[group.raw] = _Form(f"g{number}raw", tuple(_record(layer, raw=True) for layer in layers))
        forms[group.sealed] = _Form(f"g{number}sealed", tuple(_record(layer, raw=False) for layer in layers))
    return forms


def _record(layer: Layer, *, raw: bool) -> _Record:
    pages = layer.pages
    chosen: Format = pages.raw_format if raw else pages.format
    ids = [CodecId(codec.name, codec.version) for codec in (chosen.k, chosen.v)]
    layout = pages.raw_layout if raw else pages.layout
    return _Record(ids[0], ids[1], pages.spec.geometry, layout.nbytes)
