"""Samples of the documents of sources: the first document of a source or file, and text to train a tokenizer on."""

from __future__ import annotations

from collections.abc import Iterator, Sequence
from pathlib import Path

from jaxgpt.config import PrepareParams
from jaxgpt.data.prepared.document_files import read_file_pieces
from jaxgpt.data.prepared.document_piece import SKIP, DocumentPiece, error_message
from jaxgpt.data.prepared.documents import files_of
from jaxgpt.data.prepared.sources import Source
from jaxgpt.data.tokenizers.cuts import GPT2_CUTS, cut
from jaxgpt.errors import UserError

BEGINNING = 200  # characters of the first document that identify a corpus


def check_first(sources: Sequence[Source], params: PrepareParams) -> None:
    """Read the first document of each source; raise `UserError` if it is unreadable, unless `on_error` is skip."""
    for source in sources:
        piece = _first_piece(source.files[0], params)
        if piece:
            _text(piece, params)


def beginning(path: Path, params: PrepareParams) -> str:
    """Return the beginning of the first document of a file, without white space; "": it is missing, short or unreadable."""
    piece = _first_piece(path, params)
    if not piece:
        return ""
    try:
        text = piece.text()
    except UserError:
        return ""
    characters = "".join(text[: 2 * BEGINNING].split())
    return characters[:BEGINNING] if len(characters) >= BEGINNING // 4 else ""


def _first_piece(path: Path, params: PrepareParams) -> DocumentPiece | None:
    """Read the first piece of a file; None: the file has no documents."""
    return next(read_file_pieces(path, params, GPT2_CUTS), None)


def sample_text(sources: Sequence[Source], params: PrepareParams, size: int) -> Iterator[list[str]]:
    """Yield about `size` bytes of text in pieces: the beginning of each file, in proportion to its size.

    Raises:
        UserError: if a document is unreadable, unless `on_error` is skip.
    """
    total = sum(source.size for source in sources)
    for path in files_of(sources):
        left = size * path.stat().st_size / total
        for piece in read_file_pieces(path, params, GPT2_CUTS):
            if left <= 0:
                break
            text = _text(piece, params)
            left -= len(text.encode())
            if text:
                yield cut(text, GPT2_CUTS)


def _text(piece: DocumentPiece, params: PrepareParams) -> str:
    """Return the text of a piece, "" if it is skipped; raise `UserError` if it is unreadable and `on_error` is fail."""
    try:
        return piece.text()
    except UserError as e:
        if params.on_error == "skip":
            return ""
        raise UserError(f"{error_message(piece, e)}; {SKIP}") from None
