"""cuDNN attention on a GPU. test_table.py tests its values without a GPU."""

from __future__ import annotations

from functools import partial
from typing import Any

import jax
import jax.numpy as jnp
import numpy as np
import pytest

from jaxgpt.kernels.flash import cudnn_attention
from jaxgpt.ops.attention import Visible, attend, row_positions


@pytest.mark.skipif(not any(d.platform == "gpu" for d in jax.devices()), reason="needs a GPU: JAX_PLATFORMS=cuda")
@pytest.mark.parametrize(("K", "window"), [(4, 0), (2, 0), (4, 5)])
def test_cudnn_on_a_gpu(K: int, window: int) -> None:
    rng = np.random.default_rng(0)
    visible = Visible(row_positions(64), None, window)
    shapes = ((2, 64, 4, 64), (2, K, 64, 64), (2, K, 64, 64))
    qkv = [jnp.asarray(rng.normal(size=shape), jnp.bfloat16) for shape in shapes]
    qkv_float32 = [x.astype(jnp.float32) for x in qkv]

    @partial(jax.jit, static_argnums=0)
    def output_and_gradients(attention: Any, *qkv: jax.Array) -> Any:
        out, backward = jax.vjp(lambda *qkv: attention(*qkv, visible, 0.3), *qkv)
        return out, *backward(jnp.ones_like(out))

    found = output_and_gradients(cudnn_attention, *qkv)
    expected = output_and_gradients(attend, *qkv_float32)
    for array, exact in zip(found, expected, strict=True):
        np.testing.assert_allclose(array.astype(jnp.float32), exact, atol=0.05, rtol=0.05)
