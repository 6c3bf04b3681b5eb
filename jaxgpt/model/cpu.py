"""What XLA's CPU compiler has to be told. On other devices none of this is used."""

from __future__ import annotations

from collections.abc import Callable
from typing import Any

import jax
from jax.experimental.xla_metadata import set_xla_metadata


def not_inlined(function: Callable[..., Any], *args: jax.Array) -> Any:
    """`function(*args)` as an XLA call that is not inlined, and so not fused with what makes the arguments or uses the results.

    Left alone, the compiler computes the sine of a position anew for every head of every sequence. No barrier keeps it from
    that (they are gone before it fuses), but a call that must not be inlined does. As a small call it is one kernel; an
    ordinary one is run by an executor of its own, which takes the other devices' threads, and then they work one after the
    other.

    Args:
        function: a module-level one, so that JAX's cache of traces knows it again.
    """
    with set_xla_metadata(inlineable="false", xla_cpu_small_call="true"):
        return jax.jit(function)(*args)


def transposed_copy(x: jax.Array) -> jax.Array:
    """`x^T` of a matrix, as an array of its own.

    The compiler's products want their left operand in rows. Left alone it fuses the transposition with whatever made x, and
    then computes x column by column: where a row is a power of two long, a column falls on a few lines of the cache, and the
    copy takes 20 times as long.
    """
    y: jax.Array = not_inlined(_transpose, x)
    return y


def _transpose(x: jax.Array) -> jax.Array:
    return x.T
