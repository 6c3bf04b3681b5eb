"""Read the documents of all sources in a fixed order and bounded memory."""

from __future__ import annotations

from collections.abc import Iterator, Sequence
from pathlib import Path

from jaxgpt.config import PrepareParams
from jaxgpt.data.prepared.document_files import read_file_pieces
from jaxgpt.data.prepared.document_piece import DocumentPiece, error_message, is_short
from jaxgpt.data.prepared.sources import Source
from jaxgpt.data.tokenizers.cuts import GPT2_CUTS, Cuts, cut
from jaxgpt.errors import UserError

BEGINNING = 200  # characters of the first document that identify a corpus
TRAIN = b"\xff" * 32  # digest assigned to the first usable document; selects training for any `val_fraction`
SKIP = "to skip such documents, use --on-error skip"  # end of messages


def read_pieces(sources: Sequence[Source], params: PrepareParams, cuts: Cuts) -> Iterator[DocumentPiece]:
    """Yield all documents, with long text files cut at `cuts`; the first document that is not dropped is for training."""
    bytes_before = 0  # size of the files before the current one
    is_found = False  # whether a usable document was found
    is_for_training = False  # whether the current document is the first usable document
    for path in _files(sources):
        for piece in read_file_pieces(path, params, cuts):
            if piece.is_first:
                is_for_training = not is_found and _is_usable(piece, params)
                is_found = is_found or is_for_training
            digest = TRAIN if is_for_training else piece.digest
            yield piece._replace(bytes_read=bytes_before + piece.bytes_read, digest=digest)
        bytes_before += path.stat().st_size


def _files(sources: Sequence[Source]) -> Iterator[Path]:
    """Yield the files of all sources."""
    for source in sources:
        yield from source.files


def _is_usable(piece: DocumentPiece, params: PrepareParams) -> bool:
    """Return whether a document that starts with a piece is readable and long enough."""
    try:
        text = piece.text()
    except UserError:
        return False
    return not is_short(piece, text, params)


def check_first(sources: Sequence[Source], params: PrepareParams) -> None:
    """Read the first document of each source; raise `UserError` if it is unreadable, unless `on_error` is skip."""
    for source in sources:
        piece = _first_piece(source.files[0], params)
        if piece:
            _text(piece, params)


def beginning(path: Path, params: PrepareParams) -> str:
    """Return the beginning of the first document of a file, without white space; "": a short or unreadable document."""
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
    for path in _files(sources):
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
