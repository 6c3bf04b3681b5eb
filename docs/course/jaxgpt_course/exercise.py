"""Exercise: the statement, reference function, inputs, known mistakes and laws."""

from __future__ import annotations

import inspect
from collections.abc import Callable, Mapping
from dataclasses import dataclass
from typing import Any

import numpy as np

# A law maps (result, *arguments) to a description of the error, or None. The result has the structure of the reference's
# result, with NumPy arrays as leaves.
Law = Callable[..., str | None]


def call_directly(function: Callable[..., Any], args: tuple[Any, ...]) -> Any:
    """Call a function with the arguments of an input."""
    return function(*args)


@dataclass(frozen=True, repr=False)
class Exercise:
    """A function for a learner to write.

    Attributes:
        name: name of the exercise, for `check`.
        page: course page that explains the computation, such as "attention".
        statement: description of the computation. Capital letters are dimensions, such as T positions.
        returns: names of the results.
        reference: correct function, composed of jaxgpt, JAX and Optax functions; defines the name and parameters to use.
        inputs: function that returns the arguments of each call, keyed by a short description. Arrays are NumPy arrays.
        mistakes: typical wrong answers, as pairs of a one-line explanation and a function. If a learner's results match
            the results of the function, `check` returns the explanation.
        laws: checks of properties of the result. For other wrong values, `check` returns the first violated property, if any.
        aliases: other names of the exercise, for `check`.
        call: how functions are called, such as under `vmap` with a named axis: `(function, arguments) -> result`.
        jit: advice for a function that fails under `jax.jit`. If not empty, a function with right results is also called
            under `jax.jit`, with all arrays and numbers traced.
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
    call: Callable[[Callable[..., Any], tuple[Any, ...]], Any] = call_directly
    jit: str = ""

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
    """Return float32 samples of a standard normal distribution."""
    return np.random.default_rng(seed).normal(size=shape).astype(np.float32)
