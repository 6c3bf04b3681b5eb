"""Norms of gradients, and clipping by the global norm."""

from __future__ import annotations

from typing import Any

import jax
import jax.numpy as jnp
import optax

from jaxgpt.ops.sharding import weights_are_whole
from jaxgpt.ops.sums import sum_of_squares


def squared_norms(grads: Any) -> jax.Array:
    """Compute the squared norm of every gradient, float32 `[leaves]`: the terms of the squared global norm."""

    def in_parts(leaves: list[jax.Array]) -> jax.Array:
        return jnp.stack([sum_of_squares(leaf).astype(jnp.float32) for leaf in leaves])

    def plain(leaves: list[jax.Array]) -> jax.Array:
        # With 64-bit types enabled, optax returns float64.
        return jnp.stack([optax.tree.norm(leaf, squared=True).astype(jnp.float32) for leaf in leaves])

    leaves = jax.tree.leaves(grads)
    norms: jax.Array = jax.lax.platform_dependent(leaves, cpu=in_parts if weights_are_whole() else plain, default=plain)
    return norms


def global_norm(grads: Any) -> jax.Array:
    """Compute the norm of all gradients together, a float32 scalar."""
    return jnp.sqrt(squared_norms(grads).sum())


def clip_by_global_norm(highest: float) -> optax.GradientTransformation:
    """Make the transformation of `optax.clip_by_global_norm`, which computes the norm as the metrics do: once per step."""

    def clip(grads: Any, _: Any) -> Any:
        # A factor of every gradient is fused into what reads the gradient; a division would write it to memory first.
        factor = jnp.minimum(1.0, highest / global_norm(grads))
        return jax.tree.map(lambda g: g * factor.astype(g.dtype), grads)

    return optax.stateless(clip)
