"""Windows of ids, as a function of (seed, step): nothing to save, nothing to replay, any step at once."""

from __future__ import annotations

import functools
import zlib
from collections.abc import Callable
from dataclasses import dataclass
from typing import Literal

import numpy as np
from numpy.typing import ArrayLike

from jaxgpt.config import UserError
from jaxgpt.data.tokens import Tokens

ALL = slice(None)


@dataclass(frozen=True)
class Windows:
    """The training windows of a row of ids, each `T + 1` long: T inputs and, one further, T targets.

    `epoch`: the windows stand `stride` apart; every epoch uses each of them once, in an order of its own. Without a
    stride they stand T apart, from a start that is drawn for every epoch, so that borders fall elsewhere each time.
    `random`: every window begins anywhere, whatever was used before (nanoGPT's way).

    Attributes:
        tokens: the ids.
        block_size: T.
        seed: of the order.
        sampling: epoch or random.
        stride: ids between starts; 0: T, with a phase.
    """

    tokens: Tokens
    block_size: int
    seed: int
    sampling: Literal["epoch", "random"] = "epoch"
    stride: int = 0

    def __post_init__(self) -> None:
        if len(self.tokens) <= self.block_size:
            raise UserError(
                f"model.block_size {self.block_size} needs at least {self.block_size + 1} ids for training, "
                f"there are {len(self.tokens)}"
            )

    @property
    def per_epoch(self) -> int:
        """Windows in an epoch."""
        step = self.stride or self.block_size
        phases = 1 if self.stride else min(step, len(self.tokens) - self.block_size)
        return (len(self.tokens) - self.block_size - phases) // step + 1

    def starts(self, step: int, batch_size: int, rows: slice = ALL) -> np.ndarray:
        """Where the windows of the batch of a step begin, int64 `[B]`; of some of its rows only, where `rows` says so."""
        if self.sampling == "random":
            return _draw(self.seed, "window", step, batch_size)[rows] % (len(self.tokens) - self.block_size)
        counts = np.arange(step * batch_size, (step + 1) * batch_size)[rows]
        epochs, places = np.divmod(counts, self.per_epoch)
        return np.array([self._start(int(e), int(p)) for e, p in zip(epochs, places, strict=True)], np.int64)

    def batch_at(self, step: int, batch_size: int, rows: slice = ALL) -> np.ndarray:
        """The batch of a step, int32 `[B, T + 1]`, or those of its rows that are asked for: no others are read."""
        return np.stack([self.tokens.take(int(s), self.block_size + 1) for s in self.starts(step, batch_size, rows)])

    def _start(self, epoch: int, place: int) -> int:
        order, phase = _epoch(self.seed, epoch, self.per_epoch, self._phases)
        return phase + int(order[place]) * (self.stride or self.block_size)

    @property
    def _phases(self) -> int:
        return 1 if self.stride else min(self.block_size, len(self.tokens) - self.block_size)


def batches(
    ids: ArrayLike,
    block_size: int,
    batch_size: int,
    *,
    seed: int = 0,
    sampling: Literal["epoch", "random"] = "epoch",
    stride: int = 0,
) -> Callable[[int], np.ndarray]:
    """Make the batches of an array of ids, as a pure function of (seed, step).

    `batch = batches(ids, 64, 8); batch(0), batch(1), ...`: there is no cursor to save, and any step can be asked for.

    Args:
        ids: a row of token ids, of any integer type (a memory map is not read whole).
        block_size: T.
        batch_size: B.
        seed: of the order.
        sampling: `epoch` uses every window once before any twice; `random` draws each independently.
        stride: ids between the starts of windows; 0: T, from a start drawn for each epoch.

    Returns:
        A function of the step that gives int32 `[B, T + 1]`: T inputs and, one further, T targets, as `train_step` takes them.

    Raises:
        UserError: ids that are not a row of integers from 0 on, or fewer than T + 1.
    """
    row = np.asarray(ids)
    if row.ndim != 1 or row.dtype.kind not in "iu":
        raise UserError(f"ids must be a one-dimensional array of integers, not {row.dtype} {list(row.shape)}")
    for name, value in (("block_size", block_size), ("batch_size", batch_size)):
        if value < 1:
            raise UserError(f"{name} must be at least 1, not {value}")
    windows = Windows(Tokens([row]), int(block_size), int(seed), sampling, int(stride))
    return lambda step: windows.batch_at(int(step), int(batch_size))


def eval_batch(tokens: Tokens, block_size: int, stride: int, windows: np.ndarray, rows: slice = ALL) -> np.ndarray:
    """Read windows of a split by their numbers, int32 `[B, T + 1]`: number n begins at id `n * stride`.

    Rows of negative numbers, and what is missing of a split that is shorter than a window, are -1, which is not counted.
    Only the rows that are asked for are read.
    """
    out = np.full((len(windows[rows]), block_size + 1), -1, np.int32)
    for row, window in enumerate(windows[rows].tolist()):
        if window >= 0:
            ids = tokens.take(window * stride, min(block_size + 1, len(tokens) - window * stride))
            out[row, : len(ids)] = ids
    return out


def eval_windows(tokens: Tokens, block_size: int, stride: int) -> int:
    """Count the windows of a whole split, `stride` apart.

    A rest that is shorter than a window is left out, unless it is all that there is.
    """
    if len(tokens) <= block_size:
        return int(len(tokens) > 1)
    return (len(tokens) - block_size - 1) // stride + 1


@functools.lru_cache(maxsize=2)
def _epoch(seed: int, epoch: int, n: int, phases: int) -> tuple[np.ndarray, int]:
    """An order of n windows and a phase. Sorted raw random bits: NumPy keeps that stream the same between versions."""
    order = np.argsort(_draw(seed, "order", epoch, n), kind="stable")
    return order, int(_draw(seed, "phase", epoch, 1)[0] % phases)


def _draw(seed: int, stream: str, index: int, n: int) -> np.ndarray:
    """n random int64 >= 0, from the seed, the name of a stream and an index within it."""
    key = np.array([seed, zlib.crc32(stream.encode())], np.uint64)
    raw = np.random.Philox(key=key, counter=np.array([0, index, 0, 0], np.uint64)).random_raw(n)
    return (raw >> np.uint64(1)).astype(np.int64)
