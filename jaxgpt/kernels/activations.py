"""Activation functions with derivatives that need only the input of the forward pass, no other value."""

from __future__ import annotations

import jax
import jax.numpy as jnp

from jaxgpt.ops.activations import ACTIVATIONS, Activation, gelu, gelu_new, silu


def keeping_input(f: Activation) -> Activation:
    """Define the derivative of an `f` with `f(x) - f(-x) = x` as `1 - f'(-x)`, in float32 or better.

    GELU and SiLU are such functions. The derivative computes erf, tanh or the sigmoid at -x, which the forward pass does not
    need. Under `jax.jit`, XLA thus computes it in the backward pass, and keeps only x until then. If it used values at x, XLA
    would keep them too: a second array of the MLP's width for every layer. A scan over layers keeps the derivative instead of
    x.

    The derivative is not a `custom_vjp`, which has no forward mode (`jax.jvp`).
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
    """Apply the named activation, like `ops.activations.activate`; GELU and SiLU with `keeping_input`."""
    f = ACTIVATIONS[name]
    return _KEPT.get(f, f)(x)
