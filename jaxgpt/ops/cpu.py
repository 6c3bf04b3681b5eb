"""Hints for XLA's CPU compiler. Other backends never see them."""

from __future__ import annotations

from collections.abc import Callable
from typing import Any

import jax
from jax.experimental.xla_metadata import set_xla_metadata


def call_without_inlining(function: Callable[..., Any], *args: jax.Array) -> Any:
    """Compute `function(*args)` in an XLA call that is neither inlined nor fused with its producers and consumers.

    `optimization_barrier` does not achieve this: barriers are removed before the CPU backend fuses. Marked as a small call,
    it becomes one kernel; an ordinary call would be run by an executor that occupies the threads of the other devices.

    Args:
        function: a module-level function, so that JAX's trace cache recognizes it.
    """
    with set_xla_metadata(inlineable="false", xla_cpu_small_call="true"):
        return jax.jit(function)(*args)


def transposed_copy(x: jax.Array) -> jax.Array:
    """Return `x^T` of a matrix, materialized.

    The CPU backend's matrix products want their left operand in rows. Left alone, XLA fuses the transposition with the
    operation that makes x and computes x column by column; where a row's length is a power of two, a column maps to few
    cache lines, and the copy takes 20 times as long.
    """
    y: jax.Array = call_without_inlining(_transpose, x)
    return y


def _transpose(x: jax.Array) -> jax.Array:
    return x.T
