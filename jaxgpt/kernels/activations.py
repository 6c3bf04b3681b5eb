"""Activation functions that save only their input for the backward pass."""

from __future__ import annotations

import jax
import jax.numpy as jnp

from jaxgpt.ops.activations import ACTIVATIONS, Activation, gelu, gelu_new, silu


def keeping_input(f: Activation) -> Activation:
    """Define the derivative of an `f` with `f(x) - f(-x) = x` as `1 - f'(-x)`, in float32 or better.

    GELU and SiLU are such functions. The backward pass recomputes erf, tanh or the sigmoid at -x. If it used
    values at x, XLA would save them in the forward pass: a second array of the MLP's width for every layer.
    """
    function = jax.custom_jvp(f)

    @function.defjvp
    def _(primals: tuple[jax.Array], tangents: tuple[jax.Array]) -> tuple[jax.Array, jax.Array]:
        (x,) = primals
        (dx,) = tangents
        x = jnp.asarray(x)
        wide = x.astype(jnp.float32) if x.dtype.itemsize < 4 else x
        _, slope = jax.jvp(f, (-wide,), (jnp.ones_like(wide),))
        return function(x), (1 - slope).astype(x.dtype) * dx

    return function


_KEPT: dict[Activation, Activation] = {f: keeping_input(f) for f in (gelu, gelu_new, silu)}


def activate(name: str, x: jax.Array) -> jax.Array:
    """Apply the named activation, like `ops.activations.activate`; GELU and SiLU save only their input."""
    f = ACTIVATIONS[name]
    return _KEPT.get(f, f)(x)
