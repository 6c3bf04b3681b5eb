"""Separate examples, such as preference pairs or prompts, as a split: a row is an example, not a window of a text."""

from __future__ import annotations

from abc import ABC, abstractmethod
from collections.abc import Iterable
from functools import cached_property
from typing import ClassVar

import numpy as np


class ExampleSplit(ABC):
    """A split of examples, with the interface of `tokens.Split`; the start of a row is the index of its example."""

    has_documents: ClassVar[bool] = True  # rows have document ids
    indexed: ClassVar[bool] = True  # starts are indices of examples, not of ids

    @abstractmethod
    def count(self) -> int:
        """Return the number of examples."""

    @abstractmethod
    def texts(self) -> Iterable[np.ndarray | list[int]]:
        """Return the ids of each text of each example, in order."""

    @abstractmethod
    def windows(self, starts_B: np.ndarray, block_size: int) -> np.ndarray:
        """Read the rows at `starts_B`, int32."""

    def __len__(self) -> int:
        """Return the number of ids."""
        return len(self.ids)

    @cached_property
    def ids(self) -> np.ndarray:
        """The ids of all texts, int32."""
        return np.concatenate([np.zeros(0, np.int32), *(np.asarray(ids, np.int32) for ids in self.texts())])

    def take(self, start: int, n: int) -> np.ndarray:
        """Return a copy of n ids from index `start`, int32."""
        return self.ids[start : start + n].copy()

    def window_count(self, block_size: int) -> int:
        """Count the examples; `block_size` is not read."""
        return self.count()

    def eval_starts(self, block_size: int, stride: int) -> range:
        """Return the starts of all examples; `block_size` and `stride` are not read."""
        return range(self.count())
