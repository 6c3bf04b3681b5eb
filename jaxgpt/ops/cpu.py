"""Hints for XLA's CPU compiler, most of them for use under `jax.lax.platform_dependent`. Measurements are in docs/log.md."""

from __future__ import annotations

import functools
from collections.abc import Callable
from typing import Any

import jax
from jax.experimental.xla_metadata import set_xla_metadata


def call_without_inlining(function: Callable[..., Any], *args: jax.Array, small: bool = True) -> Any:
    """Compute `function(*args)` in an XLA call that is neither inlined nor fused with its producers and consumers.

    `optimization_barrier` does not prevent fusion: the CPU backend removes barriers first.

    Args:
        function: a module-level function, so that JAX caches its trace.
        small: whether the call becomes one kernel, on one core. Otherwise its operations use all cores, in an executor that
            blocks the threads of other devices.
    """
    with set_xla_metadata(inlineable="false", **({"xla_cpu_small_call": "true"} if small else {})):
        return jax.jit(function)(*args)


def apply_alone(function: Callable[..., Any], *args: jax.Array) -> Any:
    """Compute `function(*args)`; on a CPU in a call that is not inlined, and whose operations use all cores."""
    call = functools.partial(call_without_inlining, function, small=False)
    return jax.lax.platform_dependent(*args, cpu=call, default=function)


def transposed_copy(x: jax.Array) -> jax.Array:
    """Return a materialized copy of `x^T`, for a matrix x.

    The CPU backend copies transposed left operands of matrix products and fuses that copy with the operation that produces x.
    The fusion computes x column by column, which is up to 20 times slower.
    """
    y: jax.Array = call_without_inlining(_transpose, x)
    return y


def _transpose(x: jax.Array) -> jax.Array:
    return x.T
