"""Activation functions: values and derivatives, and what a layer keeps for the backward pass."""

from __future__ import annotations

import math
from collections.abc import Callable

import jax
import jax.numpy as jnp
import numpy as np
import pytest

from jaxgpt.ops.activations import ACTIVATIONS

JAX = {"gelu": lambda x: jax.nn.gelu(x, approximate=False), "gelu_new": jax.nn.gelu, "silu": jax.nn.silu}
every_smooth = pytest.mark.parametrize("name", JAX)


def exact(name: str, x: np.ndarray) -> np.ndarray:
    """In float64, with NumPy."""
    match name:
        case "gelu":
            return 0.5 * x * (1 + np.vectorize(math.erf)(x / math.sqrt(2)))
        case "gelu_new":
            return 0.5 * x * (1 + np.tanh(math.sqrt(2 / math.pi) * (x + 0.044715 * x**3)))
        case _:
            return x / (1 + np.exp(-x))


@every_smooth
def test_values_and_derivatives_equal_numpy(name: str) -> None:
    x, h = np.linspace(-12, 12, 4801), 1e-5
    derivatives = (exact(name, x + h) - exact(name, x - h)) / (2 * h)
    np.testing.assert_allclose(ACTIVATIONS[name](jnp.float32(x)), exact(name, x), atol=1e-6)
    np.testing.assert_allclose(jax.vmap(jax.grad(ACTIVATIONS[name]))(jnp.float32(x)), derivatives, atol=5e-6)


@every_smooth
@pytest.mark.parametrize("x", [-1e4, -100.0, 0.0, 100.0, 1e4])
def test_far_from_zero(name: str, x: float) -> None:
    f = ACTIVATIONS[name]
    assert (float(f(x)), float(jax.grad(f)(x))) == (max(x, 0.0), 0.5 if x == 0 else float(x > 0))


@every_smooth
def test_bfloat16_derivatives_are_rounded_once(name: str) -> None:
    x = jnp.linspace(-12, 12, 4801).astype(jnp.bfloat16)
    ours, wide = (jax.vmap(jax.grad(ACTIVATIONS[name]))(x) for x in (x, x.astype(jnp.float32)))
    np.testing.assert_array_equal(ours, wide.astype(jnp.bfloat16))


@every_smooth
def test_second_derivatives_and_forward_mode(name: str) -> None:
    x = jnp.linspace(-4, 4, 81)
    ours, theirs = (jax.vmap(jax.grad(jax.grad(f)))(x) for f in (ACTIVATIONS[name], JAX[name]))
    np.testing.assert_allclose(ours, theirs, atol=1e-5)
    derivatives = jax.jvp(ACTIVATIONS[name], (x,), (jnp.ones_like(x),))[1]
    np.testing.assert_allclose(derivatives, jax.vmap(jax.grad(ACTIVATIONS[name]))(x), rtol=1e-5, atol=1e-6)


@every_smooth
def test_a_layer_keeps_one_array_less_than_with_jax(name: str) -> None:
    x, up, down = jnp.ones((512, 8)), jnp.ones((8, 128)), jnp.ones((128, 8))

    def memory(f: Callable[[jax.Array], jax.Array]) -> int:
        def loss(up: jax.Array, down: jax.Array) -> jax.Array:
            return (f(f(x @ up) @ down @ up) @ down).sum()

        analysis = jax.jit(jax.grad(loss, (0, 1))).lower(up, down).compile().memory_analysis()
        assert analysis
        return int(analysis.temp_size_in_bytes)

    hidden = 512 * 128 * 4
    assert memory(ACTIVATIONS[name]) <= memory(JAX[name]) - hidden
