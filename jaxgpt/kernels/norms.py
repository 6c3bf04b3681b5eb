"""Norms for GPUs: the gradient of the gain stores no float32 copy of the vectors (measured in benchmarks/LOG.md)."""

from __future__ import annotations

from functools import partial
from typing import Any

import jax
import jax.numpy as jnp

from jaxgpt.ops import Array, norms
from jaxgpt.ops.attention import Edit


@partial(jax.custom_jvp, nondiff_argnums=(0, 1))
def _gained(kind: str, eps: float, x: Array, gain: Array) -> Array:
    """Compute a norm with a gain, and without a bias."""
    return norms.norm(kind, x, eps, gain)


@_gained.defjvp
def _gained_jvp(kind: str, eps: float, primals: Any, tangents: Any) -> tuple[Array, Array]:
    x, gain = primals
    dx, dgain = tangents
    y, dy_of_x = jax.jvp(lambda x: norms.norm(kind, x, eps, gain), (x,), (dx,))

    # The output is linear in the gain: its tangent is `normed x * dgain`, with the normed x computed again.
    x = x.astype(jnp.float32)
    mean = x.mean(-1, keepdims=True) if kind == "layernorm" else jnp.zeros_like(x[..., :1])
    variance = jnp.square(x - mean).mean(-1, keepdims=True)
    factor = jax.lax.rsqrt(variance + eps)
    # XLA computes the operands of a barrier once: the sum over tokens is then one pass over x and dy.
    mean, factor = jax.lax.optimization_barrier((mean, factor))
    dy_of_gain = (x - mean) * factor * jnp.broadcast_to(dgain, x.shape)
    return y, dy_of_x + dy_of_gain


def norm(
    kind: str, x: Array, eps: float, gain: Array | None = None, bias: Array | None = None, edit: Edit | None = None
) -> Array:
    """Normalize like `ops.norms.norm`, but compute the gradient of the gain in one pass over x and dy.

    The gradient of the gain is `sum(normed x * dy)` over tokens.
    """
    if gain is None or edit or kind not in ("layernorm", "rmsnorm"):
        return norms.norm(kind, x, eps, gain, bias, edit)
    y = _gained(kind, eps, x, gain)
    if bias is None:
        return y
    return y + jnp.broadcast_to(bias, y.shape)
