"""Batches as a function of (seed, step): no iterator state, any step in any order."""

from __future__ import annotations

from collections.abc import Callable
from dataclasses import dataclass
from typing import Any, Literal

import numpy as np
from numpy.typing import ArrayLike

from jaxgpt.config import Config
from jaxgpt.data.mixture import Mixture, Shares
from jaxgpt.data.order import draw, shuffled
from jaxgpt.data.tokens import Split, Tokens
from jaxgpt.errors import UserError, short_repr
from jaxgpt.settings import INT_MAX, as_int


@dataclass(frozen=True)
class Windows:
    """A batch of rows of a split, read lazily: slicing reads only the selected rows (`Split.windows`)."""

    split: Split
    starts_B: np.ndarray  # start of each window in the split, int64 [B]
    block_size: int  # T

    def __len__(self) -> int:
        """Return the number of rows."""
        return len(self.starts_B)

    def __getitem__(self, rows: slice) -> Any:
        """Read rows: int32 `[B, T + 1]`; `[B, T, 3]` with document ids; `[B, 2, T, 3]` for pairs; or a dict of `[B, ...]`."""
        return self.split.windows(self.starts_B[rows], self.block_size)


class Epochs:
    """The windows of one source in the order of a run: every epoch uses each window once.

    Args:
        split: the windows of the source.
        block_size: T, tokens per window.
        seed: seed of the order.
        stride: ids between the starts of windows; 0: T, at an offset drawn for every epoch. Indexed windows have no stride.
        name: name of the random stream of the source; empty: no mixture.

    Attributes:
        count: number of possible window starts.
        per_epoch: number of windows per epoch.
    """

    def __init__(self, split: Split, block_size: int, seed: int, stride: int, name: str) -> None:
        self.count = split.window_count(block_size)
        if self.count < 1:
            if split.indexed:
                raise UserError(
                    "every document has a single training id, but windows need at least 2: use longer documents"
                )
            raise UserError(
                f"block_size {block_size} needs at least {block_size + 1} training ids, but there are {len(split)}: lower it"
            )
        self._seed = seed
        self._name = name
        self._offsets = 1  # number of possible offsets of an epoch
        if split.indexed:
            self._stride = 1
        elif stride:
            self._stride = stride
        else:
            self._stride = block_size
            self._offsets = min(block_size, self.count)

        # An epoch starts its windows at `offset + k * stride`, k < per_epoch. The last start must be below `count` even at the
        # largest offset:  (offsets - 1) + (per_epoch - 1) * stride <= count - 1
        self.per_epoch = (self.count - self._offsets) // self._stride + 1

    def starts(self, rows: np.ndarray) -> np.ndarray:
        """Return the window start of each row, int64; `rows` are indices among all rows of this source."""
        epochs, positions = np.divmod(rows, self.per_epoch)
        starts = np.empty(len(rows), np.int64)
        for epoch in np.unique(epochs).tolist():
            in_epoch = epochs == epoch
            [drawn] = draw(self._seed, "phase" + self._name, epoch, 1).tolist()
            offset = drawn % self._offsets
            order = shuffled(positions[in_epoch], self.per_epoch, self._seed, epoch, self._name)
            starts[in_epoch] = offset + order * self._stride
        return starts


