"""The global norm of gradients, and clipping by it."""

from __future__ import annotations

from typing import Any

import jax
import jax.numpy as jnp
import optax

from jaxgpt.ops.linear import squared_norm


def global_norm(grads: Any) -> jax.Array:
    """Compute the norm of all gradients together, a float32 scalar."""
    return jnp.sqrt(sum(map(squared_norm, jax.tree.leaves(grads)), jnp.float32(0)))


def clip_by_global_norm(highest: jax.typing.ArrayLike) -> optax.GradientTransformationExtraArgs:
    """Scale gradients by `min(1, highest / norm)`, as `optax.clip_by_global_norm` does.

    `train_step` passes the norm as the extra argument `grad_norm` of `update`; None: compute it.
    """

    def clip(grads: Any, state: Any, params: Any = None, *, grad_norm: jax.Array | None = None, **_: Any) -> Any:
        norm = global_norm(grads) if grad_norm is None else grad_norm
        # The compiler fuses a product into the consumer of the gradients; a division would write them to memory first.
        factor = jnp.minimum(1.0, highest / norm)
        return jax.tree.map(lambda g: g * factor.astype(g.dtype), grads), state

    return optax.GradientTransformationExtraArgs(lambda _: optax.EmptyState(), clip)
