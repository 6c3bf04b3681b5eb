"""Read documents in a fixed order and bounded memory.

The suffix determines the format. `.jsonl`, `.ndjson`: one document per line, a JSON object; `.json`: the same, or an array of
objects; `.parquet`: one document per row. Any other file is one document of UTF-8 text, or several with a separator. Text and
JSON may be compressed (`formats.compression`).
"""

from __future__ import annotations

import codecs
import hashlib
import io
import re
from collections.abc import Iterable, Iterator, Sequence
from pathlib import Path
from typing import Any, BinaryIO, NamedTuple

from jaxgpt.config import PrepareParams
from jaxgpt.data.cuts import GPT2_CUTS, Cuts, cut
from jaxgpt.data.formats import (
    HEAD,
    LINES,
    SPREAD_ERROR,
    MissingPackage,
    array_items,
    compression,
    inner_name,
    is_spread,
    json_layout,
    unpacked,
)
from jaxgpt.data.records import parse_record
from jaxgpt.data.sources import Source
from jaxgpt.errors import UserError, one_line, printable, short_repr

BLOCK = 1 << 20  # characters of a text file to read at a time; buffer size of a Parquet file in bytes
ROWS = 64  # rows of a Parquet file to read at a time
UNCUT = 1 << 21  # maximum characters of a text file without a safe cut; encoding them takes 0.4 GB
BEGINNING = 200  # characters of the first document that identify a corpus
TRAIN = b"\xff" * 32  # digest assigned to the first document; selects training for any `val_fraction`
CONVERT = "convert it to UTF-8 text, JSON Lines (.jsonl) or Parquet (.parquet)"
PARQUET = b"PAR1"  # first and last bytes of a Parquet file
SURROGATE = re.compile("[\ud800-\udfff]")  # JSON can contain halves of characters, such as "\ud83d"
SKIP = "to skip such documents, use --on-error skip"


class DocumentPiece(NamedTuple):
    """A document, or part of a text file. Workers call `text` to parse it."""

    where: str  # file, and line or row, for messages
    content: str | bytes | UserError | None  # text or JSON object; error of an unreadable document; None: Parquet null
    field: str = ""  # field with the text in the JSON object; empty: the content is the text
    first: bool = True  # whether the document starts with this piece
    last: bool = True  # whether the document ends with this piece
    digest: bytes = b""  # SHA-256 that selects the split of the document; empty: computed from the text
    read: int = 0  # bytes of the sources read from disk so far
    file: str = ""  # path of the file
    lost: str = "document"  # loss by an error: the document, the complete `file`, or the `rest` of the file
    identity: bytes = b""  # SHA-256 of the complete document; empty: computed from the text

    def text(self) -> str:
        """Parse the text; raise `UserError` if it cannot be read."""
        value = self._value()
        if isinstance(value, bytes):
            try:
                value = value.decode("utf-8")
            except UnicodeDecodeError as e:
                raise _unreadable(self.where, e) from None
        what = f"the field {self.field!r}" if self.field else "the text"
        if not isinstance(value, str):
            raise UserError(f"{self.where}: {what} must be a string, not {short_repr(value)}")
        if self.field and not value.isascii() and SURROGATE.search(value):
            raise UserError(f"{self.where}: {what} has an unpaired surrogate, which is not a character: remove it")
        if "\0" in value:
            raise UserError(f"{self.where}: not text (it has a NUL): {CONVERT}")
        return value

    def _value(self) -> Any:
        """Return the content, or its field; raise `UserError` if the content is an error or has no such field."""
        content: Any = self.content
        if isinstance(content, UserError):
            raise content
        if not self.field:
            return content
        record = parse_record(content, self.where)
        if not isinstance(record, dict):
            raise UserError(f"{self.where}: expected an object, found {type(record).__name__}")
        if self.field not in record:
            raise UserError(
                f"{self.where}: no field {self.field!r} in {short_repr([*record])}: choose a field with --field"
            )
        return record[self.field]


def unreadable(piece: DocumentPiece, error: UserError) -> str:
    """Return the message for an unreadable piece, with the file and the line or row."""
    if piece.lost != "rest":
        return str(error) if piece.where in str(error) else f"{piece.where}: {error}"

    # The piece is at the place of the last piece that was read: its document is complete, or has lost its end.
    place = piece.where.removeprefix(piece.file).lstrip(", ")
    if not place:
        return f"{error}; the rest of this file is lost"
    if piece.first:
        return f"{error}; the rest of this file after {place} is lost"
    return f"{error}; the rest of this file is lost, including the end of {place}"


