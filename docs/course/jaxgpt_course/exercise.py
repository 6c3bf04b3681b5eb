"""The parts of an exercise."""

from __future__ import annotations

import inspect
from collections.abc import Callable, Mapping
from dataclasses import dataclass
from typing import Any

import numpy as np

# (result, *arguments) -> what is wrong with the result, or None. The result has the structure of the reference's, with NumPy
# arrays as leaves.
Law = Callable[..., str | None]


@dataclass(frozen=True, repr=False)
class Exercise:
    """A function for a learner to write.

    Attributes:
        name: the name that `check` takes.
        page: the page of the course that explains it, such as "attention".
        statement: what the function computes. Letters are dimensions, as everywhere in jaxgpt.
        returns: names of the results.
        reference: the function, built from jaxgpt's own. Its name and parameters are those of the statement.
        inputs: makes the arguments of each call, by a short description. Arrays are NumPy's.
        mistakes: typical wrong answers, each with the line that explains it. Results equal to theirs are diagnosed so.
        laws: properties of the result, which name what is wrong with any other answer.
        aliases: other names that `check` takes.
    """

    name: str
    page: str
    statement: str
    returns: tuple[str, ...]
    reference: Callable[..., Any]
    inputs: Callable[[], Mapping[str, tuple[Any, ...]]]
    mistakes: tuple[tuple[str, Callable[..., Any]], ...]
    laws: tuple[Law, ...] = ()
    aliases: tuple[str, ...] = ()

    @property
    def parameters(self) -> list[str]:
        """Names of the function's parameters."""
        return list(inspect.signature(self.reference).parameters)

    @property
    def signature(self) -> str:
        """Name, parameters and results of the function, such as `softmax(scores_TS) -> weights_TS`."""
        return f"{self.reference.__name__}({', '.join(self.parameters)}) -> {', '.join(self.returns)}"

    def __repr__(self) -> str:
        return f"{self.name}: {self.signature}\n    {self.statement}"


def normal(seed: int, *shape: int) -> np.ndarray:
    """Return float32 numbers of a standard normal distribution."""
    return np.random.default_rng(seed).normal(size=shape).astype(np.float32)
