"""Read the documents of all sources in a fixed order and bounded memory."""

from __future__ import annotations

from collections.abc import Iterator, Sequence
from pathlib import Path

from jaxgpt.config import PrepareParams
from jaxgpt.data.cuts import GPT2_CUTS, Cuts, cut
from jaxgpt.data.document_files import read_file_pieces
from jaxgpt.data.document_piece import DocumentPiece, is_short, unreadable
from jaxgpt.data.sources import Source
from jaxgpt.errors import UserError

BEGINNING = 200  # characters of the first document that identify a corpus
TRAIN = b"\xff" * 32  # digest assigned to the first usable document; selects training for any `val_fraction`
SKIP = "to skip such documents, use --on-error skip"


def read_pieces(sources: Sequence[Source], params: PrepareParams, cuts: Cuts) -> Iterator[DocumentPiece]:
    """Yield all documents, with long text files cut at `cuts`; the first document that is not dropped is for training."""
    read = 0
    documents = 0
    for_training = 0  # number of the first document that is not dropped, counted from 1; 0: not found yet
    for path in (path for source in sources for path in source.files):
        for piece in read_file_pieces(path, params, cuts):
            documents += piece.first
            if not for_training and piece.first and _is_usable(piece, params):
                for_training = documents
            yield piece._replace(read=read + piece.read, digest=TRAIN if documents == for_training else piece.digest)
        read += path.stat().st_size


def _is_usable(piece: DocumentPiece, params: PrepareParams) -> bool:
    """Return whether a document that starts with a piece is readable and long enough."""
    try:
        text = piece.text()
    except UserError:
        return False
    return not is_short(piece, text, params)


def check_first(sources: Sequence[Source], params: PrepareParams) -> None:
    """Read the first document of each source; raise `UserError` if it is unreadable."""
    for source in sources:
        for piece in read_file_pieces(source.files[0], params, GPT2_CUTS):
            _text(piece, params)
            break


def beginning(path: Path, params: PrepareParams) -> str:
    """Return the beginning of the first document of a file, without white space; "" if it is short or unreadable."""
    for piece in read_file_pieces(path, params, GPT2_CUTS):
        try:
            text = "".join(piece.text()[: 2 * BEGINNING].split())
        except UserError:
            return ""
        return text[:BEGINNING] if len(text) >= BEGINNING // 4 else ""
    return ""


def sample_text(sources: Sequence[Source], params: PrepareParams, size: int) -> Iterator[list[str]]:
    """Yield about `size` bytes of text in pieces: the beginning of each file, in proportion to its size.

    Raises:
        UserError: if a document is unreadable, unless `on_error` is skip.
    """
    total = sum(source.size for source in sources)
    for path in (path for source in sources for path in source.files):
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
        raise UserError(f"{unreadable(piece, e)}; {SKIP}") from None
