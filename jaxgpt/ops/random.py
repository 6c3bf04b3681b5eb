"""Random keys by name: every consumer derives its own key from one seed, so there is no generator state to save."""

from __future__ import annotations

import zlib

import jax


def named_key(seed: jax.typing.ArrayLike, name: str, index: jax.typing.ArrayLike = 0) -> jax.Array:
    """Derive the key of a named stream of randomness.

    `fold_in(fold_in(key(seed), crc32(name)), index)`: streams with different names are independent.

    Args:
        seed: an integer, or a traced one.
        name: the stream, such as "init" or "dropout".
        index: a position in the stream, usually the step.
    """
    key = jax.random.fold_in(jax.random.key(seed), zlib.crc32(name.encode()) & 0x7FFFFFFF)
    return jax.random.fold_in(key, index)


def subkey(key: jax.Array | None, index: int | jax.Array) -> jax.Array | None:
    """Derive the key of one of several consumers; None stays None."""
    return None if key is None else jax.random.fold_in(key, index)