class Batches:
    """The batches of a training run.

    Sampling `epoch`: every epoch uses each window once, in a different order. Windows start `stride` ids apart; with
    stride 0, T ids apart, at an offset drawn for every epoch. Windows of `Packed` data are the same in every epoch.
    Sampling `random`: every window starts at an independent random position, as in nanoGPT.

    In a mixture, each source has separate epochs. `Mixture.source_of_rows` assigns each row to a source.

    Args:
        split: windows of a source or a mixture.
        block_size: T, tokens per window.
        batch_size: B, windows per batch.
        seed: seed of the order.
        sampling: `epoch` or `random`, as above.
        stride: ids between the starts of windows of an epoch; 0: T.
        first: index of the first row of step 0.
        row_tokens: tokens per row, for the schedule of a mixture; 0: T.

    Attributes:
        first: index of the first row of step 0; not 0 if a resume has changed the batch size.
        per_epoch: number of windows per epoch, over all sources of the last mixture.
    """

    def __init__(
        self,
        split: Split,
        block_size: int,
        batch_size: int,
        seed: int,
        sampling: Literal["epoch", "random"] = "epoch",
        stride: int = 0,
        first: int = 0,
        row_tokens: int = 0,
    ) -> None:
        self.split = split
        self.block_size = block_size
        self.batch_size = batch_size
        self.seed = seed
        self.sampling = sampling
        self.first = first
        self.row_tokens = row_tokens or block_size
        if isinstance(split, Mixture):
            self._mixture = split
        else:  # the order of a source outside a mixture has the stream ""
            self._mixture = Mixture({"": split}, [Shares(0, {"": 1})])

        self._epochs = []  # the windows of each source
        for stream, source in zip(self._mixture.streams, self._mixture.sources, strict=True):
            self._epochs.append(Epochs(source, block_size, seed, stride, stream))
        used = zip(self._mixture.weights, self._epochs, strict=True)
        self.per_epoch = sum(epochs.per_epoch for weight, epochs in used if weight)

    @staticmethod
    def of(config: Config, split: Split, first: int = 0) -> Batches:
        """Return the batches of a run with this config."""
        return Batches(
            split,
            block_size=config.window,
            batch_size=config.train.batch_size,
            seed=config.train.seed,
            sampling=config.data.sampling,
            stride=config.data.stride,
            first=first,
            row_tokens=config.row_tokens,
        )

    def at(self, step: int) -> Windows:
        """Return the batch of a step."""
        rows_B = self.first + np.arange(step * self.batch_size, (step + 1) * self.batch_size)
        source_B, row_in_source_B = self._mixture.source_of_rows(rows_B, self.row_tokens)
        drawn_B = draw(self.seed, "window", step, self.batch_size)  # read by the sampling `random` only

        starts_B = np.empty(self.batch_size, np.int64)
        for index, epochs in enumerate(self._epochs):
            is_own_B = source_B == index
            if self.sampling == "random":
                starts = drawn_B[is_own_B] % epochs.count
            else:
                starts = epochs.starts(row_in_source_B[is_own_B])
            starts_B[is_own_B] = self._mixture.offsets[index] + starts
        return Windows(self.split, starts_B, self.block_size)


def batches(
    ids: ArrayLike,
    block_size: int,
    batch_size: int,
    *,
    seed: int = 0,
    sampling: Literal["epoch", "random"] = "epoch",
    stride: int = 0,
) -> Callable[[int], np.ndarray]:
    """Return the batches of an array of ids, as a pure function of the step.

    `batch = batches(ids, 64, 8); batch(0), batch(1), ...`: there is no cursor to save, and any step can be requested.

    Args:
        ids: token ids, one-dimensional, of any integer type; a memory map is read window by window.
        block_size: number of inputs per window (T).
        batch_size: number of windows per batch (B).
        seed: seed of the order and positions of windows.
        sampling: `epoch` uses every window once per epoch; `random` draws the start of each window independently.
        stride: ids between the starts of windows of an epoch; 0: T, with an offset drawn for each epoch.

    Returns:
        A function of the step, which returns int32 `[B, T + 1]`: T inputs and, shifted by one, T targets, as for `train_step`.

    Raises:
        UserError: if `ids` is not a vector of at least T + 1 integers in [0, 2**31), or an argument or step is invalid.
    """
    array = ids if isinstance(ids, np.memmap) else np.asarray(ids)
    if array.ndim != 1 or array.dtype.kind not in "iu":
        raise UserError(f"ids must be a one-dimensional array of integers, not {array.dtype} {list(array.shape)}")
    if sampling not in ("epoch", "random"):
        raise UserError(f"sampling must be epoch or random: {short_repr(sampling)}")
    order = Batches(
        Tokens([array]),
        block_size=as_int("block_size", block_size, 1, INT_MAX),
        batch_size=as_int("batch_size", batch_size, 1, INT_MAX),
        seed=as_int("seed", seed, 0, 2**63 - 1),
        sampling=sampling,
        stride=as_int("stride", stride, 0, INT_MAX),
    )
    last = 2**62 // order.batch_size  # indices of rows are int64

    def at(step: int) -> np.ndarray:
        ids_BT: np.ndarray = order.at(as_int("step", step, 0, last))[:]
        return ids_BT

    return at
