"""Count documents and lines, and the duplicates among them, by 64-bit hashes of their contents."""

from __future__ import annotations

import io
from array import array
from collections.abc import Sequence
from typing import NamedTuple

import numpy as np

from jaxgpt.data import Data, Packed, Split, Tokens
from jaxgpt.data.text import Text


class Copies(NamedTuple):
    """The number of items, and of duplicates among them; None: unknown."""

    total: int | None = None
    duplicates: int | None = None


def document_copies(data: Data, splits: Sequence[Split]) -> Copies:
    """Count the conversations, the texts between end-of-text ids, or the files of some splits of data."""
    return _copies(_document_hashes(data, _joined(data, splits)))


def line_copies(text: Text | None) -> Copies:
    """Count the non-blank lines of a text, without surrounding whitespace; unknown for other data."""
    return _copies(None if text is None else _line_hashes(text))


def _copies(hashes: np.ndarray | None) -> Copies:
    """Count the items with these hashes, and the duplicates among them; None: unknown."""
    if hashes is None:
        return Copies()
    return Copies(len(hashes), len(hashes) - len(np.unique(hashes)))


def _joined(data: Data, splits: Sequence[Split]) -> Sequence[Split]:
    """Return token ids that were divided at `data.train_fraction` as one sequence: the end of a split may be in a document."""
    has_validation_files = data.recorded.boundary is not None
    parts = [part for split in splits if isinstance(split, Tokens) for part in split.parts]
    are_tokens = all(isinstance(split, Tokens) for split in splits)
    return [Tokens(parts)] if are_tokens and not has_validation_files else splits


def _document_hashes(data: Data, splits: Sequence[Split]) -> np.ndarray | None:
    """Return hashes of conversations, documents or files; None: unknown boundaries."""
    bounds = [_document_bounds(split, data.tokenizer.end_ids) for split in splits]
    has_ends = data.kind == "conversations" or any(len(each.begins) > 1 for each in bounds)
    if has_ends:
        return _hashes_of_ids(splits, bounds)
    if data.text:
        return _hashes_of_files(data.text)
    return None


class DocumentBounds(NamedTuple):
    """Positions of the documents of a split, int64; an empty document ends where it begins."""

    begins: np.ndarray  # first position of each document
    ends: np.ndarray  # position after the end of each document


def _document_bounds(split: Split, end_ids: tuple[int, ...]) -> DocumentBounds:
    """Find the documents of a split."""
    if isinstance(split, Packed):
        return DocumentBounds(split.begins, split.begins + split.lengths + 1)
    assert isinstance(split, Tokens)
    with_ends = Tokens(split.parts, end_ids=end_ids)
    end_tokens = np.concatenate([np.zeros(0, int), *with_ends.document_ends()])
    return DocumentBounds(np.append(0, end_tokens + 1), np.append(end_tokens, len(split)))


def _hashes_of_ids(splits: Sequence[Split], bounds: Sequence[DocumentBounds]) -> np.ndarray:
    """Return the hash of the ids of each non-empty document."""
    hashes = array("q")
    for split, of_split in zip(splits, bounds, strict=True):
        for begin, end in zip(of_split.begins.tolist(), of_split.ends.tolist(), strict=True):
            if begin < end:
                ids = split.take(begin, end - begin)
                hashes.append(hash(ids.tobytes()))
    return np.frombuffer(hashes, np.int64)


def _hashes_of_files(text: Text) -> np.ndarray:
    """Return the hash of each file of a text."""
    file = io.BytesIO(text.data)
    whole = -1  # the size with which `read` returns all bytes
    sizes = [size for _, size in text.files] or [whole]
    hashes = array("q", (hash(file.read(size)) for size in sizes))
    return np.frombuffer(hashes, np.int64)


def _line_hashes(text: Text) -> np.ndarray:
    """Return the hash of each non-blank line, without surrounding whitespace."""
    lines = map(bytes.strip, io.BytesIO(text.data))
    hashes = array("q", (hash(line) for line in lines if line))
    return np.frombuffer(hashes, np.int64)
