"""Token ids: a sequence in memory or in memory-mapped files, and its windows."""

from __future__ import annotations

import hashlib
import itertools
import mmap
from bisect import bisect_right
from collections.abc import Iterator, Sequence
from typing import Any, ClassVar, Protocol

import numpy as np

from jaxgpt.errors import UserError

BLOCK = 1 << 20  # ids to read at a time
HASHED_IDS = 1 << 14  # ids per block of a fingerprint
HASHED_BLOCKS = 256  # maximum number of blocks


class Split(Protocol):
    """The interface of the token ids of a split, which are read as windows or other rows."""

    @property
    def has_documents(self) -> bool:
        """Whether the rows of windows have the shape `[T, 3]` (input, target, document id) instead of `[T + 1]`."""
        ...

    @property
    def indexed(self) -> bool:
        """Whether the start of a window is its index, as for packed documents or pairs, instead of a position in the ids."""
        ...

    def __len__(self) -> int:
        """Return the number of ids."""
        ...

    def take(self, start: int, n: int) -> np.ndarray:
        """Return a copy of the n ids from index `start`, int32."""
        ...

    def window_count(self, block_size: int) -> int:
        """Return the number of windows to train on, which start at 0, 1, ...; 0 or negative: the split is too short."""
        ...

    def eval_starts(self, block_size: int, stride: int) -> Sequence[int] | np.ndarray:
        """Return the starts of the windows of an evaluation: `stride` apart or, if `indexed`, all windows."""
        ...

    def windows(self, starts_B: np.ndarray, block_size: int) -> Any:
        """Read the windows at `starts_B`: an array `[B, ...]`, or a dict of such arrays."""
        ...


