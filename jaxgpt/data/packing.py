"""Pack documents and conversations into windows, whole where they fit."""

from __future__ import annotations

from bisect import bisect_left, insort
from collections import defaultdict
from collections.abc import Sequence
from dataclasses import dataclass

import numpy as np

from jaxgpt.data.tokens import TOGETHER, Tokens, is_any

AT_ONCE = 1 << 20  # pieces that are packed together, which bounds the memory of `pack`


@dataclass(frozen=True)
class Packed:
    """Pieces of a text packed into windows, separated by segment ids.

    Used in place of `Tokens`; the start of a window is its index.

    Attributes:
        tokens: all ids.
        trained: whether each id is a target, bool; None: all are.
        begins: position of the first input of each piece, window after window, int64 `[n]`.
        lengths: number of inputs of each piece, int32 `[n]`; each predicts the next id.
        bounds: the pieces of window i are those from `bounds[i]` to `bounds[i + 1]`, int64 `[windows + 1]`.
        documents: number of documents that the pieces come from.
    """

    tokens: Tokens
    trained: np.ndarray | None
    begins: np.ndarray
    lengths: np.ndarray
    bounds: np.ndarray
    documents: int
    segmented = True

    @staticmethod
    def of(
        tokens: Tokens,
        begins: np.ndarray,
        lengths: np.ndarray,
        block_size: int,
        trained: np.ndarray | None = None,
        documents: int = 0,
    ) -> Packed:
        """Pack pieces of 1 to T inputs. The result depends on nothing else, so an epoch is an order of its windows.

        Full windows are single pieces; the others are packed by best fit, at most `AT_ONCE` at a time.
        """
        full = np.flatnonzero(lengths == block_size)
        rest = np.flatnonzero(lengths < block_size)
        order, counts = [full], [np.ones(len(full), np.int64)]
        for start in range(0, len(rest), AT_ONCE):
            some = rest[start : start + AT_ONCE]
            bins = pack(lengths[some].tolist(), block_size)
            order += [some[np.fromiter((i for each in bins for i in each), np.int64, len(some))]]
            counts += [np.fromiter(map(len, bins), np.int64, len(bins))]
        places, bounds = np.concatenate(order), np.cumsum(np.concatenate([[0], *counts]), dtype=np.int64)
        return Packed(
            tokens, trained, begins[places], lengths[places].astype(np.int32), bounds, documents or len(lengths)
        )

    def __len__(self) -> int:
        return len(self.tokens)

    def take(self, start: int, n: int) -> np.ndarray:
        """Return ids `start` to `start + n`."""
        return self.tokens.take(start, n)

    def starts(self, block_size: int) -> int:
        """Count the windows."""
        return len(self.bounds) - 1

    def eval_starts(self, block_size: int, stride: int) -> range:
        """Return all windows; the stride does not apply."""
        return range(self.starts(block_size))

    def windows(self, starts: np.ndarray, block_size: int) -> np.ndarray:
        """Read windows, int32 `[B, T, 3]`: the input, target and segment id of each position; -1 is no target."""
        out = np.empty((len(starts), block_size, 3), np.int32)
        for first in range(0, len(starts), TOGETHER):  # so few stay in the processor's cache
            self._windows(starts[first : first + TOGETHER], out[first : first + TOGETHER])
        return out

    def _windows(self, starts: np.ndarray, out: np.ndarray) -> None:
        counts = self.bounds[starts + 1] - self.bounds[starts]  # of the pieces of each window
        firsts = np.cumsum(counts) - counts
        number = np.arange(counts.sum()) - np.repeat(firsts, counts)  # of each piece in its window
        pieces = np.repeat(self.bounds[starts], counts) + number
        lengths = self.lengths[pieces]
        places, sizes = self.begins[pieces].tolist(), (lengths + 1).tolist()
        self.tokens.will_read(places, sizes)
        ids = self.tokens.spans(places, sizes)
        inputs = np.ones(len(ids), bool)
        inputs[np.cumsum(lengths + 1) - 1] = False  # the last id of a piece is only a target
        targets = ids[1:]
        if self.trained is not None:
            trained = np.concatenate([self.trained[place : place + n] for place, n in zip(places, sizes, strict=True)])
            targets = np.where(trained[1:], targets, -1)
        ids, targets, segments = ids[inputs], targets[inputs[:-1]], np.repeat(number, lengths)
        end = 0
        for row, size in zip(out, np.add.reduceat(lengths, firsts).tolist(), strict=True):
            begin, end = end, end + size
            row[:size, 0], row[:size, 1], row[:size, 2] = ids[begin:end], targets[begin:end], segments[begin:end]
            row[size:] = 0, -1, -1

    def prompt(self) -> np.ndarray:
        """Return the ids before the first target: the beginning of the first conversation."""
        first = 0 if self.trained is None else int(np.argmax(self.trained))
        return self.take(0, first)

    def fill(self, block_size: int) -> float:
        """Return the fraction of the positions of all windows that hold a token."""
        return int(self.lengths.sum(dtype=np.int64)) / max(self.starts(block_size) * block_size, 1)


def pack_documents(tokens: Tokens, block_size: int) -> Packed:
    """Pack the documents of `tokens` into windows. Longer ones are split into windows, whose rest is packed.

    The last id of a document predicts nothing and is not an input. Reads all ids once; the result takes 12 bytes per
    piece and 8 per window.
    """
    bounds = _document_bounds(tokens)
    inputs = np.diff(bounds) - 1
    pieces = -(-inputs // block_size)
    firsts = np.cumsum(pieces) - pieces
    begins = np.repeat(bounds[:-1], pieces)
    place = (np.arange(len(begins)) - np.repeat(firsts, pieces)) * block_size  # of a piece in its document
    lengths = np.minimum(np.repeat(inputs, pieces) - place, block_size).astype(np.int32)
    return Packed.of(tokens, begins + place, lengths, block_size, documents=len(bounds) - 1)


def pack(lengths: Sequence[int], size: int) -> list[list[int]]:
    """Pack items in bins: the longest first, each into the fullest bin that has room for it (best fit decreasing).

    Args:
        lengths: of the items, 1 to `size`.
        size: of a bin.

    Returns:
        The indices of the items in each bin.
    """
    bins: list[list[int]] = []
    spaces: list[int] = []  # the free spaces of bins, sorted, each once
    having: dict[int, list[int]] = defaultdict(list)  # the bins with each free space
    for index in sorted(range(len(lengths)), key=lambda index: -lengths[index]):
        place = bisect_left(spaces, lengths[index])
        if place == len(spaces):
            bins.append([])
            space, chosen = size, len(bins) - 1
        else:
            space = spaces[place]
            chosen = having[space].pop()
            if not having[space]:
                del spaces[place]
        bins[chosen].append(index)
        if left := space - lengths[index]:
            if not having[left]:
                insort(spaces, left)
            having[left].append(chosen)
    return bins


def _document_bounds(tokens: Tokens) -> np.ndarray:
    """Return where documents begin, and the end of the last one, int64."""
    parts, begin, block = [np.zeros(1, np.int64)], 0, 1 << 22
    for part in tokens.parts:
        for start in range(0, len(part), block):
            ids = part[start : start + block]
            parts.append(np.flatnonzero(is_any(ids, tokens.end_ids)) + (begin + start + 1))
        begin += len(part)
    bounds = np.concatenate(parts)
    return bounds if bounds[-1] == len(tokens) else np.append(bounds, len(tokens))
