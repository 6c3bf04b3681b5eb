"""The key/value cache: a pytree that the model takes and returns.

Rows of different lengths are left-padded: row b starts at slot `start_B[b]`. A token's position is its slot minus the start of
its row, so padding is neither attended to nor counted.
"""

from __future__ import annotations

from typing import NamedTuple

import jax
import jax.numpy as jnp

from jaxgpt.config import ModelConfig


class KVCache(NamedTuple):
    """Keys and values of the tokens so far.

    Attributes:
        k: keys of each layer, `[B, S, K, H]`.
        v: values of each layer, `[B, S, K, H]`.
        start_B: first slot of each row, int32.
        length: number of filled slots, int32 scalar; the next token is written to this slot. A new cache has the Python
            integer 0, so that a function that creates one knows while it is traced that no earlier keys exist.
    """

    k: tuple[jax.Array, ...]
    v: tuple[jax.Array, ...]
    start_B: jax.Array
    length: jax.Array | int


def init_cache(config: ModelConfig, start_B: jax.Array, size: int, dtype: jnp.dtype = jnp.float32) -> KVCache:
    """Make an empty cache of `size` slots for `len(start_B)` rows."""
    # Zeros, because an attention weight of 0 times an uninitialized NaN is NaN.
    shape = (start_B.shape[0], size, config.kv_heads, config.head_width)
    layers = range(config.n_layer)
    return KVCache(
        k=tuple(jnp.zeros(shape, dtype) for _ in layers),
        v=tuple(jnp.zeros(shape, dtype) for _ in layers),
        start_B=start_B.astype(jnp.int32),
        length=0,
    )


def write(cache_BSKH: jax.Array, new_BTKH: jax.Array, slot: jax.Array | int) -> jax.Array:
    """Write T new entries into the cache, starting at `slot`.

    Callers check that they fit: XLA silently shifts an update that would pass the end.
    """
    return jax.lax.dynamic_update_slice_in_dim(cache_BSKH, new_BTKH.astype(cache_BSKH.dtype), slot, 1)
