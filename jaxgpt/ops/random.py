"""Named random keys, all derived from one seed: there is no generator state to save."""

from __future__ import annotations

import zlib

import jax


def named_key(seed: jax.typing.ArrayLike, name: str, index: jax.typing.ArrayLike = 0) -> jax.Array:
    """Derive a key by name: `fold_in(fold_in(key(seed), crc32(name) mod 2^31), index)`.

    Args:
        seed: the seed that all keys are derived from, an integer; may be traced.
        name: purpose of the key, such as "init" or "dropout"; keys with different names are independent.
        index: integer that distinguishes keys of the same name, usually the step.
    """
    key = fold_in_name(jax.random.key(seed), name)
    return jax.random.fold_in(key, index)


def fold_in_name(key: jax.Array, name: str) -> jax.Array:
    """Derive a key from a key and a name: `fold_in(key, crc32(name) mod 2^31)`; unlike `hash`, equal in every process."""
    return jax.random.fold_in(key, zlib.crc32(name.encode()) & 0x7FFFFFFF)


def subkey(key: jax.Array | None, index: int | jax.Array) -> jax.Array | None:
    """Derive the key of one of several consumers: `fold_in(key, index)`; None if `key` is None."""
    return None if key is None else jax.random.fold_in(key, index)
