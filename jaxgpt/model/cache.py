"""The key/value cache: a plain pytree that goes into the model and comes out of it.

Rows of one batch may differ in length: they are aligned at their ends, and row b begins at slot `start_B[b]`. A token's
position is its slot minus its row's start, so that no row ever sees, or counts, the empty slots before it.
"""

from __future__ import annotations

from typing import NamedTuple

import jax
import jax.numpy as jnp

from jaxgpt.config import ModelConfig


class KVCache(NamedTuple):
    """Keys and values of the tokens so far.

    Attributes:
        k: for each layer `[B, S, K, H]`.
        v: as k.
        start_B: int32, the first slot of each row.
        length: int32 scalar, slots filled; the next token is written there.
    """

    k: tuple[jax.Array, ...]
    v: tuple[jax.Array, ...]
    start_B: jax.Array
    length: jax.Array


def init_cache(config: ModelConfig, start_B: jax.Array, size: int, dtype: jnp.dtype = jnp.float32) -> KVCache:
    """An empty cache of `size` slots for `len(start_B)` rows."""
    # Zeros, not empty: weight 0 times an uninitialised NaN would be NaN.
    shape = (start_B.shape[0], size, config.kv_heads, config.head_width)
    layers = range(config.n_layer)
    return KVCache(
        k=tuple(jnp.zeros(shape, dtype) for _ in layers),
        v=tuple(jnp.zeros(shape, dtype) for _ in layers),
        start_B=start_B.astype(jnp.int32),
        length=jnp.zeros((), jnp.int32),
    )


def write(cache_BSKH: jax.Array, new_BTKH: jax.Array, slot: jax.Array) -> jax.Array:
    """The cache with T new rows from `slot` on. The caller has made sure that they fit: an update past the end would
    be moved back by XLA, silently, onto the last slots."""
    zero = jnp.zeros((), slot.dtype)
    return jax.lax.dynamic_update_slice(cache_BSKH, new_BTKH.astype(cache_BSKH.dtype), (zero, slot, zero, zero))
