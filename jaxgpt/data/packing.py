"""Pack documents and conversations into windows; only documents longer than a window are split."""

from __future__ import annotations

from bisect import bisect_left, insort
from collections import defaultdict
from collections.abc import Sequence
from dataclasses import dataclass
from typing import ClassVar

import numpy as np

from jaxgpt.data.tokens import Tokens

PACKED_PIECES = 1 << 20  # maximum pieces per call of `pack`, to limit its memory


@dataclass(frozen=True)
class Packed:
    """Pieces of documents or conversations, packed into windows with document ids; the start of a window is its index."""

    tokens: Tokens  # all ids
    is_target: np.ndarray | None  # whether each id is a target, bool; None: all ids
    begins: np.ndarray  # position of the first input of each piece, in the order of the windows, int64 [n]
    lengths: np.ndarray  # number of inputs of each piece, int32 [n]; each input predicts the next id
    bounds: np.ndarray  # index of the first piece of each window, and the number of pieces, int64 [windows + 1]
    documents: int  # number of documents before any was split into pieces, or of sequences of conversations
    has_documents: ClassVar[bool] = True
    indexed: ClassVar[bool] = True

    @staticmethod
    def of(
        tokens: Tokens,
        begins: np.ndarray,
        lengths: np.ndarray,
        block_size: int,
        is_target: np.ndarray | None = None,
        documents: int | None = None,
    ) -> Packed:
        """Pack pieces of 1 to T inputs, deterministically: every epoch has the same windows.

        A piece of T inputs fills a window; shorter pieces are packed by best fit, at most `PACKED_PIECES` at a time.

        Args:
            tokens, is_target: as in `Packed`.
            begins, lengths: as in `Packed`, but in any order, of any integer type.
            block_size: T, inputs per window.
            documents: number of documents or sequences; None: one for each piece.
        """
        full = np.flatnonzero(lengths == block_size)
        short = np.flatnonzero(lengths < block_size)
        order = [full]
        counts = [np.ones(len(full), np.int64)]  # pieces per window
        for start in range(0, len(short), PACKED_PIECES):
            block = short[start : start + PACKED_PIECES]
            bins = pack(lengths[block].tolist(), block_size)
            in_bins = np.fromiter((i for each in bins for i in each), np.int64, len(block))
            order.append(block[in_bins])
            counts.append(np.fromiter(map(len, bins), np.int64, len(bins)))

        index = np.concatenate(order)
        return Packed(
            tokens,
            is_target,
            begins=begins[index],
            lengths=lengths[index].astype(np.int32),
            bounds=np.cumsum(np.concatenate([[0], *counts]), dtype=np.int64),
            documents=len(lengths) if documents is None else documents,
        )

    def __len__(self) -> int:
        return len(self.tokens)

    def take(self, start: int, n: int) -> np.ndarray:
        """Return a copy of the n ids from index `start`, int32."""
        return self.tokens.take(start, n)

    def window_count(self, block_size: int) -> int:
        """Count the windows; `block_size` is not read, because the windows are already packed."""
        return len(self.bounds) - 1

    def eval_starts(self, block_size: int, stride: int) -> range:
        """Return the starts of all windows; `block_size` and `stride` are not read, because a start is an index."""
        return range(self.window_count(block_size))

    def windows(self, starts_B: np.ndarray, block_size: int) -> np.ndarray:
        """Read windows, int32 `[B, T, 3]`: input, target (-1: no target) and document id (-1: padding)."""
        out = np.full((len(starts_B), block_size, 3), (0, -1, -1), np.int32)
        for row, window in zip(out, starts_B.tolist(), strict=True):
            end = 0
            for document, piece in enumerate(range(self.bounds[window], self.bounds[window + 1])):
                begin = end
                end += int(self.lengths[piece])
                self._read_piece(piece, row[begin:end])
                row[begin:end, 2] = document
        return out

    def _read_piece(self, piece: int, out: np.ndarray) -> None:
        """Write the inputs and the targets of a piece to columns 0 and 1 of `out`, `[n, 3]`."""
        first = int(self.begins[piece])
        n = len(out)
        ids = self.tokens.take(first, n + 1)
        out[:, 0] = ids[:-1]
        out[:, 1] = ids[1:]

        # As in windows of `Tokens`, the beginning-of-text id of a text replaces the first input of a window. A text is one
        # document, so only its last piece is shorter than a window, and each piece begins one.
        if self.tokens.first_id is not None:
            out[0, 0] = self.tokens.first_id

        if self.is_target is not None:
            is_target = self.is_target[first + 1 : first + n + 1]
            out[~is_target, 1] = -1

    def prompt(self) -> np.ndarray:
        """Return the ids before the first target of the first conversation; for documents, an empty array."""
        return self.take(0, self._first_answer().start)

    def answer(self) -> np.ndarray:
        """Return the ids of the first answer of the first conversation; for documents, an empty array."""
        positions = self._first_answer()
        return self.take(positions.start, len(positions))

    def _first_answer(self) -> range:
        """Return the positions of the first targets: 2 and 3 for `is_target` [0 0 1 1 0 1]; for documents, none."""
        if self.is_target is None:
            return range(0)
        begin = int(np.argmax(self.is_target))  # index of the first True
        following = self.is_target[begin:]
        n = len(following) if following.all() else int(np.argmin(following))  # index of the first False
        return range(begin, begin + n)

    def fill(self, block_size: int) -> float:
        """Return the fraction of positions, over all windows, that are not padding."""
        return int(self.lengths.sum(dtype=np.int64)) / max(self.window_count(block_size) * block_size, 1)


