"""Pieces of documents in a file of any format.

The suffix determines the format:

.jsonl, .ndjson  one document per line, a JSON object
.json            the same, an array of objects, or a single object
.parquet         one document per row; also any file that begins and ends as Parquet files do
other            one document of UTF-8 text, or several with a separator

Text and JSON may be compressed (`files.compressed.compression`).
"""

from __future__ import annotations

import codecs
import io
from collections.abc import Iterable, Iterator, Sequence
from itertools import chain
from pathlib import Path
from typing import BinaryIO

from jaxgpt.config import PrepareParams
from jaxgpt.data.files.compressed import HEAD, compression, inner_name, unpacked
from jaxgpt.data.files.formats import LINES, MissingPackage
from jaxgpt.data.files.json_documents import SPREAD_ERROR, BadArray, array_items, filled_lines, is_spread, json_layout
from jaxgpt.data.prepared.document_piece import Damage, DocumentPiece, not_utf8
from jaxgpt.data.prepared.text_documents import document_identities, read_text_pieces
from jaxgpt.data.tokenizers.cuts import Cuts
from jaxgpt.errors import UserError, one_line, printable, short_repr

PARQUET_BUFFER = 1 << 20  # buffer size of a Parquet file in bytes
ROWS = 64  # rows of a Parquet file to read at a time
PARQUET = b"PAR1"  # first and last bytes of a Parquet file


def read_file_pieces(path: Path, params: PrepareParams, cuts: Cuts) -> Iterator[DocumentPiece]:
    """Yield pieces of a file. The remainder of a damaged file is a single unreadable piece.

    Raises:
        MissingPackage: if a library for the format is not installed; such a file is not reported as damaged.
    """
    where = printable(str(path))
    previous: DocumentPiece | None = None
    try:
        with path.open("rb") as raw:
            for piece in _pieces(raw, path, params, cuts):
                previous = piece._replace(bytes_read=raw.tell(), file=where)
                yield previous
    except MissingPackage:
        raise
    except Exception as e:  # any error of the reading libraries
        error = _read_error(where, e)
        if previous is None:
            yield DocumentPiece(where, None, file=where, damage=Damage(error, "file"))
        else:
            yield _lost_rest(previous, error)


def _read_error(where: str, e: Exception) -> UserError:
    """Return the error for a file that cannot be read because of an exception."""
    if isinstance(e, UserError):
        return e
    if isinstance(e, BadArray):
        return UserError(f"{where}: {e}")
    if isinstance(e, UnicodeDecodeError):
        return not_utf8(where)
    return UserError(f"cannot read {where}: {one_line(getattr(e, 'strerror', None) or e) or type(e).__name__}")


def _lost_rest(previous: DocumentPiece, error: UserError) -> DocumentPiece:
    """Return the unreadable remainder of a file after its last readable piece.

    If the document of that piece is incomplete, the remainder is the end of the document.
    """
    place = previous.where.removeprefix(previous.file).lstrip(", ")
    if not place:
        what = "the rest of this file is lost"
    elif previous.is_last:
        what = f"the rest of this file after {place} is lost"
    else:
        what = f"the rest of this file is lost, including the end of {place}"
    return previous._replace(
        where=previous.file,
        content=None,
        damage=Damage(UserError(f"{error}; {what}"), "rest"),
        is_first=previous.is_last,
        is_last=True,
    )


def _pieces(raw: BinaryIO, path: Path, params: PrepareParams, cuts: Cuts) -> Iterator[DocumentPiece]:
    """Yield pieces of an open file in the format of its name and content."""
    where = printable(str(path))
    head = raw.read(HEAD)
    raw.seek(0)
    suffix = compression(path.name, head)
    name = inner_name(path.name, suffix)
    file = unpacked(raw, suffix, where)
    if name.endswith(".parquet") or _is_parquet(raw, head):
        return _read_parquet(file, where, params.field)
    if name.endswith(LINES):
        return _read_lines(file, where, params.field)
    if not name.endswith(".json"):
        identities: Iterator[bytes] = iter(())
        if params.dedup == "exact":
            identities = document_identities(path, suffix, params.separator)
        return read_text_pieces(file, where, cuts, params.separator, identities)

    layout = json_layout(file)
    file.seek(0)
    match layout:
        case "array":
            return _array_pieces(array_items(file), where, params.field)
        case "object":
            return iter([DocumentPiece(where, file.read().removeprefix(codecs.BOM_UTF8), params.field)])
    return _read_lines(file, where, params.field)


def _is_parquet(raw: BinaryIO, head: bytes) -> bool:
    """Return whether an open file begins and ends as Parquet files do; afterwards, the position is the beginning."""
    if not head.startswith(PARQUET):
        return False
    raw.seek(-len(PARQUET), io.SEEK_END)
    tail = raw.read()
    raw.seek(0)
    return tail == PARQUET


def _array_pieces(items: Iterable[bytes], where: str, field: str) -> Iterator[DocumentPiece]:
    """Yield the documents of an array of JSON objects."""
    for number, item in enumerate(items, 1):
        yield DocumentPiece(f"{where}, item {number}", item, field)


def _read_lines(file: BinaryIO, where: str, field: str) -> Iterator[DocumentPiece]:
    """Yield the documents of a file of JSON Lines, one per line; skip blank lines."""
    lines = filled_lines(file)
    first = next(lines, None)
    if first is None:
        return
    if not first.content.rstrip().endswith(b"}") and is_spread(first.content, file):
        raise UserError(f"{where}, line {first.number}: {SPREAD_ERROR}")
    for number, line in chain([first], lines):
        yield DocumentPiece(f"{where}, line {number}", line, field)


def _read_parquet(file: BinaryIO, where: str, field: str) -> Iterator[DocumentPiece]:
    """Yield the documents of a Parquet file, one per row."""
    try:
        from pyarrow import ArrowNotImplementedError, parquet
    except ImportError:
        raise MissingPackage(f"{where} needs the package pyarrow: pip install 'jaxgpt[data]'") from None

    table = parquet.ParquetFile(file, buffer_size=PARQUET_BUFFER)
    _check_column(table.schema_arrow.names, where, field)
    number = 0
    for batch in table.iter_batches(ROWS, columns=[field]):
        column = batch.column(0)
        try:
            texts = column.cast("binary")  # bytes, for the UTF-8 check in `DocumentPiece.text`
        except ArrowNotImplementedError:
            raise UserError(
                f"cannot read {where}: the column {field!r} has the type {column.type}, not text: choose a column of text "
                "with --field"
            ) from None
        for value in texts.to_pylist():
            yield DocumentPiece(f"{where}, row {number}", value)
            number += 1


def _check_column(names: Sequence[str], where: str, field: str) -> None:
    """Raise `UserError` unless exactly one column of a Parquet file has the name of the field."""
    if field not in names:
        raise UserError(f"{where} has no column {field!r}: choose one of {short_repr(names)} with --field")
    if names.count(field) > 1:
        raise UserError(
            f"{where} has {names.count(field)} columns {field!r}: rename one, or choose a different column with --field"
        )
