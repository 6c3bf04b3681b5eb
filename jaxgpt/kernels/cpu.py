"""Operations without slow fusions and copies in XLA's CPU backend (measured in benchmarks/LOG.md)."""

from __future__ import annotations

from collections.abc import Callable
from typing import Any

import jax
import jax.numpy as jnp
from jax.experimental.xla_metadata import set_xla_metadata

from jaxgpt.kernels.devices import only_rows_are_divided
from jaxgpt.kernels.tiled import SHORTEST, tiled_attention
from jaxgpt.ops import Array, attention
from jaxgpt.ops.attention import Edit, Visible
from jaxgpt.ops.linear import linear as definition
from jaxgpt.ops.rotary import Rotation, rope_rotation


def call_without_inlining(function: Callable[..., Any], *args: Any, small: bool = True) -> Any:
    """Compute `function(*args)` in an XLA call without inlining or fusion.

    Pass a module-level function: JAX then caches its trace. A `small` call becomes one kernel, on one core. Other calls
    use all cores, in an executor that blocks the threads of other devices. Optimization barriers do not prevent fusion:
    the CPU backend removes them before it fuses.
    """
    compiled = jax.jit(function)
    attributes = {"inlineable": "false"}
    if small:
        attributes["xla_cpu_small_call"] = "true"
    with set_xla_metadata(**attributes):
        return compiled(*args)


def transposed_copy(x_RI: Array) -> Array:
    """Return a materialized copy of `x^T`.

    The CPU backend copies the transposed left operand of a product, and fuses the copy with the operation that produces x.
    The fusion computes x column by column, which is up to 20x slower.
    """
    # XLA multiplies in float32 if a bfloat16 operand is a transposition; a reshape in between prevents this.
    x = x_RI[None] if x_RI.dtype == jnp.bfloat16 else x_RI
    transposed: Array = call_without_inlining(jnp.matrix_transpose, x)
    return transposed.reshape(x_RI.shape[::-1])


@jax.custom_vjp
def product(x: Array, w: Array) -> Array:
    """Compute `x @ w`; the gradient of w uses a materialized copy of `x^T`."""
    return x @ w


def _product_backward(saved: tuple[Array, Array], dy: Array) -> tuple[Array, Array]:
    x, w = saved
    x_RI = x.reshape(-1, x.shape[-1])
    dy_RO = dy.reshape(-1, dy.shape[-1])
    return dy @ w.T, transposed_copy(x_RI) @ dy_RO


product.defvjp(lambda x, w: (x @ w, (x, w)), _product_backward)


def linear(x: Array, w: Any, b: Array | None, dtype: Any) -> Array:
    """Compute `ops.linear.linear`, with the custom VJP of `product`.

    Stored weights use `ops.linear.linear` itself, as do all weights if a mesh shards weights or sequences. The
    transposition could then need data from other devices, which a small call cannot access.
    """
    if not isinstance(w, Array) or not only_rows_are_divided():
        return definition(x, w, b, dtype)
    y = product(x.astype(dtype), w.astype(dtype))
    if b is None:
        return y
    bias = jnp.broadcast_to(b, y.shape)
    return y + bias.astype(dtype)


def rotation(position_BT: Array, frequency_h: Any) -> Rotation:
    """Compute `ops.rotary.rope_rotation`. If inlined, cosine and sine would be recomputed for each head."""
    turned: Rotation = call_without_inlining(rope_rotation, position_BT, jnp.asarray(frequency_h, jnp.float32))
    return turned


def attend(
    q_BTNH: Array, k_BKSH: Array, v_BKHS: Array, visible: Visible, scale: float, edit: Edit | None = None
) -> Array:
    """Compute `ops.attention.attend`: long sequences in tiles, single tokens in a call without inlining.

    Other calls use `attention.attend`. If inlined, the attention of a token would make XLA copy the cache before the write.
    """
    if edit is None and visible.key is None and q_BTNH.shape[1] >= SHORTEST:
        return tiled_attention(q_BTNH, k_BKSH, v_BKHS, visible, scale)
    if edit is None and q_BTNH.shape[1] == 1:
        out_B1NH: Array = call_without_inlining(attention.attend, q_BTNH, k_BKSH, v_BKHS, visible, scale, small=False)
        return out_B1NH
    return attention.attend(q_BTNH, k_BKSH, v_BKHS, visible, scale, edit)
