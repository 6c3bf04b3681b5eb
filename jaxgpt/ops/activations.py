"""Activation functions of the MLP, by name."""

from __future__ import annotations

import math
from collections.abc import Callable

import jax
import jax.numpy as jnp

Activation = Callable[[jax.Array], jax.Array]


def keeping_input(f: Activation) -> Activation:
    """Give `f`, for which `f(x) - f(-x) = x`, the derivative `f'(x) = 1 - f'(-x)`, computed in float32 or better.

    The functions below have this property: each is x times a function that is 1/2 plus an odd one. The backward pass then
    computes erf, tanh or the sigmoid again, at -x. At x, XLA would compute it once, in the forward pass, and keep it: a second
    array of the MLP's width for every layer.
    """
    function = jax.custom_jvp(f)

    @function.defjvp
    def _(primals: tuple[jax.Array], tangents: tuple[jax.Array]) -> tuple[jax.Array, jax.Array]:
        (x,), (dx,) = primals, tangents
        x = jnp.asarray(x)
        wide = x.astype(jnp.float32) if x.dtype.itemsize < 4 else x
        _, slope = jax.jvp(f, (-wide,), (jnp.ones_like(wide),))
        return function(x), (1 - slope).astype(x.dtype) * dx

    return function


@keeping_input
def gelu(x: jax.Array) -> jax.Array:
    """Compute `x Phi(x)`, with Phi the normal distribution function. Source: Hendrycks & Gimpel 2016.

    By erf, not erfc as in `jax.nn.gelu`: erfc has two branches and compiles more slowly.
    """
    return 0.5 * x * (1 + jax.lax.erf(x * math.sqrt(0.5)))


@keeping_input
def gelu_new(x: jax.Array) -> jax.Array:
    """Compute `0.5 x (1 + tanh(sqrt(2 / pi) (x + 0.044715 x^3)))`, GPT-2's approximation of `gelu`."""
    return jax.nn.gelu(x, approximate=True)


@keeping_input
def silu(x: jax.Array) -> jax.Array:
    """Compute `x / (1 + exp(-x))`. Source: Elfwing et al. 2017."""
    return jax.nn.silu(x)


def relu2(x: jax.Array) -> jax.Array:
    """Compute `max(x, 0)^2`. Source: So et al. 2021 (Primer)."""
    return jnp.square(jax.nn.relu(x))


ACTIVATIONS: dict[str, Activation] = {
    "gelu": gelu,
    "gelu_new": gelu_new,
    "relu": jax.nn.relu,
    "relu2": relu2,
    "silu": silu,
}
