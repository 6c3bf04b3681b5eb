"""What is done for XLA's CPU compiler alone: it changes no number, and reaches no other device."""

from __future__ import annotations

import jax
import jax.numpy as jnp
import numpy as np

from jaxgpt.model.cpu import transposed_copy
from jaxgpt.model.linear import matmul


def weight_gradient(x: jax.Array, kernel: jax.Array) -> jax.Array:
    return jax.grad(lambda kernel: jnp.square(matmul(jnp.tanh(x), kernel)).sum())(kernel)


def test_the_transposed_matrix_is_an_array_of_its_own() -> None:
    x = jnp.arange(12.0).reshape(3, 4)
    np.testing.assert_array_equal(transposed_copy(x), np.arange(12.0).reshape(3, 4).T)
    fused_with_its_source = jax.jit(lambda x: transposed_copy(jnp.tanh(x)) @ x).lower(x).compile().as_text()
    assert "call(" in fused_with_its_source


def test_other_devices_get_the_plain_product() -> None:
    arguments = jnp.ones((2, 8, 16)), jnp.ones((16, 32))
    for platform, calls in (("cpu", True), ("tpu", False), ("cuda", False)):
        lowered = jax.jit(weight_gradient).trace(*arguments).lower(lowering_platforms=(platform,))
        assert ("inlineable" in lowered.as_text()) == calls, platform