def read_pieces(sources: Sequence[Source], params: PrepareParams, cuts: Cuts) -> Iterator[DocumentPiece]:
    """Yield all documents, with long text files cut at `cuts`. The first document is always for training."""
    read = documents = 0
    for path in (path for source in sources for path in source.files):
        for piece in _read_file(path, params, cuts):
            documents += piece.first
            yield piece._replace(read=read + piece.read, digest=TRAIN if documents == 1 else piece.digest)
        read += path.stat().st_size


def check_first(sources: Sequence[Source], params: PrepareParams) -> None:
    """Read the first document of each source; raise `UserError` if it is unreadable."""
    for source in sources:
        for piece in _read_file(source.files[0], params, GPT2_CUTS):
            _text(piece, params)
            break


def beginning(path: Path, params: PrepareParams) -> str:
    """Return the beginning of the first document of a file, without white space; "" if it is short or unreadable."""
    for piece in _read_file(path, params, GPT2_CUTS):
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
        for piece in _read_file(path, params, GPT2_CUTS):
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


def _read_file(path: Path, params: PrepareParams, cuts: Cuts) -> Iterator[DocumentPiece]:
    """Yield pieces of a file. The remainder of a damaged file is a single unreadable piece.

    Raises:
        MissingPackage: if a library for the format is not installed; the file is not damaged.
    """
    where = printable(str(path))
    last: DocumentPiece | None = None
    try:
        with path.open("rb") as raw:
            for piece in _pieces(raw, path, params, cuts):
                last = piece._replace(read=raw.tell(), file=where)
                yield last
    except MissingPackage:
        raise
    except Exception as e:  # any error of the reading libraries
        content = _unreadable(where, e)
        if last is None:
            yield DocumentPiece(where, content, file=where, lost="file")
            return
        lost = "rest" if last.lost == "document" else "file"
        yield last._replace(content=content, first=last.last, last=True, lost=lost)


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
            identities = _identities(path, suffix, params.separator)
        return _read_text(file, where, cuts, params.separator, identities)

    layout = json_layout(file)
    file.seek(0)
    match layout:
        case "array":
            return _numbered(array_items(file, where), where, "item", params.field)
        case "object":
            return iter([DocumentPiece(where, file.read().removeprefix(codecs.BOM_UTF8), params.field)])
    return _read_lines(file, where, params.field)


def _is_parquet(raw: BinaryIO, head: bytes) -> bool:
    """Return whether an open file begins and ends as Parquet files do."""
    if not head.startswith(PARQUET):
        return False
    raw.seek(-len(PARQUET), io.SEEK_END)
    tail = raw.read()
    raw.seek(0)
    return tail == PARQUET


def _read_text(
    file: BinaryIO, where: str, cuts: Cuts, separator: str, identities: Iterator[bytes]
) -> Iterator[DocumentPiece]:
    """Yield a text in pieces of about `BLOCK` characters; the digest of the first block selects the split.

    Args:
        identities: `DocumentPiece.identity` of each document with text; may end early.
    """
    first = True
    rest = ""
    digest = b""  # SHA-256 of the first portion of the document
    identity = b""
    number = 1
    with io.TextIOWrapper(file, "utf-8-sig", newline="") as text:
        for portion, is_end in _portions(text, separator):
            if first and not portion and not rest:
                continue
            if not digest:
                digest = hashlib.sha256(portion.encode()).digest()
                identity = next(identities, b"")

            # Yield the text up to the last cut; the rest follows with the next portion.
            place = f"{where}, document {number}" if separator else where
            *pieces, rest = cut(rest + portion, cuts)
            if len(rest) > UNCUT:
                raise UserError(
                    f"{place}: {len(rest):,} characters without a place to cut them: use text with spaces or line breaks, or "
                    f"a tokenizer that splits words as GPT-2, Llama 3, Qwen or SmolLM2 does"
                )
            if pieces:
                piece = "".join(pieces)
                yield DocumentPiece(place, piece, first=first, last=False, digest=digest, identity=identity)
                first = False
            if is_end:
                yield DocumentPiece(place, rest, first=first, last=True, digest=digest, identity=identity)
                first = True
                rest = ""
                digest = b""
                number += 1


