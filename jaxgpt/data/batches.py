"""Batches as a function of (seed, step): nothing to save, nothing to replay, any step at once."""

from __future__ import annotations

from collections.abc import Callable
from dataclasses import dataclass
from typing import Literal

import numpy as np
from numpy.typing import ArrayLike

from jaxgpt.config import Config, UserError
from jaxgpt.data.mixture import Mixture
from jaxgpt.data.order import WindowOrder, draw
from jaxgpt.data.tokens import Split, Tokens


@dataclass(frozen=True)
class Windows:
    """Windows of inputs and targets (`Tokens.windows`). Indexing with a slice reads those rows, and no others.

    Attributes:
        tokens: the ids.
        starts_B: positions of the first ids.
        block_size: T.
    """

    tokens: Split
    starts_B: np.ndarray
    block_size: int

    @property
    def shape(self) -> tuple[int, ...]:
        window = (self.block_size, 3) if self.tokens.segmented else (self.block_size + 1,)
        return len(self.starts_B), *window

    def __getitem__(self, rows: slice) -> np.ndarray:
        """Read rows, int32 `[B, T + 1]`, or `[B, T, 3]` with segment ids."""
        return self.tokens.windows(self.starts_B[rows], self.block_size)


@dataclass(frozen=True)
class Batches:
    """The batches of a training run.

    `epoch`: windows start `stride` apart; every epoch uses each of them once, in its own order. Without a stride they start
    T apart, from a position that is drawn for every epoch, so that their borders fall elsewhere each time.
    `random`: every window starts anywhere, independently (as in nanoGPT).

    Each source of a mixture has epochs of its own: the rows of a batch that belong to it are its next ones (`Mixture.turns`).

    Attributes:
        tokens: the ids.
        block_size: T.
        batch_size: B.
        seed: of the order.
        sampling: epoch or random.
        stride: ids between starts; 0: T, from a random position.
        first: number of the window that step 0 begins with. Not 0 in a run that was resumed with another batch size, which
            continues after the windows it has used.
    """

    tokens: Split
    block_size: int
    batch_size: int
    seed: int
    sampling: Literal["epoch", "random"] = "epoch"
    stride: int = 0
    first: int = 0

    def __post_init__(self) -> None:
        for source in self._sources:
            if source.places < 1:
                raise UserError(
                    f"model.block_size {self.block_size} needs at least {self.block_size + 1} ids for training, "
                    f"there are {len(source.tokens)}"
                )

    @staticmethod
    def of(config: Config, tokens: Split, first: int = 0) -> Batches:
        """Make the batches that a config describes."""
        train, data = config.train, config.data
        return Batches(tokens, config.model.block_size, train.batch_size, train.seed, data.sampling, data.stride, first)

    def at(self, step: int) -> Windows:
        """Return the batch of a step."""
        return Windows(self.tokens, self._starts(step), self.block_size)

    @property
    def per_epoch(self) -> int:
        """Windows in an epoch, of all sources."""
        return sum(source.per_epoch for source in self._sources)

    def _starts(self, step: int) -> np.ndarray:
        rows = self.first + np.arange(step * self.batch_size, (step + 1) * self.batch_size)
        drawn = draw(self.seed, "window", step, self.batch_size) if self.sampling == "random" else None
        sources = self._sources
        if not isinstance(self.tokens, Mixture):
            return sources[0].starts(rows, drawn)
        starts = np.empty(self.batch_size, np.int64)
        turn, before = self.tokens.turns(rows)
        for index in np.unique(turn).tolist():
            mine = turn == index
            found = sources[index].starts(before[mine], None if drawn is None else drawn[mine])
            starts[mine] = self.tokens.offsets[index] + found
        return starts

    @property
    def _sources(self) -> list[WindowOrder]:
        options = self.block_size, self.seed, self.stride
        if isinstance(self.tokens, Mixture):
            return [WindowOrder(each, *options, f" of source {i}") for i, each in enumerate(self.tokens.sources)]
        return [WindowOrder(self.tokens, *options)]


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
    made = Batches(Tokens([row]), int(block_size), int(batch_size), int(seed), sampling, int(stride))
    return lambda step: made.at(int(step))[:]
