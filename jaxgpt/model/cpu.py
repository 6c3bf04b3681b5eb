"""What XLA's CPU compiler has to be told. On other devices none of this is used."""

from __future__ import annotations

from collections.abc import Callable
from typing import Any

import jax
from jax.experimental.xla_metadata import set_xla_metadata


def apart(function: Callable[..., Any], *args: jax.Array) -> Any:
    """`function(*args)` as arrays of their own, which is no part of what makes the arguments or uses the results.

    The compiler fuses across everything, and computes the sine of a position anew for every head of every sequence. No
    barrier keeps it from that (they are gone before it fuses), but a call that must not be inlined does. As a small call it
    is one kernel; an ordinary one is run by an executor of its own, which takes the other devices' threads, and then they
    work one after the other.

    Args:
        function: one of a module's own, of which jax keeps the trace.
    """
    with set_xla_metadata(inlineable="false", xla_cpu_small_call="true"):
        return jax.jit(function)(*args)


def transposed_copy(x: jax.Array) -> jax.Array:
    """`x^T` of a matrix, as an array of its own.

    The compiler's products want their left operand in rows. Left alone it fuses the transposition with whatever made x, and
    then computes x column by column: where a row is a power of two long, a column falls on a few lines of the cache, and the
    copy takes 20 times as long.
    """
    y: jax.Array = apart(_transpose, x)
    return y


def _transpose(x: jax.Array) -> jax.Array:
    return x.T
