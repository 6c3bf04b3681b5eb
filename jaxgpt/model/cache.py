"""The key/value cache: a pytree that the model takes and returns.

Rows of different lengths are left-padded, so that all rows write to the same slot. Padding has no position and is masked.
"""

from __future__ import annotations

from typing import NamedTuple

import jax
import jax.numpy as jnp

from jaxgpt.ops.attention import NO_TOKEN, Positions


class KeysValues(NamedTuple):
    """The keys and values of one layer, in the layout of `ops.attention.attend`."""

    k_BKSH: jax.Array
    v_BKHS: jax.Array

    def write(self, slot: jax.Array | int, new: KeysValues) -> KeysValues:
        """Write the keys and values of T tokens, starting at `slot`.

        The caller must check that the tokens fit: JAX silently shifts an update that would exceed the end.
        """
        update = jax.lax.dynamic_update_slice_in_dim
        k_BKSH = update(self.k_BKSH, new.k_BKSH, slot, 2)
        v_BKHS = update(self.v_BKHS, new.v_BKHS, slot, 3)
        return KeysValues(k_BKSH, v_BKHS)


class LayerCache(NamedTuple):
    """The part of a cache that a layer reads and extends.

    Attributes:
        kv: the layer's cached keys and values.
        slot: the first slot to write to, an int32 scalar.
    """

    kv: KeysValues
    slot: jax.Array


class KVCache(NamedTuple):
    """Keys and values of the tokens so far.

    `GPT.extend` first reserves slots for new tokens, which sets their positions; then each layer writes its keys and values
    to these slots, starting at `length`; then `length` increases.

    Attributes:
        layers: keys and values of each layer.
        position_BS: position of the token in each slot; `NO_TOKEN` for padding. Positions in slots starting at `length` have no
            effect, because `reserve` replaces them. So reducing `length` drops the last tokens.
        length: int32 scalar, the slot of the next token.
    """

    layers: tuple[KeysValues, ...]
    position_BS: jax.Array
    length: jax.Array

    @property
    def size(self) -> int:
        """Number of slots."""
        return self.position_BS.shape[1]

    def reserve(self, count: int) -> tuple[Positions, KVCache]:
        """Assign positions to the next `count` slots; return the positions, and the cache with these positions.

        The slots after them become empty: a slot may hold the position of a token that was dropped.
        """
        is_used_1S = jnp.arange(self.size)[None] < self.length
        position_BS = jnp.where(is_used_1S, self.position_BS, NO_TOKEN)

        # In a row without tokens, the maximum is `NO_TOKEN`, -1, so the first position is 0.
        last_B1 = position_BS.max(axis=1, keepdims=True)
        new_BT = last_B1 + 1 + jnp.arange(count, dtype=jnp.int32)[None]
        position_BS = jax.lax.dynamic_update_slice_in_dim(position_BS, new_BT, self.length, 1)
        return Positions(new_BT), self._replace(position_BS=position_BS)


def grow(cache: KVCache, slots: int) -> KVCache:
    """Return the cache with `slots` additional empty slots."""

    def pad(x: jax.Array, axis: int, value: int = 0) -> jax.Array:
        widths = [(0, 0)] * x.ndim
        widths[axis] = (0, slots)
        return jnp.pad(x, widths, constant_values=value)

    # Pad with zeros, because an attention weight of 0 times an uninitialized NaN is NaN.
    layers = []
    for k_BKSH, v_BKHS in cache.layers:
        layers.append(KeysValues(pad(k_BKSH, 2), pad(v_BKHS, 3)))
    position_BS = pad(cache.position_BS, 1, NO_TOKEN)
    return KVCache(tuple(layers), position_BS, cache.length)
