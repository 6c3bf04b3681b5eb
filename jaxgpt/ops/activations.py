"""Activation functions of the MLP, and a registry of the functions by name."""

from __future__ import annotations

import math
from collections.abc import Callable

import jax
import jax.numpy as jnp

from jaxgpt.ops.registry import Registry

Activation = Callable[[jax.Array], jax.Array]


def gelu(x: jax.Array) -> jax.Array:
    """Compute `x * Phi(x)`, with Phi the standard normal CDF. Source: Hendrycks & Gimpel 2016."""
    return 0.5 * x * (1 + jax.lax.erf(x * math.sqrt(0.5)))


def gelu_new(x: jax.Array) -> jax.Array:
    """Compute `0.5 * x * (1 + tanh(sqrt(2/pi) * (x + 0.044715 * x^3)))`, GPT-2's approximation of `gelu`."""
    return jax.nn.gelu(x, approximate=True)


def silu(x: jax.Array) -> jax.Array:
    """Compute `x / (1 + exp(-x))`. Source: Elfwing et al. 2017."""
    return jax.nn.silu(x)


def relu2(x: jax.Array) -> jax.Array:
    """Compute `max(x, 0)^2`. Source: So et al. 2021 (Primer)."""
    return jnp.square(jax.nn.relu(x))


ACTIVATIONS: Registry[Activation] = Registry(gelu=gelu, gelu_new=gelu_new, relu=jax.nn.relu, relu2=relu2, silu=silu)


def activate(name: str, x: jax.Array) -> jax.Array:
    """Apply the activation function of this name elementwise."""
    return ACTIVATIONS[name](x)