class Tokens:
    """A sequence of token ids, in memory or in memory-mapped files.

    Attributes:
        parts: arrays; their concatenation is the sequence.
        vocab_size: size of the vocabulary; reading an id outside it is an error.
        end_ids: ids that end a document; empty: documents are not separated.
        first_id: beginning-of-text id, which replaces the first id of each window (an input only); None: windows are
            unchanged.
    """

    indexed: ClassVar[bool] = False

    def __init__(
        self,
        parts: Sequence[np.ndarray],
        vocab_size: int = 2**31,
        end_ids: tuple[int, ...] = (),
        first_id: int | None = None,
    ) -> None:
        self.parts = [p for p in parts if len(p)]
        self.vocab_size = vocab_size
        self.end_ids = end_ids
        self.first_id = first_id
        self._part_ends = list(itertools.accumulate(map(len, self.parts)))  # number of ids up to the end of each part

    def __len__(self) -> int:
        return self._part_ends[-1] if self.parts else 0

    @property
    def has_documents(self) -> bool:
        """Whether windows have the shape `[T, 3]` (input, target, document id) instead of `[T + 1]`."""
        return bool(self.end_ids)

    def pieces(self, start: int, n: int) -> Iterator[np.ndarray]:
        """Yield views of the n ids from index `start`, one for each part that overlaps this range."""
        index = bisect_right(self._part_ends, start)
        while n > 0:
            part = self.parts[index]
            first = start - (self._part_ends[index] - len(part))
            piece = part[first : first + n]
            yield piece
            start += len(piece)
            n -= len(piece)
            index += 1

    def split(self, at: int) -> tuple[Tokens, Tokens]:
        """Split into the ids before index `at` and the other ids."""
        before = list(self.pieces(0, at))
        after = list(self.pieces(at, len(self) - at))
        return self._with_parts(before), self._with_parts(after)

    def with_ends(self, end_ids: tuple[int, ...]) -> Tokens:
        """Return the same ids with `end_ids` as the ends of documents."""
        return Tokens(self.parts, self.vocab_size, end_ids, self.first_id)

    def _with_parts(self, parts: list[np.ndarray]) -> Tokens:
        return Tokens(parts, self.vocab_size, self.end_ids, self.first_id)

    def take(self, start: int, n: int) -> np.ndarray:
        """Return a copy of the n ids from index `start`, int32.

        Raises:
            UserError: if an id is outside the vocabulary (JAX would not raise an error), or a file has been truncated.
        """
        out = np.empty(n, np.int32)
        end = 0
        for piece in self.pieces(start, n):
            if isinstance(piece, np.memmap):
                _check_size(piece)
            ids = np.asarray(piece)  # plain array, for 3x faster operations than on a memory map
            if not 0 <= int(ids.min()) <= int(ids.max()) < self.vocab_size:
                raise _outside_vocabulary(piece, self.vocab_size)
            out[end : end + len(ids)] = ids
            end += len(ids)
        return out

    def document_ends(self) -> Iterator[np.ndarray]:
        """Yield the positions of the ids that end a document, block by block."""
        for start in range(0, len(self), BLOCK):
            ids = self.take(start, min(BLOCK, len(self) - start))
            yield start + np.flatnonzero(np.isin(ids, self.end_ids))

    def fingerprint(self) -> str:
        """Compute the hexadecimal SHA-256 of the number of ids and a sample of the ids.

        The sample is all ids if there are at most 4,194,304, otherwise 256 evenly spaced blocks of 16,384 ids.
        """
        n = len(self)
        starts: Sequence[int]
        if n <= HASHED_IDS * HASHED_BLOCKS:
            starts = range(0, n, HASHED_IDS)
        else:
            starts = np.linspace(0, n - HASHED_IDS, HASHED_BLOCKS, dtype=np.int64).tolist()

        digest = hashlib.sha256(str(n).encode())
        for start in starts:
            ids = self.take(start, min(HASHED_IDS, n - start))
            digest.update(ids.astype("<i4").tobytes())
        return digest.hexdigest()

    def window_count(self, block_size: int) -> int:
        """Return the number of complete windows, one for each start; 0 or negative: the ids are too few."""
        return len(self) - block_size

    def eval_starts(self, block_size: int, stride: int) -> range:
        """Return the starts of the evaluation windows that cover the split, `stride` apart.

        An incomplete last window is dropped, unless it is the only window.
        """
        count = self.window_count(block_size)
        if count > 0:
            return range(0, count, stride)
        has_target = len(self) > 1
        return range(int(has_target))

    def windows(self, starts_B: np.ndarray, block_size: int) -> np.ndarray:
        """Read the windows at `starts_B`, int32; -1 beyond the end of the ids.

        Returns:
            `[B, T + 1]`: T inputs and, shifted by one, T targets. With `end_ids`, `[B, T, 3]`: the input, target and document
            id of each position. The last input of a document has the target -1: it does not predict the next document.
        """
        rows = np.full((len(starts_B), block_size + 1), -1, np.int32)
        for row, start in zip(rows, starts_B.tolist(), strict=True):
            n = min(block_size + 1, len(self) - start)
            row[:n] = self.take(start, n)
        if not self.end_ids:
            return self._with_first_id(rows)

        is_end_BT = np.isin(rows[:, :-1], self.end_ids)
        rows = self._with_first_id(rows)  # not before `is_end_BT`: the beginning-of-text id may also end documents
        inputs_BT = rows[:, :-1]
        targets_BT = np.where(is_end_BT, -1, rows[:, 1:])
        documents_BT = np.cumsum(is_end_BT, axis=1, dtype=np.int32) - is_end_BT
        return np.stack([inputs_BT, targets_BT, documents_BT], axis=-1)

    def _with_first_id(self, rows: np.ndarray) -> np.ndarray:
        """Return rows that begin with `first_id`, if any."""
        if self.first_id is None:
            return rows
        first = np.full((len(rows), 1), self.first_id, rows.dtype)
        return np.concatenate([first, rows[:, 1:]], axis=1)


def _outside_vocabulary(ids: np.ndarray, vocab_size: int) -> UserError:
    """Return the error for the first id outside the vocabulary; there must be one."""
    wrong = int(ids[(ids < 0) | (ids >= vocab_size)][0])
    where = ""
    fix = "use the tokenizer that made these ids"
    if isinstance(ids, np.memmap):
        where = f"{ids.filename}: "
        if not has_header(ids):
            fix += ", or write a file of a different type as uint16"
    return UserError(f"{where}id {wrong} is outside the vocabulary of {vocab_size}: {fix}")


def has_header(ids: np.memmap) -> bool:
    """Return whether the file of memory-mapped ids has a header (llm.c), which declares the type of the ids."""
    return ids.offset > 0


def _check_size(ids: np.memmap) -> None:
    """Raise `UserError` if a memory-mapped file has become shorter: the operating system would kill the process at the read."""
    mapped: mmap.mmap | None = getattr(ids, "_mmap", None)  # NumPy has no public attribute for the map
    if mapped is None:  # in memory: the result of an operation on a memory map
        return
    end = ids.offset - ids.offset % mmap.ALLOCATIONGRANULARITY + len(mapped)
    size = mapped.size()  # current size of the file
    if size < end:
        raise UserError(
            f"{ids.filename} was truncated or overwritten while it was read: it has {size:,} of {end:,} bytes; restore it. To "
            "change a file during a run, write a new file and rename it (mv), which keeps the data of a running process"
        )
