"""Read the documents of all sources in a fixed order and bounded memory."""

from __future__ import annotations

from collections.abc import Iterator, Sequence
from pathlib import Path

from jaxgpt.config import PrepareParams
from jaxgpt.data.prepared.document_files import read_file_pieces
from jaxgpt.data.prepared.document_piece import DocumentPiece, is_short
from jaxgpt.data.prepared.sources import Source
from jaxgpt.data.tokenizers.cuts import Cuts
from jaxgpt.errors import UserError

TRAIN = b"\xff" * 32  # digest assigned to the first usable document; selects training for any `val_fraction`


def read_pieces(sources: Sequence[Source], params: PrepareParams, cuts: Cuts) -> Iterator[DocumentPiece]:
    """Yield the pieces of all documents; long text files are cut at `cuts`. The first usable document is for training."""
    bytes_before = 0  # size of the files before the current one
    is_found = False  # whether a usable document was found
    is_for_training = False  # whether the current document is the first usable document
    for path in files_of(sources):
        for piece in read_file_pieces(path, params, cuts):
            if piece.is_first:
                is_for_training = not is_found and _is_usable(piece, params)
                is_found = is_found or is_for_training
            digest = TRAIN if is_for_training else piece.digest
            yield piece._replace(bytes_read=bytes_before + piece.bytes_read, digest=digest)
        bytes_before += path.stat().st_size


def files_of(sources: Sequence[Source]) -> Iterator[Path]:
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
