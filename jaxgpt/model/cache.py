"""The key/value cache: a pytree that the model takes and returns.

Rows of different lengths are left-padded: row b starts at slot `start_B[b]`. A token's position is its slot minus the start of
its row, so padding is neither attended to nor counted. The order of the axes is the one in which the products of a single query
read keys and values: otherwise XLA's CPU backend would transpose the whole cache for every token.
"""

from __future__ import annotations

from typing import NamedTuple

import jax
import jax.numpy as jnp

from jaxgpt.config import ModelConfig


class KVCache(NamedTuple):
    """Keys and values of the tokens so far.

    Attributes:
        k: keys of each layer, `[B, K, S, H]`.
        v: values of each layer, `[B, K, H, S]`.
        start_B: first slot of each row, int32.
        length: number of filled slots, int32 scalar; the next token is written to this slot. A new cache has the Python
            integer 0, so that a function that creates one knows while it is traced that no earlier keys exist.
    """

    k: tuple[jax.Array, ...]
    v: tuple[jax.Array, ...]
    start_B: jax.Array
    length: jax.Array | int

    @property
    def size(self) -> int:
        """Number of slots."""
        return self.k[0].shape[2]


def init_cache(config: ModelConfig, start_B: jax.Array, size: int, dtype: jnp.dtype = jnp.float32) -> KVCache:
    """Make an empty cache of `size` slots for `len(start_B)` rows."""
    # Zeros, because an attention weight of 0 times an uninitialized NaN is NaN.
    B, K, H, layers = start_B.shape[0], config.kv_heads, config.head_width, range(config.n_layer)
    return KVCache(
        k=tuple(jnp.zeros((B, K, size, H), dtype) for _ in layers),
        v=tuple(jnp.zeros((B, K, H, size), dtype) for _ in layers),
        start_B=start_B.astype(jnp.int32),
        length=0,
    )


def write(
    k_BKSH: jax.Array, v_BKHS: jax.Array, new_k_BTKH: jax.Array, new_v_BTKH: jax.Array, slot: jax.Array | int
) -> tuple[jax.Array, jax.Array]:
    """Write the keys and values of T tokens into the cache of a layer, starting at `slot`.

    Callers check that they fit: XLA silently shifts an update that would pass the end.
    """
    new_k_BKTH = new_k_BTKH.transpose(0, 2, 1, 3).astype(k_BKSH.dtype)
    new_v_BKHT = new_v_BTKH.transpose(0, 2, 3, 1).astype(v_BKHS.dtype)
    update = jax.lax.dynamic_update_slice_in_dim
    return update(k_BKSH, new_k_BKTH, slot, 2), update(v_BKHS, new_v_BKHT, slot, 3)
