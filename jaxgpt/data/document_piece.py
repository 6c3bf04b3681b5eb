"""Pieces of documents: their text, and the errors of unreadable pieces."""

from __future__ import annotations

import re
from typing import Any, NamedTuple

from jaxgpt.config import PrepareParams
from jaxgpt.data.lenient_json import parse_record
from jaxgpt.errors import UserError, one_line, short_repr

CONVERT = "convert it to UTF-8 text, JSON Lines (.jsonl) or Parquet (.parquet)"
SURROGATE = re.compile("[\ud800-\udfff]")  # JSON can contain halves of characters, such as "\ud83d"


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
    lost: str = "document"  # part that an error makes unreadable: `document`, `file` (complete) or `rest` (of the file)
    identity: bytes = b""  # SHA-256 of the complete document; empty: computed from the text

    def text(self) -> str:
        """Parse the text; raise `UserError` if it cannot be read."""
        value = self._value()
        if isinstance(value, bytes):
            try:
                value = value.decode("utf-8")
            except UnicodeDecodeError as e:
                raise unreadable_error(self.where, e) from None
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


def is_short(piece: DocumentPiece, text: str, params: PrepareParams) -> bool:
    """Return whether a document is dropped because of its length; a document in several pieces is never dropped."""
    return piece.first and piece.last and len(text.strip()) < params.min_characters


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


def unreadable_error(where: str, e: Exception) -> UserError:
    """Return the error for a file or document that cannot be read because of an exception."""
    if isinstance(e, UserError):
        return e
    if isinstance(e, UnicodeDecodeError):
        return UserError(f"{where}: not UTF-8 text: {CONVERT}")
    return UserError(f"cannot read {where}: {one_line(getattr(e, 'strerror', None) or e) or type(e).__name__}")
