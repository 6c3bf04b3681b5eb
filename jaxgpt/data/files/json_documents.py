"""JSON files with documents: detect the layout, and split an array into its items, unparsed and in bounded memory."""

from __future__ import annotations

import codecs
import json
import re
from collections.abc import Iterator
from typing import BinaryIO, Literal, NamedTuple

CHUNK = 1 << 16  # minimum bytes of an array to read at a time
SPREAD = 1 << 26  # maximum bytes to read to find the end of an object
SPREAD_ERROR = (
    "one JSON object is spread over several lines: write one object per line (json.dumps without indent), or an array of "
    "objects in a .json file"
)
# A complete string, the quote of an incomplete string, a bracket or a comma: they determine where an item ends.
TOKEN = re.compile(rb'"(?:[^"\\]|\\.)*+"|["\[\]{},]', re.DOTALL)
DEPTHS = {b"[": 1, b"{": 1, b"]": -1, b"}": -1}  # change of the number of open brackets


class BadArray(ValueError):
    """The error for a JSON array that has no end, or is followed by other text."""


class Line(NamedTuple):
    """A non-blank line of a file."""

    number: int  # number in the file, beginning at 1
    content: bytes  # includes the line break, if any


def begins_array(file: BinaryIO) -> bool:
    """Return whether an open file begins a JSON array; afterwards, the position is the beginning of the file.

    Only the first bytes are read, because an array may be a single long line.
    """
    file.seek(0)
    if file.read(len(codecs.BOM_UTF8)) != codecs.BOM_UTF8:
        file.seek(0)
    byte = file.read(1)
    while byte.isspace():
        byte = file.read(1)
    file.seek(0)
    return byte == b"["


def json_layout(file: BinaryIO) -> Literal["array", "lines", "object"]:
    """Return the layout of a `.json` file: `array`, `lines` (one object per line) or `object`."""
    if begins_array(file):
        return "array"
    first = next(filled_lines(file), None)
    if first is None or first.content.rstrip().endswith(b"}"):
        return "lines"
    return "object"


def filled_lines(file: BinaryIO) -> Iterator[Line]:
    """Yield the non-blank lines of an open file, without its byte-order mark."""
    for number, line in enumerate(file, 1):
        content = line.removeprefix(codecs.BOM_UTF8) if number == 1 else line
        if content.strip():
            yield Line(number, content)


def is_spread(line: bytes, file: BinaryIO) -> bool:
    """Return whether a line begins a JSON object that ends in a later line; the position in the file stays the same."""
    if not line.lstrip().startswith(b"{"):
        return False
    position = file.tell()
    text = (line + file.read(SPREAD)).decode("utf-8", "replace").lstrip()
    file.seek(position)
    try:
        _, end = json.JSONDecoder().raw_decode(text)
    except (ValueError, RecursionError):
        return False
    return "\n" in text[:end]


def array_items(file: BinaryIO) -> Iterator[bytes]:
    """Yield the items of a JSON array, unparsed; memory is bounded by the largest item.

    Raises:
        BadArray: if the array has no end, or is followed by other text.
    """
    byte = file.read(1)
    while byte and byte != b"[":  # white space and a byte-order mark
        byte = file.read(1)
    if not byte:
        return

    splitter = _ItemSplitter()
    while True:
        yield from splitter.items()
        if splitter.depth == 0:
            break
        # Read as many bytes as the unfinished item has, so that every byte is scanned only a few times.
        block = file.read(max(CHUNK, splitter.unfinished))
        if not block:
            raise BadArray("the array of the .json file has no end: download or write the file again")
        splitter.append(block)
    if splitter.rest.strip() or file.read(CHUNK).strip():
        raise BadArray("text after the end of the array: write one object per line (.jsonl)")


class _ItemSplitter:
    """Splits a JSON array, which is appended in blocks, into its items.

    Attributes:
        depth: number of open brackets before the next token, including the bracket of the array; 0: the array has ended.
    """

    def __init__(self) -> None:
        self.depth = 1
        self._text = b""  # text of the array, from the beginning of the current item or before
        self._begin = 0  # position of the current item
        self._place = 0  # position of the next token

    @property
    def unfinished(self) -> int:
        """Number of bytes of the current item."""
        return len(self._text) - self._begin

    @property
    def rest(self) -> bytes:
        """Text after the last token."""
        return self._text[self._place :]

    def append(self, block: bytes) -> None:
        """Append text of the array, and drop the items before the current one."""
        self._text = self._text[self._begin :] + block
        self._place -= self._begin
        self._begin = 0

    def items(self) -> Iterator[bytes]:
        """Yield the items that end in the text so far."""
        for found in TOKEN.finditer(self._text, self._place):
            token = found[0]
            if token == b'"':
                return  # a string without its end
            self._place = found.end()
            if len(token) > 1:
                continue  # a complete string
            self.depth += DEPTHS.get(token, 0)
            if self.depth == 0 or (self.depth == 1 and token == b","):
                item = self._text[self._begin : found.start()].strip()
                self._begin = self._place
                if item:
                    yield item
            if self.depth == 0:
                return
