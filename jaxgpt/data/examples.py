"""Separate examples, such as preference pairs or prompts: read them as a split, and hold some out."""

from __future__ import annotations

from abc import ABC, abstractmethod
from collections.abc import Callable, Hashable, Iterable
from functools import cached_property
from typing import Generic, NamedTuple, TypeVar

import numpy as np

from jaxgpt.data.chat.files import Files
from jaxgpt.data.files.skipped import UnusableRecord

T = TypeVar("T")


class DoesNotFit(UnusableRecord):
    """The error for a record that leaves no room for an answer, or for a difference between answers, in a window."""

    reason = "that do not fit a window"


class ExampleSplit(ABC):
    """A split of examples, with the interface of `tokens.Split`; the start of a row is the index of its example."""

    has_documents = True  # rows have document ids
    indexed = True  # starts are indices of examples, not of ids

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
        """Count the examples."""
        return self.count()

    def eval_starts(self, block_size: int, stride: int) -> range:
        """Return the starts of all examples; `stride` does not apply."""
        return range(self.count())


class Splits(NamedTuple, Generic[T]):
    """Examples by split."""

    train: list[T]
    val: list[T]  # excludes examples that are also in `train`
    copies: int  # number of validation examples that were omitted, because they are also training examples


def hold_out(train: list[T], val: list[T], files: Files, fraction: float, key: Callable[[T], Hashable]) -> Splits[T]:
    """Hold out the last examples, unless there are files for validation.

    Args:
        train: examples of the training files.
        val: examples of the validation files.
        files: files of the examples, by split.
        fraction: leading fraction of the examples to train on (`data.train_fraction`).
        key: function that returns an equal value for equal examples.
    """
    if not files.val:
        n = max(int(fraction * len(train)), 1)
        val = train[n:]
        train = train[:n]
    seen = {key(example) for example in train}
    held_out = [example for example in val if key(example) not in seen]
    return Splits(train, held_out, copies=len(val) - len(held_out))
