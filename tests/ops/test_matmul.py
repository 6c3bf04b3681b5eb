"""The matrix product with explicit gradients."""

from __future__ import annotations

import jax
import jax.numpy as jnp
import numpy as np
import pytest

from jaxgpt.ops.matmul import matmul


@pytest.mark.parametrize(
    ("x", "w", "n_in"),
    [
        ((2, 5, 6), (6, 7), 1),
        ((2, 5, 6), (6, 3, 4), 1),
        ((2, 5, 3, 4), (3, 4, 6), 2),
        ((2, 5, 4, 8), (4, 8, 2), 2),  # dy is narrower than x
        ((2, 9, 32), (32, 3, 2), 1),
    ],
)
def test_matmul_and_its_gradients_equal_tensordot(x: tuple[int, ...], w: tuple[int, ...], n_in: int) -> None:
    rng = np.random.default_rng(0)
    x_, w_ = (jnp.asarray(rng.normal(size=shape), jnp.float32) for shape in (x, w))
    y, ours = jax.vjp(lambda x, w: matmul(x, w, n_in), x_, w_)
    expected, theirs = jax.vjp(lambda x, w: jnp.tensordot(x, w, n_in), x_, w_)
    np.testing.assert_allclose(y, expected, atol=1e-5)
    dy = jnp.asarray(rng.normal(size=y.shape), jnp.float32)
    for mine, other in zip(ours(dy), theirs(dy), strict=True):
        np.testing.assert_allclose(mine, other, atol=1e-4, rtol=1e-5)
