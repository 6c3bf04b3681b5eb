"""cuDNN attention on a GPU. test_table.py tests its values without a GPU."""

from __future__ import annotations

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
    arrays = [jnp.asarray(rng.normal(size=s), jnp.bfloat16) for s in ((2, 64, 4, 64), (2, K, 64, 64), (2, K, 64, 64))]

    def both(attention: Any, *arrays: jax.Array) -> Any:
        out, backward = jax.vjp(lambda *qkv: attention(*qkv, visible, 0.3), *arrays)
        return out, *backward(jnp.ones_like(out))

    found = jax.jit(both, static_argnums=0)(cudnn_attention, *arrays)
    expected = jax.jit(both, static_argnums=0)(attend, *(x.astype(jnp.float32) for x in arrays))
    for a, b in zip(found, expected, strict=True):
        np.testing.assert_allclose(a.astype(jnp.float32), b, atol=0.05, rtol=0.05)
