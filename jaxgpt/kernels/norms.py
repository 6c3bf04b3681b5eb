"""Norms for GPUs: the gradient of the gain stores no float32 copy of the vectors (measured in benchmarks/LOG.md)."""

from __future__ import annotations

from functools import partial
from typing import Any

import jax
import jax.numpy as jnp

from jaxgpt.ops import norms
from jaxgpt.ops.attention import Edit


@partial(jax.custom_vjp, nondiff_argnums=(0, 1))
def _scaled(kind: str, eps: float, x: jax.Array, gain: jax.Array) -> jax.Array:
    return norms.norm(kind, x, eps, gain)


def _forward(kind: str, eps: float, x: jax.Array, gain: jax.Array) -> tuple[jax.Array, Any]:
    return _scaled(kind, eps, x, gain), (x, gain)


def _backward(kind: str, eps: float, saved: Any, dy: jax.Array) -> tuple[jax.Array, jax.Array]:
    x, gain = saved
    (dx,) = jax.vjp(lambda x: norms.norm(kind, x, eps, gain), x)[1](dy)
    wide = x.astype(jnp.float32)
    mean = wide.mean(-1, keepdims=True) if kind == "layernorm" else jnp.zeros_like(wide, shape=(*x.shape[:-1], 1))
    factor = jax.lax.rsqrt(jnp.square(wide - mean).mean(-1, keepdims=True) + eps)
    # XLA computes what is behind a barrier once: the sum over tokens is then one pass over x and dy.
    mean, factor = jax.lax.optimization_barrier((mean, factor))
    return dx, (dy * (wide - mean) * factor).sum(range(x.ndim - 1))


_scaled.defvjp(_forward, _backward)


def norm(
    kind: str,
    x: jax.Array,
    eps: float,
    gain: jax.Array | None = None,
    bias: jax.Array | None = None,
    edit: Edit | None = None,
) -> jax.Array:
    """Normalize as `ops.norms.norm`; the gradient of `gain` reads x and dy once."""
    if gain is None or edit or kind not in ("layernorm", "rmsnorm"):
        return norms.norm(kind, x, eps, gain, bias, edit)
    y = _scaled(kind, eps, x, gain)
    return y if bias is None else y + jnp.broadcast_to(bias, y.shape)
