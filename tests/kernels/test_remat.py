"""The policy `dots` saves the results of attention kernels."""

from __future__ import annotations

import functools

import jax
import jax.numpy as jnp
import pytest

from jaxgpt.kernels.remat import POLICIES
from jaxgpt.kernels.tiled import tiled_attention
from jaxgpt.ops.attention import Visible, row_positions


@pytest.mark.parametrize(("remat", "loops"), [("dots", 2), ("full", 3)])
def test_dots_saves_tiled_attention(remat: str, loops: int) -> None:
    """The results of tiled attention have the name that the `dots` policy saves, so they are not recomputed."""

    @functools.partial(jax.checkpoint, policy=POLICIES[remat])
    def block(q: jax.Array, k: jax.Array, v: jax.Array) -> jax.Array:
        return jnp.tanh(tiled_attention(q, k, v, Visible(row_positions(130)), 0.3)).sum()

    arrays = [jnp.ones(shape) for shape in ((2, 130, 4, 8), (2, 4, 130, 8), (2, 4, 8, 130))]
    assert str(jax.make_jaxpr(jax.grad(block))(*arrays)).count("scan[") == loops


@pytest.mark.parametrize("remat", ["dots", "offload"])
def test_dots_saves_cudnn_attention(remat: str) -> None:
    """JAX has no public name for the primitive: this test fails if the primitive is renamed."""
    from jax._src.cudnn.fused_attention_stablehlo import _dot_product_attention_fwd_p_wrapper as forward

    assert POLICIES[remat](forward) is True  # type: ignore[misc]
