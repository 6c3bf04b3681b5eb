"""Norms of gradients, and clipping by the global norm."""

from __future__ import annotations

from typing import Any

import jax
import jax.numpy as jnp
import optax


def squared_norms(grads: Any) -> jax.Array:
    """Compute the squared norm of each gradient, float32 `[leaves]`."""
    return jnp.stack([squared_norm(g) for g in jax.tree.leaves(grads)])


def squared_norm(x: jax.Array) -> jax.Array:
    """Compute the sum of squares of an array, a float32 scalar."""
    return jnp.square(x.astype(jnp.float32)).sum()


def clip_by_global_norm(highest: jax.typing.ArrayLike) -> optax.GradientTransformation:
    """Scale gradients by `min(1, highest / norm)`, as `optax.clip_by_global_norm` does."""

    def clip(grads: Any, _: Any) -> Any:
        # Some compilers fuse a product with the next operations; a division would write the gradients to memory first.
        factor = jnp.minimum(1.0, highest / jnp.sqrt(squared_norms(grads).sum()))
        return jax.tree.map(lambda g: g * factor.astype(g.dtype), grads)

    return optax.stateless(clip)
