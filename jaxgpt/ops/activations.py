"""Activation functions of the MLP, by name."""

from __future__ import annotations

import functools
import math
from collections.abc import Callable

import jax
import jax.numpy as jnp


def gelu(x: jax.Array) -> jax.Array:
    """Compute `x Phi(x)`, with Phi the normal distribution function. Source: Hendrycks & Gimpel 2016.

    `jax.nn.gelu(approximate=False)` uses `erfc`, which is slower on every backend.
    """
    return 0.5 * x * (1 + jax.lax.erf(x * math.sqrt(0.5)))


def relu2(x: jax.Array) -> jax.Array:
    """Compute `max(x, 0)^2`. Source: So et al. 2021 (Primer)."""
    return jnp.square(jax.nn.relu(x))


ACTIVATIONS: dict[str, Callable[[jax.Array], jax.Array]] = {
    "gelu": gelu,
    "gelu_new": functools.partial(jax.nn.gelu, approximate=True),  # 0.5 x (1 + tanh(sqrt(2/pi) (x + 0.044715 x^3)))
    "relu": jax.nn.relu,
    "relu2": relu2,
    "silu": jax.nn.silu,  # x sigmoid(x)
}
