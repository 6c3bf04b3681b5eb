"""Documents of a text file, in pieces: the complete file, or the texts between separators."""

from __future__ import annotations

import hashlib
import io
from collections.abc import Iterator
from pathlib import Path
from typing import BinaryIO

from jaxgpt.data.files.compressed import unpacked
from jaxgpt.data.prepared.document_piece import DocumentPiece
from jaxgpt.data.prepared.text_portions import read_portions
from jaxgpt.data.tokenizers.cuts import Cuts, cut
from jaxgpt.errors import UserError

UNCUT = 1 << 21  # maximum characters of a text file without a safe cut; encoding them takes 0.4 GB of memory


def read_text_pieces(
    file: BinaryIO, where: str, cuts: Cuts, separator: str, identities: Iterator[bytes]
) -> Iterator[DocumentPiece]:
    """Yield the non-empty documents of a text in pieces of about `text_portions.BLOCK` characters.

    The digest of the first portion of a document selects its split.

    Args:
        file: the unpacked bytes of the text.
        where: path of the file, for messages.
        cuts: pattern of safe cuts.
        separator: text between documents; empty: the file is one document.
        identities: `DocumentPiece.identity` of each non-empty document; ends early if the file is damaged.

    Raises:
        UserError: if more than `UNCUT` characters have no safe cut.
    """
    number = 0
    document: _OpenDocument | None = None
    with io.TextIOWrapper(file, "utf-8-sig", newline="") as text:
        for portion in read_portions(text, separator):
            if document is None:
                if not portion.text:
                    continue  # an empty document
                number += 1
                place = f"{where}, document {number}" if separator else where
                digest = hashlib.sha256(portion.text.encode()).digest()
                document = _OpenDocument(place, digest, next(identities, b""))

            piece = document.append(portion.text, cuts)
            if piece:
                yield piece
            if portion.is_last:
                yield document.last_piece()
                document = None


class _OpenDocument:
    """A document that is read in portions, and yielded in pieces that end at safe cuts."""

    def __init__(self, where: str, digest: bytes, identity: bytes) -> None:
        self._where = where
        self._digest = digest
        self._identity = identity
        self._is_first = True  # whether the next piece is the first
        self._rest = ""  # text after the last cut

    def append(self, text: str, cuts: Cuts) -> DocumentPiece | None:
        """Append a portion; return the text up to the last cut as a piece, or None without a cut."""
        *pieces, self._rest = cut(self._rest + text, cuts)
        if len(self._rest) > UNCUT:
            raise UserError(
                f"{self._where}: {len(self._rest):,} characters without a place to cut them: use text with spaces or line "
                "breaks, or a tokenizer that splits words as GPT-2, Llama 3, Qwen or SmolLM2 does"
            )
        if not pieces:
            return None
        piece = self._piece("".join(pieces), is_last=False)
        self._is_first = False
        return piece

    def last_piece(self) -> DocumentPiece:
        """Return the text after the last cut."""
        return self._piece(self._rest, is_last=True)

    def _piece(self, text: str, *, is_last: bool) -> DocumentPiece:
        return DocumentPiece(
            self._where, text, is_first=self._is_first, is_last=is_last, digest=self._digest, identity=self._identity
        )


def document_identities(path: Path, suffix: str, separator: str) -> Iterator[bytes]:
    """Yield the SHA-256 of each non-empty document of a file, before the pieces of the document are read.

    The generator ends at an error, which the reader of the pieces reports.

    Args:
        path: the file.
        suffix: compression of the file, from `files.compressed.compression`.
        separator: text between documents; empty: the file is one document.
    """
    digest = hashlib.sha256()
    is_empty = True
    try:
        with path.open("rb") as raw, io.TextIOWrapper(unpacked(raw, suffix, ""), "utf-8-sig", newline="") as text:
            for portion in read_portions(text, separator):
                digest.update(portion.text.encode())
                is_empty = is_empty and not portion.text
                if portion.is_last and not is_empty:
                    yield digest.digest()
                    digest = hashlib.sha256()
                    is_empty = True
    except Exception:  # any error of the reading libraries
        return
