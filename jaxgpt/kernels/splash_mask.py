"""The mask of splash attention for rows with tokens in balanced order. Import it late: the kernel's import takes a second."""

from __future__ import annotations

from dataclasses import dataclass
from functools import cached_property

import numpy as np
from jax.experimental.pallas.ops.tpu.splash_attention import Mask

from jaxgpt.kernels.halo import balanced_order


@dataclass(frozen=True)
class RowMask(Mask):
    """The mask of a row, `[T, T]`, which the kernel reads in tiles; it compares by value.

    A query sees a key if 0 <= distance < `window`, in positions of the row.

    Attributes:
        T: number of tokens of the row.
        balanced: number of devices that the order of the tokens balances (`halo.balanced_order`); 1: consecutive tokens.
        window: number of tokens in the sliding window; 0: all preceding tokens.
    """

    T: int
    balanced: int
    window: int

    @property
    def shape(self) -> tuple[int, int]:
        """Numbers of queries and keys."""
        return self.T, self.T

    def __getitem__(self, index: tuple[slice, slice]) -> np.ndarray:
        """Return the tile of the mask at these queries and keys, bool."""
        query = self._order[index[0]]
        key = self._order[index[1]]
        tile = len(query), len(key)
        least = query.min() - key.max()
        most = query.max() - key.min()

        # Most tiles are completely hidden or completely visible.
        if most < 0 or (self.window and least >= self.window):
            return np.zeros(tile, bool)
        if least >= 0 and (not self.window or most < self.window):
            return np.ones(tile, bool)

        distance = query[:, None] - key[None, :]
        is_visible: np.ndarray = distance >= 0
        if self.window:
            is_visible &= distance < self.window
        return is_visible

    @cached_property
    def _order(self) -> np.ndarray:
        """Position of each token in the row, in the order of the tokens."""
        if self.balanced == 1:
            return np.arange(self.T)
        return balanced_order(self.T, self.balanced)
