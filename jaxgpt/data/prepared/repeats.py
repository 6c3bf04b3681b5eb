"""Repeated documents of `jaxgpt data prepare --dedup exact`: documents with the text of an earlier document."""

from __future__ import annotations

import hashlib
from collections.abc import Iterable

from jaxgpt.config import PrepareParams
from jaxgpt.data.prepared.document_piece import DocumentPiece, is_short
from jaxgpt.errors import UserError

IDENTITY_BYTES = 16  # bytes of a SHA-256 that identify a document


class Repeats:
    """Documents seen so far, as 16 bytes each; needs about 100 bytes of memory per document."""

    def __init__(self) -> None:
        self._seen = set[bytes]()
        self._is_repeated = False  # whether the current document has the text of an earlier document

    def add(self, is_first: bool, identity: bytes) -> bool:
        """Add the next piece; return whether its document has the text of an earlier document.

        Args:
            is_first: whether a document begins with the piece.
            identity: SHA-256 of the complete document; empty: unknown, so the document is kept.
        """
        if is_first:
            key = identity[:IDENTITY_BYTES]
            self._is_repeated = key in self._seen
            if key:
                self._seen.add(key)
        return self._is_repeated


def repeats_of(processed: Iterable[DocumentPiece], params: PrepareParams) -> Repeats:
    """Read the pieces that an interrupted command has processed, and return the documents that it has seen."""
    repeats = Repeats()
    for piece in processed:
        identity = piece.identity
        if piece.is_document:
            try:
                text = piece.text()
            except UserError:  # skipped by the interrupted command
                continue
            if is_short(piece, text, params):
                continue
            identity = hashlib.sha256(text.encode()).digest()
        repeats.add(piece.is_first, identity)
    return repeats
