"""Activation functions: values and derivatives, for the definitions and the functions that keep only their input."""

from __future__ import annotations

import math
from functools import partial
from typing import Any

import jax
import jax.numpy as jnp
import numpy as np
import pytest

from jaxgpt import kernels
from jaxgpt.ops import Ops

JAX = {"gelu": partial(jax.nn.gelu, approximate=False), "gelu_new": jax.nn.gelu, "silu": jax.nn.silu}
OPTIMIZED = {"xla_backend_optimization_level": 3}  # as for users: without optimization, tanh does not reach -1
every_smooth = pytest.mark.parametrize("name", JAX)
both = pytest.mark.parametrize("ops", [Ops(), kernels.PLAIN], ids=["definition", "kernel"])


def exact(name: str, x: np.ndarray) -> np.ndarray:
    """Compute the activation in float64, with NumPy."""
    match name:
        case "gelu":
            return 0.5 * x * (1 + np.vectorize(math.erf)(x / math.sqrt(2)))
        case "gelu_new":
            return 0.5 * x * (1 + np.tanh(math.sqrt(2 / math.pi) * (x + 0.044715 * x**3)))
        case _:
            return x / (1 + np.exp(-x))


@both
@every_smooth
def test_values_and_derivatives_equal_numpy(name: str, ops: Ops) -> None:
    x = np.linspace(-12, 12, 4801)
    h = 1e-5
    f = partial(ops.activate, name)
    derivatives = (exact(name, x + h) - exact(name, x - h)) / (2 * h)

    compiled = jax.jit(f, compiler_options=OPTIMIZED)
    derivative = jax.jit(jax.vmap(jax.grad(f)), compiler_options=OPTIMIZED)
    np.testing.assert_allclose(compiled(jnp.float32(x)), exact(name, x), atol=1e-6)
    np.testing.assert_allclose(derivative(jnp.float32(x)), derivatives, atol=5e-6)


@both
@every_smooth
@pytest.mark.parametrize("x", [-1e4, -100.0, 0.0, 100.0, 1e4])
def test_far_from_zero(name: str, x: float, ops: Ops) -> None:
    """The functions approach ReLU; their derivative at 0 is 0.5."""
    f: Any = partial(ops.activate, name)
    derivative = 0.5 if x == 0 else float(x > 0)
    assert float(f(x)) == max(x, 0.0)
    assert float(jax.grad(f)(x)) == derivative


@both
@every_smooth
def test_second_derivatives_equal_jax(name: str, ops: Ops) -> None:
    x = jnp.linspace(-4, 4, 81)
    found = second_derivative(partial(ops.activate, name))(x)
    np.testing.assert_allclose(found, second_derivative(JAX[name])(x), atol=1e-5)


def second_derivative(f: Any) -> Any:
    return jax.vmap(jax.grad(jax.grad(f)))


@both
@every_smooth
def test_forward_mode_equals_reverse_mode(name: str, ops: Ops) -> None:
    x = jnp.linspace(-4, 4, 81)
    f = partial(ops.activate, name)
    _, derivatives = jax.jvp(f, (x,), (jnp.ones_like(x),))
    np.testing.assert_allclose(derivatives, jax.vmap(jax.grad(f))(x), rtol=1e-5, atol=1e-6)
