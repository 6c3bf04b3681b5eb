"""Split a stream of text at separators into documents, each in portions of bounded size and in linear time."""

from __future__ import annotations

import io
from collections.abc import Iterable, Iterator
from typing import NamedTuple

BLOCK = 1 << 20  # maximum characters of a portion, and characters to read at a time
BREAKS = "\r\n"


class Portion(NamedTuple):
    """A part of a document."""

    text: str
    is_last: bool  # whether the document ends with this portion


def read_portions(file: io.TextIOBase, separator: str) -> Iterator[Portion]:
    """Yield the documents of a text in portions: all portions of a document except the last have `BLOCK` characters.

    With a separator, line breaks at the beginning and the end of documents are removed. An empty document is a single
    empty portion.

    Args:
        file: the text.
        separator: text between two documents; empty: the file is one document, including its line breaks.
    """
    if not separator:
        return _whole(file)
    return _in_blocks(_without_outer_breaks(_separated(file, separator)))


def _whole(file: io.TextIOBase) -> Iterator[Portion]:
    """Yield the text as one document; each block is yielded before the next is read, which may be damaged."""
    block = file.read(BLOCK)
    while len(block) == BLOCK:
        yield Portion(block, is_last=False)
        block = file.read(BLOCK)
    yield Portion(block, is_last=True)


def _separated(file: io.TextIOBase, separator: str) -> Iterator[Portion]:
    """Yield the text between separators, in portions of any size."""
    may_begin = len(separator) - 1  # a separator may begin in this number of characters at the end of a block
    rest = ""
    block = file.read(BLOCK)
    while block:
        *documents, rest = (rest + block).split(separator)
        for document in documents:
            yield Portion(document, is_last=True)

        end = max(len(rest) - may_begin, 0)
        yield Portion(rest[:end], is_last=False)
        rest = rest[end:]
        block = file.read(BLOCK)
    yield Portion(rest, is_last=True)


def _without_outer_breaks(portions: Iterable[Portion]) -> Iterator[Portion]:
    """Remove the line breaks at the beginning and the end of each document."""
    is_begin = True
    breaks = list[str]()  # trailing line breaks so far; part of the document if other text follows
    for portion in portions:
        text = portion.text.lstrip(BREAKS) if is_begin else portion.text
        without_breaks = text.rstrip(BREAKS)
        if without_breaks:
            yield Portion("".join(breaks) + without_breaks, is_last=False)
            breaks = []
            is_begin = False
        breaks.append(text[len(without_breaks) :])

        if portion.is_last:
            yield Portion("", is_last=True)
            breaks = []
            is_begin = True


def _in_blocks(portions: Iterable[Portion]) -> Iterator[Portion]:
    """Divide each document into portions of `BLOCK` characters and a last portion of at most `BLOCK` characters."""
    text = ""
    for portion in portions:
        text += portion.text
        begin = 0
        while len(text) - begin > BLOCK:
            yield Portion(text[begin : begin + BLOCK], is_last=False)
            begin += BLOCK
        text = text[begin:]

        if portion.is_last:
            yield Portion(text, is_last=True)
            text = ""
