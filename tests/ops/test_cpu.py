"""Hints for XLA's CPU compiler change no results and do not affect other platforms."""

from __future__ import annotations

import re
from collections.abc import Callable

import jax
import jax.numpy as jnp
import numpy as np
import pytest

from jaxgpt.ops.cpu import transposed_copy
from jaxgpt.ops.matmul import matmul
from jaxgpt.ops.rotary import Llama3Scaling, rope_frequencies, rope_rotation, rotate


def weight_gradient(x: jax.Array, kernel: jax.Array) -> jax.Array:
    return jax.grad(lambda kernel: jnp.square(matmul(jnp.tanh(x), kernel)).sum())(kernel)


def test_transposed_copy_is_materialized() -> None:
    x = jnp.arange(12.0).reshape(3, 4)
    np.testing.assert_array_equal(transposed_copy(x), np.arange(12.0).reshape(3, 4).T)
    fused_with_its_source = jax.jit(lambda x: transposed_copy(jnp.tanh(x)) @ x).lower(x).compile().as_text()
    assert "call(" in fused_with_its_source


def turned(x_BTNH: jax.Array) -> jax.Array:
    positions = jnp.arange(x_BTNH.shape[1])[None]
    return rotate(x_BTNH, rope_rotation(positions, rope_frequencies(4, 10_000.0, Llama3Scaling())))


def test_rope_sines_are_computed_once() -> None:
    """Fused into their consumers, they would be computed once per head."""
    program = jax.jit(turned).lower(jnp.ones((2, 5, 3, 4))).compile().as_text()
    assert re.search(r"\[(1,)?5,2\]\S* sine\(", program)
    assert "call(" in program


@pytest.mark.parametrize(("function", "shapes"), [(weight_gradient, [(2, 8, 16), (16, 32)]), (turned, [(2, 5, 3, 4)])])
def test_other_platforms_get_no_hints(function: Callable[..., jax.Array], shapes: list[tuple[int, ...]]) -> None:
    for platform, calls in (("cpu", True), ("tpu", False), ("cuda", False)):
        lowered = jax.jit(function).trace(*map(jnp.ones, shapes)).lower(lowering_platforms=(platform,))
        assert ("inlineable" in lowered.as_text()) == calls, platform