def pack_documents(tokens: Tokens, block_size: int) -> Packed:
    """Pack the documents of `tokens` into windows; documents of more than T + 1 ids are split.

    The last id of a document has no target and is not an input. A single end-of-text id, as before the first document in
    llm.c's format, is not a document.
    """
    after_ends = [ends + 1 for ends in tokens.document_ends()]
    bounds = np.unique(np.concatenate([[0], *after_ends, [len(tokens)]]))
    inputs = np.diff(bounds) - 1
    pieces = -(-inputs // block_size)  # number of pieces per document, rounded up

    # One entry for each piece. With T = 2, documents of 3 and 6 ids have 2 and 5 inputs in 1 and 3 pieces:
    #     begins [0 3 3 3] + offsets [0 0 2 4], lengths [2 2 2 1]
    begins = np.repeat(bounds[:-1], pieces)
    first_pieces = np.cumsum(pieces) - pieces
    numbers = np.arange(len(begins)) - np.repeat(first_pieces, pieces)  # number of each piece within its document
    offsets = numbers * block_size
    lengths = np.minimum(np.repeat(inputs, pieces) - offsets, block_size)
    return Packed.of(tokens, begins + offsets, lengths, block_size, documents=int(np.count_nonzero(inputs)))


def pack(lengths: Sequence[int], size: int) -> list[list[int]]:
    """Pack lengths from 1 to `size` by best fit, longest first; return the indices in each bin."""
    bins: list[list[int]] = []
    spaces: list[int] = []  # distinct free spaces of bins, sorted
    bins_by_space: dict[int, list[int]] = defaultdict(list)
    for index in sorted(range(len(lengths)), key=lambda index: -lengths[index]):
        # Choose the bin with the smallest sufficient space, or a new bin.
        at = bisect_left(spaces, lengths[index])
        if at == len(spaces):
            bins.append([])
            space = size
            chosen = len(bins) - 1
        else:
            space = spaces[at]
            chosen = bins_by_space[space].pop()
            if not bins_by_space[space]:
                del spaces[at]
        bins[chosen].append(index)

        left = space - lengths[index]
        if left:
            if not bins_by_space[left]:
                insort(spaces, left)
            bins_by_space[left].append(chosen)
    return bins
