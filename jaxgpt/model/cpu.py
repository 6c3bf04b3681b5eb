"""What XLA's CPU compiler has to be told. On other devices none of this is used."""

from __future__ import annotations

import jax
from jax.experimental.xla_metadata import set_xla_metadata


def transposed_copy(x: jax.Array) -> jax.Array:
    """`x^T` of a matrix, as an array of its own.

    The compiler's products want their left operand in rows. Left alone it fuses the transposition with whatever made x, and
    then computes x column by column: where a row is a power of two long, a column falls on a few lines of the cache, and the
    copy takes 20 times as long. No barrier keeps it from that (they are gone before it fuses), but a call that must not be
    inlined does. As a small call it is one kernel; an ordinary one is run by an executor of its own, which takes the other
    devices' threads, and then they work one after the other.
    """
    with set_xla_metadata(inlineable="false", xla_cpu_small_call="true"):
        y: jax.Array = _transpose(x)
        return y


@jax.jit
def _transpose(x: jax.Array) -> jax.Array:
    return x.T
