"""cuDNN attention: unsupported inputs, and values on a GPU. test_table.py tests the values without a GPU."""

from __future__ import annotations

from typing import Any

import jax
import jax.numpy as jnp
import numpy as np
import pytest

from jaxgpt.kernels import KernelAttention
from jaxgpt.kernels.flash import cudnn_attention
from jaxgpt.ops.attention import Positions, Visible, attend, document_positions, row_positions


def test_a_kernel_computes_only_what_it_supports() -> None:
    """Documents, edits and tokens of a cache are left to the definition."""
    calls: list[Any] = []

    def kernel(*args: Any) -> jax.Array:
        calls.append(args)
        return attend(*args)

    q, kv = jnp.ones((1, 4, 2, 8)), (jnp.ones((1, 2, 4, 8)), jnp.ones((1, 2, 8, 4)))
    rows, packed = Visible(row_positions(4)), Visible(document_positions(jnp.array([[0, 0, 1, 1]])))
    cached = Visible(Positions(jnp.array([[3]])), row_positions(4))
    for documents, counts in ((True, [1, 2, 2, 2]), (False, [1, 1, 1, 1])):
        calls.clear()
        entry = KernelAttention(kernel, documents)
        found = []
        for visible, edit in ((rows, None), (packed, None), (rows, lambda _, x: x), (cached, None)):
            entry(q[:, -1:] if visible.key else q, *kv, visible, 1.0, edit)
            found.append(len(calls))
        assert found == counts


@pytest.mark.skipif(not any(d.platform == "gpu" for d in jax.devices()), reason="needs a GPU: JAX_PLATFORMS=cuda")
@pytest.mark.parametrize(("K", "window"), [(4, 0), (2, 0), (4, 5)])
def test_cudnn_on_a_gpu(K: int, window: int) -> None:
    rng, visible = np.random.default_rng(0), Visible(row_positions(64), None, window)
    arrays = [jnp.asarray(rng.normal(size=s), jnp.bfloat16) for s in ((2, 64, 4, 64), (2, K, 64, 64), (2, K, 64, 64))]

    def both(attention: Any, *arrays: jax.Array) -> Any:
        out, backward = jax.vjp(lambda *qkv: attention(*qkv, visible, 0.3), *arrays)
        return out, *backward(jnp.ones_like(out))

    found = jax.jit(both, static_argnums=0)(cudnn_attention, *arrays)
    expected = jax.jit(both, static_argnums=0)(attend, *(x.astype(jnp.float32) for x in arrays))
    for a, b in zip(found, expected, strict=True):
        np.testing.assert_allclose(a.astype(jnp.float32), b, atol=0.05, rtol=0.05)
