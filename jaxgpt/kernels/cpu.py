"""Operations for XLA's CPU backend: equal to their definitions, and written so that it vectorizes and does not copy.

Measurements are in benchmarks/LOG.md.
"""

from __future__ import annotations

import functools
from collections.abc import Callable
from typing import Any

import jax
import jax.numpy as jnp
from jax.experimental.xla_metadata import set_xla_metadata

from jaxgpt.kernels.devices import only_rows_are_divided
from jaxgpt.kernels.tiled import SHORTEST, tiled_attention
from jaxgpt.ops import attention
from jaxgpt.ops import linear as products
from jaxgpt.ops.attention import Edit, Visible
from jaxgpt.ops.rotary import Rotation


def call_without_inlining(function: Callable[..., Any], *args: jax.Array, small: bool = True) -> Any:
    """Compute `function(*args)` in an XLA call that is neither inlined nor fused with its producers and consumers.

    `optimization_barrier` does not prevent fusion: the CPU backend removes barriers first.

    Args:
        function: a module-level function, so that JAX caches its trace.
        small: whether the call becomes one kernel, on one core. Otherwise its operations use all cores, in an executor that
            blocks the threads of other devices.
    """
    with set_xla_metadata(inlineable="false", **({"xla_cpu_small_call": "true"} if small else {})):
        return jax.jit(function)(*args)


def transposed_copy(x: jax.Array) -> jax.Array:
    """Return a materialized copy of `x^T`, for a matrix x.

    The CPU backend copies transposed left operands of matrix products and fuses that copy with the operation that produces x.
    The fusion computes x column by column, which is up to 20 times slower.
    """
    y: jax.Array = call_without_inlining(_transpose, x)
    return y


def _transpose(x: jax.Array) -> jax.Array:
    return x.T


@jax.custom_vjp
def product(x: jax.Array, w: jax.Array) -> jax.Array:
    """Compute `x W`, with the gradient of W from a materialized `x^T`."""
    return x @ w


def _product_backward(saved: tuple[jax.Array, jax.Array], dy: jax.Array) -> tuple[jax.Array, jax.Array]:
    x, w = saved
    x_RI, dy_RO = x.reshape(-1, x.shape[-1]), dy.reshape(-1, dy.shape[-1])
    if dy_RO.size + w.size < x_RI.size:  # less to transpose
        return dy @ w.T, transposed_copy(transposed_copy(dy_RO) @ x_RI)
    return dy @ w.T, transposed_copy(x_RI) @ dy_RO


product.defvjp(lambda x, w: (x @ w, (x, w)), _product_backward)


def linear(x: jax.Array, w: Any, b: jax.Array | None, dtype: Any) -> jax.Array:
    """Compute `ops.linear.linear`, with the gradient of `product`.

    If a mesh divides weights or sequences, the transposition could need data of other devices, which a small call cannot get.
    """
    if not isinstance(w, jax.Array) or not only_rows_are_divided():
        return products.linear(x, w, b, dtype)
    y = product(x.astype(dtype), w.astype(dtype))
    return y if b is None else y + jnp.broadcast_to(b, y.shape).astype(dtype)


def rotation(position_BT: jax.Array, frequency_h: Any) -> Rotation:
    """Compute `ops.rotary.rope_rotation`. Inlined, cosine and sine would be computed again for each head."""
    angle_BTh = position_BT.astype(jnp.float32)[..., None] * jnp.asarray(frequency_h, jnp.float32)[None, None]
    turned: Rotation = call_without_inlining(_cos_sin, angle_BTh)
    return turned


def _cos_sin(angle_BTh: jax.Array) -> Rotation:
    return jnp.cos(angle_BTh), jnp.sin(angle_BTh)


def attend(
    q_BTNH: jax.Array, k_BKSH: jax.Array, v_BKHS: jax.Array, visible: Visible, scale: float, edit: Edit | None = None
) -> jax.Array:
    """Compute `ops.attention.attend`, in tiles for whole sequences, and without copying the cache for single tokens."""
    if edit is None and visible.key is None and q_BTNH.shape[1] >= SHORTEST:
        return tiled_attention(q_BTNH, k_BKSH, v_BKHS, visible, scale)
    if edit is None and q_BTNH.shape[1] == 1:
        return attend_one(q_BTNH, k_BKSH, v_BKHS, visible, scale)
    return attention.attend(q_BTNH, k_BKSH, v_BKHS, visible, scale, edit)


def attend_one(q_B1NH: jax.Array, k_BKSH: jax.Array, v_BKHS: jax.Array, visible: Visible, scale: float) -> jax.Array:
    """Attend from one token. Inlined, the products would be fused with the write to the cache, which would be copied."""
    (B, _, N, H), (_, K, _, _) = q_B1NH.shape, k_BKSH.shape
    alone = functools.partial(call_without_inlining, small=False)
    scores_BKGS = scale * alone(_scores, q_B1NH.reshape(B, K, N // K, H), k_BKSH)
    scores_BKGS = jnp.where(visible.mask(), scores_BKGS, jnp.finfo(jnp.float32).min)
    weights_BKGS = jax.nn.softmax(scores_BKGS, axis=-1).astype(v_BKHS.dtype)
    out_BKGH: jax.Array = alone(_weighted_sum, weights_BKGS, v_BKHS)
    return out_BKGH.reshape(B, 1, N, H)


def _scores(q_BKGH: jax.Array, k_BKSH: jax.Array) -> jax.Array:
    return jnp.einsum("BKGH,BKSH->BKGS", q_BKGH, k_BKSH, preferred_element_type=jnp.float32)


def _weighted_sum(weights_BKGS: jax.Array, v_BKHS: jax.Array) -> jax.Array:
    return jnp.einsum("BKGS,BKHS->BKGH", weights_BKGS, v_BKHS)