def _portions(text: io.TextIOBase, separator: str) -> Iterator[tuple[str, bool]]:
    """Yield a text in portions of at most `BLOCK` characters, and whether a document ends with each portion.

    All portions of a document except the last have exactly `BLOCK` characters. Line breaks around a separator belong to no
    document.
    """
    buffer = ""
    is_begin = True  # whether the buffer is the beginning of a document
    block = text.read(BLOCK)
    while block:
        buffer += block
        documents = buffer.split(separator) if separator else [buffer]
        for document in documents[:-1]:
            document = document.rstrip("\r\n")
            yield from _ended(document.lstrip("\r\n") if is_begin else document)
            is_begin = True

        buffer = documents[-1]
        if separator and is_begin:
            buffer = buffer.lstrip("\r\n")
        while _has_block(buffer, separator):
            yield buffer[:BLOCK], False
            buffer = buffer[BLOCK:]
            is_begin = False
        block = text.read(BLOCK)
    yield from _ended(buffer.rstrip("\r\n") if separator else buffer)


def _has_block(buffer: str, separator: str) -> bool:
    """Return whether the first `BLOCK` characters of a buffer belong to its document.

    A separator may begin at the end of the buffer. The line breaks before it belong to no document.
    """
    after = len(buffer) - len(separator)
    if not separator or after <= BLOCK:
        return not separator and len(buffer) >= BLOCK
    return buffer[BLOCK:after].strip("\r\n") != ""


def _ended(document: str) -> Iterator[tuple[str, bool]]:
    """Yield the end of a document in portions; an empty document is a single empty portion."""
    for start in range(0, max(len(document), 1), BLOCK):
        yield document[start : start + BLOCK], start + BLOCK >= len(document)


def _identities(path: Path, suffix: str, separator: str) -> Iterator[bytes]:
    """Yield the SHA-256 of each document with text of a file, ahead of the reader of its pieces.

    The generator ends at an error, which the reader of the pieces reports.
    """
    digest = hashlib.sha256()
    size = 0
    try:
        with path.open("rb") as raw, io.TextIOWrapper(unpacked(raw, suffix, ""), "utf-8-sig", newline="") as text:
            for portion, is_end in _portions(text, separator):
                digest.update(portion.encode())
                size += len(portion)
                if is_end and size:
                    yield digest.digest()
                    digest = hashlib.sha256()
                    size = 0
    except Exception:  # any error of the reading libraries
        return


def _numbered(items: Iterable[bytes], where: str, noun: str, field: str) -> Iterator[DocumentPiece]:
    for number, item in enumerate(items, 1):
        yield DocumentPiece(f"{where}, {noun} {number}", item, field)


def _read_lines(file: BinaryIO, where: str, field: str) -> Iterator[DocumentPiece]:
    is_first = True
    for number, line in enumerate(file, 1):
        if number == 1:
            line = line.removeprefix(codecs.BOM_UTF8)
        if not line.strip():
            continue
        if is_first and not line.rstrip().endswith(b"}") and is_spread(line, file):
            raise UserError(f"{where}, line {number}: {SPREAD_ERROR}")
        is_first = False
        yield DocumentPiece(f"{where}, line {number}", line, field)


def _read_parquet(file: BinaryIO, where: str, field: str) -> Iterator[DocumentPiece]:
    try:
        from pyarrow import ArrowNotImplementedError, parquet
    except ImportError:
        raise MissingPackage(f"{where} needs the package pyarrow: pip install 'jaxgpt[data]'") from None

    table = parquet.ParquetFile(file, buffer_size=BLOCK)
    names = table.schema_arrow.names
    if field not in names:
        raise UserError(f"{where} has no column {field!r}: choose one of {short_repr(names)} with --field")
    if names.count(field) > 1:
        raise UserError(
            f"{where} has {names.count(field)} columns {field!r}: rename one, or choose another with --field"
        )

    number = 0
    for batch in table.iter_batches(ROWS, columns=[field]):
        column = batch.column(0)
        try:
            texts = column.cast("binary")  # bytes, for the UTF-8 check in `DocumentPiece.text`
        except ArrowNotImplementedError:
            raise UserError(
                f"cannot read {where}: the column {field!r} has the type {column.type}, not text: choose a column of text "
                f"with --field"
            ) from None
        for value in texts.to_pylist():
            yield DocumentPiece(f"{where}, row {number}", value)
            number += 1


def _unreadable(where: str, e: Exception) -> UserError:
    if isinstance(e, UserError):
        return e
    if isinstance(e, UnicodeDecodeError):
        return UserError(f"{where}: not UTF-8 text: {CONVERT}")
    return UserError(f"cannot read {where}: {one_line(getattr(e, 'strerror', None) or e) or type(e).__name__}")
