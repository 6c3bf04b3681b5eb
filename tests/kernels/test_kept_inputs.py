"""Activation functions whose layers keep only their input for the backward pass. test_table.py tests their values."""

from __future__ import annotations

from collections.abc import Callable
from functools import partial

import jax
import jax.numpy as jnp
import numpy as np
import pytest
from helpers import on_cpu

from jaxgpt.kernels.activations import activate

JAX = {"gelu": partial(jax.nn.gelu, approximate=False), "gelu_new": jax.nn.gelu, "silu": jax.nn.silu}
every_smooth = pytest.mark.parametrize("name", JAX)


@every_smooth
def test_bfloat16_derivatives_are_rounded_once(name: str) -> None:
    x = jnp.linspace(-12, 12, 4801).astype(jnp.bfloat16)
    ours, wide = (jax.vmap(jax.grad(partial(activate, name)))(x) for x in (x, x.astype(jnp.float32)))
    np.testing.assert_array_equal(ours, wide.astype(jnp.bfloat16))


@on_cpu
@every_smooth
def test_a_layer_keeps_one_array_less_than_with_jax(name: str) -> None:
    x = jnp.ones((512, 8))
    up = jnp.ones((8, 128))
    down = jnp.ones((128, 8))

    def memory(f: Callable[[jax.Array], jax.Array]) -> int:
        def loss(up: jax.Array, down: jax.Array) -> jax.Array:
            return (f(f(x @ up) @ down @ up) @ down).sum()

        analysis = jax.jit(jax.grad(loss, (0, 1))).lower(up, down).compile().memory_analysis()
        assert analysis
        return int(analysis.temp_size_in_bytes)

    hidden = 512 * 128 * 4
    assert memory(partial(activate, name)) <= memory(JAX[name]) - hidden
