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
        """Read rows: int32 `[B, T + 1]`; `[B, T, 3]` with document ids; or the tree of arrays `[B, ...]` of the split."""
        return self.split.windows(self.starts_B[rows], self.block_size)


class Epochs:
    """The windows of one source in the order of a run: every epoch uses each window once.

    Args:
        split: the windows of the source.
        block_size: T, tokens per window.
        seed: seed of the order.
        stride: ids between the starts of windows; 0: T, at an offset drawn for every epoch. Indexed windows have no stride.
        name: name of the random stream of the source.

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
        self._stride = 1 if split.indexed else stride or block_size
        has_offset = not split.indexed and not stride
        self._phases = min(block_size, self.count) if has_offset else 1  # number of possible offsets of an epoch
        self.per_epoch = (self.count - self._phases) // self._stride + 1

    def starts(self, rows: np.ndarray) -> np.ndarray:
        """Return the window start of each row, int64; `rows` are indices among all rows of this source."""
        epochs, positions = np.divmod(rows, self.per_epoch)
        starts = np.empty(len(rows), np.int64)
        for epoch in np.unique(epochs).tolist():
            in_epoch = epochs == epoch
            phase = int(draw(self._seed, "phase" + self._name, epoch, 1)[0] % self._phases)
            order = shuffled(positions[in_epoch], self.per_epoch, self._seed, epoch, self._name)
            starts[in_epoch] = phase + order * self._stride
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
        self.row_tokens = row_tokens or block_size  # tokens per row, for the schedule of a mixture
        if isinstance(split, Mixture):
            self._mixture = split
        else:
            self._mixture = Mixture({"": split}, [Shares(0, {"": 1})])
        pairs = zip(self._mixture.streams, self._mixture.sources, strict=True)
        self._sources = [Epochs(source, block_size, seed, stride, stream) for stream, source in pairs]
        used = zip(self._mixture.weights, self._sources, strict=True)
        self.per_epoch = sum(source.per_epoch for weight, source in used if weight)

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
        rows = self.first + np.arange(step * self.batch_size, (step + 1) * self.batch_size)
        drawn = draw(self.seed, "window", step, self.batch_size) if self.sampling == "random" else None
        source, before = self._mixture.source_of_rows(rows, self.row_tokens)
        starts = np.empty(self.batch_size, np.int64)
        pairs = zip(self._mixture.offsets, self._sources, strict=False)  # the last offset is the total
        for index, (offset, epochs) in enumerate(pairs):
            own = source == index
            if drawn is None:
                starts[own] = offset + epochs.starts(before[own])
            else:
                starts[own] = offset + drawn[own] % epochs.count
        return Windows(self.split, starts, self.block_size)


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
        A function of the step that returns int32 `[B, T + 1]`: T inputs and, shifted by one, T targets, as for `train_step`.

    Raises:
        UserError: if `ids` is not a vector of at least T + 1 integers in [0, 2**31), or an argument or step is invalid.
    """
    row = ids if isinstance(ids, np.memmap) else np.asarray(ids)
    if row.ndim != 1 or row.dtype.kind not in "iu":
        raise UserError(f"ids must be a one-dimensional array of integers, not {row.dtype} {list(row.shape)}")
    if sampling not in ("epoch", "random"):
        raise UserError(f"sampling must be epoch or random: {short_repr(sampling)}")
    T = as_int("block_size", block_size, 1, INT_MAX)
    B = as_int("batch_size", batch_size, 1, INT_MAX)
    seed = as_int("seed", seed, 0, 2**63 - 1)
    stride = as_int("stride", stride, 0, INT_MAX)
    order = Batches(Tokens([row]), T, B, seed, sampling, stride)
    return lambda step: order.at(as_int("step", step, 0, 2**62 // B))[:]
