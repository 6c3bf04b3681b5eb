"""Move one array between the host and the devices of a mesh, in one or several processes."""

from __future__ import annotations

import functools
from collections.abc import Sequence
from typing import Any

import jax
import jax.numpy as jnp
import numpy as np
from jax.experimental import multihost_utils
from jax.sharding import Sharding


def to_host(array: Any) -> np.ndarray:
    """Return an array as a NumPy array; if it is sharded over several processes, all processes must call this function.

    The host copy is not cached in `array`, unlike with `np.asarray(array)`.
    """
    if not isinstance(array, jax.Array):
        return np.asarray(array)
    if not array.is_fully_addressable:
        return np.asarray(multihost_utils.process_allgather(array, tiled=True))
    return np.asarray(jnp.copy(array))


def put_array(array: Any, sharding: Sharding) -> jax.Array:
    """Put an array on devices; return it unchanged if it already has the sharding.

    With several processes, each process must have the complete array or, for a `jax.Array`, its shards of the array.
    """
    if isinstance(array, jax.Array) and array.sharding == sharding:
        return array
    is_local = not isinstance(array, jax.Array) or array.is_fully_addressable
    if is_local and sharding.is_fully_addressable:
        return jax.block_until_ready(jax.device_put(array, sharding))
    whole = to_host(array)
    return jax.make_array_from_callback(whole.shape, sharding, lambda index: whole[index])


def stack_arrays(arrays: Sequence[Any], sharding: Sharding) -> jax.Array:
    """Stack arrays of equal shapes and shardings along a new first axis; the result has the given sharding."""
    first = arrays[0]
    if not isinstance(first, jax.Array) or first.sharding.device_set != sharding.device_set:
        return put_array(np.stack([to_host(array) for array in arrays]), sharding)
    stack = _stack(sharding)
    return jax.block_until_ready(stack(*arrays))


@functools.lru_cache(maxsize=64)
def _stack(sharding: Sharding) -> Any:
    return jax.jit(lambda *arrays: jnp.stack(arrays), out_shardings=sharding)
