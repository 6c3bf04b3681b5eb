"""Encode the pieces of documents: ids with the tokens that begin and end a document, and the split of the document."""

from __future__ import annotations

import hashlib
from collections.abc import Sequence
from typing import Literal, NamedTuple

import numpy as np

from jaxgpt.config import PrepareParams
from jaxgpt.data.prepared.document_piece import SKIP, DocumentPiece, Unreadable, error_message, is_short
from jaxgpt.data.prepared.shards import token_dtype
from jaxgpt.data.tokenizers.base import END_OF_TEXT, Tokenizer
from jaxgpt.data.tokenizers.fast import fast_encoder
from jaxgpt.errors import UserError

SplitName = Literal["train", "val"]


class EncodedPiece(NamedTuple):
    """The ids of a piece, and the error of a piece that cannot be read or encoded.

    Attributes:
        ids: ids in the dtype of the shards, as bytes; without the text of a piece with an error.
        split: split of the document.
        size: bytes of text.
        begins_document: whether a document starts with this piece.
        bytes_read: bytes of the sources read from disk so far.
        identity: SHA-256 of the complete document; empty: unknown.
        markers: number of end-of-text tokens written as text.
        unwritten: why nothing of the document is written; "": it is written, unless it repeats an earlier document.
        unreadable: the part that cannot be read or encoded; None: no error.
    """

    ids: bytes
    split: SplitName
    size: int
    begins_document: bool
    bytes_read: int
    identity: bytes = b""
    markers: int = 0
    unwritten: Literal["", "short", "unreadable"] = ""
    unreadable: Unreadable | None = None


class PieceEncoder:
    """Encodes pieces, and selects the split of each document.

    A document is for validation if the first 64 bits of `DocumentPiece.digest` (if empty, of the SHA-256 of its text) are below
    `val_fraction * 2**64`. An unreadable document has no ids; if only part of a document is unreadable, its other pieces are
    written. Calls run in threads: `tokenizers` and tiktoken release the GIL while they encode.

    Args:
        tokenizer: a tokenizer with an end-of-text id.
        params: parameters of the command.
        bos_ids: ids to write before the text of each document.
    """

    def __init__(self, tokenizer: Tokenizer, params: PrepareParams, bos_ids: Sequence[int] = ()) -> None:
        self.params = params
        self._encode_text = fast_encoder(tokenizer) or tokenizer.encode
        self._end = np.array([tokenizer.eos_id], token_dtype(tokenizer.vocab_size))
        self._bos = np.array(bos_ids, self._end.dtype)
        self._val_below = int(params.val_fraction * 2.0**64)

    def encode_batch(self, pieces: Sequence[DocumentPiece]) -> list[EncodedPiece]:
        """Encode pieces."""
        return [self.encode(piece) for piece in pieces]

    def encode(self, piece: DocumentPiece) -> EncodedPiece:
        """Encode a piece; raise `UserError` if it cannot be read or encoded and `on_error` is fail."""
        try:
            text = piece.text()
            ids = self._encode_text(text)
        except UserError as e:
            message = error_message(piece, e)
            if self.params.on_error == "fail":
                raise UserError(f"{message}; {SKIP}") from None
            unreadable = Unreadable(message, piece.file, piece.lost)
            if piece.is_document:
                return _unreadable_document(piece, unreadable)
            return self._encoded(piece, "", self._end[:0])._replace(unreadable=unreadable)
        return self._encoded(piece, text, ids)

    def _encoded(self, piece: DocumentPiece, text: str, ids: np.ndarray) -> EncodedPiece:
        """Return the result for a piece with a text and the ids of the text."""
        data = text.encode()
        own_digest = hashlib.sha256(data).digest()
        return EncodedPiece(
            ids=self._delimited(piece, ids).tobytes(),
            split=self._split(piece.digest or own_digest),
            size=len(data),
            begins_document=piece.is_first,
            bytes_read=piece.bytes_read,
            identity=own_digest if piece.is_document else piece.identity,
            markers=text.count(END_OF_TEXT),
            unwritten="short" if is_short(piece, text, self.params) else "",
        )

    def _delimited(self, piece: DocumentPiece, ids: np.ndarray) -> np.ndarray:
        """Add the end-of-text id before a document (llm.c) or after it (nanogpt), and the ids that begin a document."""
        parts = [ids]
        if piece.is_first:
            parts.insert(0, self._bos)
            if self.params.format == "llm.c":
                parts.insert(0, self._end)
        if piece.is_last and self.params.format == "nanogpt":
            parts.append(self._end)
        return np.concatenate(parts, dtype=self._end.dtype, casting="unsafe")

    def _split(self, digest: bytes) -> SplitName:
        """Return the split of a document."""
        return "val" if int.from_bytes(digest[:8], "big") < self._val_below else "train"


def _unreadable_document(piece: DocumentPiece, unreadable: Unreadable) -> EncodedPiece:
    """Return the result for a complete document that cannot be read or encoded."""
    return EncodedPiece(
        ids=b"",
        split="train",
        size=0,
        begins_document=piece.is_first,
        bytes_read=piece.bytes_read,
        unwritten="unreadable",
        unreadable=unreadable,
    )
