"""Pieces of documents: their text, or why it cannot be read."""

from __future__ import annotations

import re
from typing import Any, Literal, NamedTuple

from jaxgpt.config import PrepareParams
from jaxgpt.data.files.lenient_json import parse_record
from jaxgpt.errors import UserError, short_repr

CONVERT = "convert it to UTF-8 text, JSON Lines (.jsonl) or Parquet (.parquet)"
SKIP = "to skip such documents, use --on-error skip"  # end of messages of unreadable documents
SURROGATE = re.compile("[\ud800-\udfff]")  # JSON can contain halves of characters, such as "\ud83d"

# The part that an error makes unreadable: a document, a complete file, or the rest of a file.
Lost = Literal["document", "file", "rest"]


class Damage(NamedTuple):
    """An error of reading a file, after which the file has no more pieces."""

    error: UserError  # its message names the file and what is lost
    lost: Lost


class Unreadable(NamedTuple):
    """An unreadable document, file or remainder of a file."""

    message: str  # error, with the file and the line or row
    file: str  # path of the file
    lost: Lost


class DocumentPiece(NamedTuple):
    """A document, part of a text file, or an unreadable part of a file. Workers call `text` to parse it."""

    where: str  # file, and line or row, for messages
    content: str | bytes | None  # text or JSON object; None: Parquet null, or unreadable
    field: str = ""  # field with the text in the JSON object; empty: the content is the text
    is_first: bool = True  # whether the document starts with this piece
    is_last: bool = True  # whether the document ends with this piece
    digest: bytes = b""  # SHA-256 that selects the split of the document; empty: computed from the text
    identity: bytes = b""  # SHA-256 of the complete document, read only if it has several pieces; empty: unknown
    damage: Damage | None = None  # None: the file could be read up to the end of this piece
    # Set by `read_file_pieces`:
    file: str = ""  # path of the file
    bytes_read: int = 0  # bytes read from disk so far: of the file; after `read_pieces`, of all sources

    @property
    def is_document(self) -> bool:
        """Whether the piece is a complete document."""
        return self.is_first and self.is_last

    @property
    def lost(self) -> Lost:
        """The part that an error in `text` makes unreadable."""
        return self.damage.lost if self.damage else "document"

    def text(self) -> str:
        """Parse the text; raise `UserError` if it cannot be read."""
        value = self._value()
        if isinstance(value, bytes):
            try:
                value = value.decode("utf-8")
            except UnicodeDecodeError:
                raise not_utf8(self.where) from None
        what = f"the field {self.field!r}" if self.field else "the text"
        if not isinstance(value, str):
            raise UserError(f"{self.where}: {what} must be a string, not {short_repr(value)}")
        if self.field and not value.isascii() and SURROGATE.search(value):
            raise UserError(f"{self.where}: {what} has an unpaired surrogate, which is not a character: remove it")
        if "\0" in value:
            raise UserError(f"{self.where}: not text (it has a NUL): {CONVERT}")
        return value

    def _value(self) -> Any:
        """Return the content, or its field; raise `UserError` if the piece is unreadable or has no such field."""
        if self.damage:
            raise self.damage.error
        if not self.field:
            return self.content
        assert self.content is not None  # Parquet files have no JSON objects
        record = parse_record(self.content, self.where)
        if not isinstance(record, dict):
            raise UserError(f"{self.where}: expected an object, found {type(record).__name__}")
        if self.field not in record:
            raise UserError(
                f"{self.where}: no field {self.field!r} in {short_repr([*record])}: choose a field with --field"
            )
        return record[self.field]


def is_short(piece: DocumentPiece, text: str, params: PrepareParams) -> bool:
    """Return whether a document is dropped because of its length; a document in several pieces is never dropped."""
    return piece.is_document and len(text.strip()) < params.min_characters


def error_message(piece: DocumentPiece, error: UserError) -> str:
    """Return the message for the error of a piece, with the file and the line or row."""
    return str(error) if piece.where in str(error) else f"{piece.where}: {error}"


def not_utf8(where: str) -> UserError:
    """Return the error for a file or document that is not UTF-8 text."""
    return UserError(f"{where}: not UTF-8 text: {CONVERT}")
