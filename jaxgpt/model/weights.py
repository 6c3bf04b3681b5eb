"""Weights kept for decoding: transposed, and in fewer bits where that is asked for; activations and sums keep float32's
accuracy.

A product of few rows waits for the matrix. On a CPU, XLA reads one whose rows are the outputs a fifth faster than one whose
rows are the inputs. It widens bfloat16 matrices once before the loop over tokens: decoding reads as many bytes as in
float32. For int8 there is a product of its own, which few rows take (`_by_digits`).
"""

from __future__ import annotations

import math
from typing import Any, Literal, NamedTuple

import jax
import jax.numpy as jnp

Precision = Literal["float32", "bfloat16", "int8"]

DIGITS, BASE = 3, 254.0  # a rest of at most half a unit is at most 127 of the next
FEW_ROWS = 8  # from there on the products, not the bytes, take the time


class Transposed(NamedTuple):
    """A matrix by its outputs: `W[i, o] = values[o, i] * scale[o]`.

    Attributes:
        values: float32, bfloat16 or int8, `[O, I]`.
        scale: float32, `[O]`; None: ones.
    """

    values: jax.Array
    scale: jax.Array | None = None


def lower(params: Any, precision: Precision) -> Any:
    """The weights with every matrix, and the token table below float32, as decoding reads them.

    int8: `scale = max |w| / 127` of an output channel (of a table: of a row), `values = round(w / scale)`. Biases, norms and
    learned positions stay as they are.

    Source: Dettmers et al. 2022, section 2.1.
    """

    def one(path: tuple[Any, ...], w: jax.Array) -> Any:
        names = [entry.key for entry in path]
        table = names[-1] == "embedding"  # by its outputs already, as the tied head reads it
        if names[-1] not in ("kernel", "embedding") or names[0] == "wpe" or (table and precision == "float32"):
            return w
        inputs = 2 if names[-2] == "o_proj" else 1
        w_OI = w if table else w.reshape(math.prod(w.shape[:inputs]), -1).T
        if precision != "int8":
            return Transposed(w_OI.astype(precision))
        scale_O = jnp.maximum(jnp.abs(w_OI).max(-1), jnp.finfo(jnp.float32).tiny) / 127
        return Transposed(jnp.round(w_OI / scale_O[:, None]).astype(jnp.int8), scale_O)

    return jax.tree_util.tree_map_with_path(one, params)


def rounded(params: Any, precision: Precision) -> Any:
    """The weights as they are, but for what `lower` rounds off."""

    def one(path: tuple[Any, ...], w: jax.Array, low: Any) -> jax.Array:
        if not isinstance(low, Transposed):
            return w
        wide_OI = low.values.astype(jnp.float32) * (1.0 if low.scale is None else low.scale[:, None])
        return wide_OI if path[-1].key == "embedding" else wide_OI.T.reshape(w.shape)

    return jax.tree_util.tree_map_with_path(one, params, lower(params, precision))


def transposed_matmul(x: jax.Array, w: Transposed, dtype: jnp.dtype = jnp.float32) -> jax.Array:
    """`x W` for x of any lead axes, `[..., I]` to `[..., O]`: of float32 weights in `dtype`, of others in float32."""
    dtype = dtype if w.values.dtype == jnp.float32 else jnp.float32
    x_RI = x.astype(dtype).reshape(-1, x.shape[-1])
    if w.values.dtype == jnp.int8 and x_RI.shape[0] <= FEW_ROWS:
        y_RO = jax.lax.platform_dependent(x_RI, w.values, cpu=_by_digits, default=_widened)
    else:
        y_RO = _widened(x_RI, w.values)
    y_RO = y_RO if w.scale is None else y_RO * w.scale[None]
    return y_RO.reshape(*x.shape[:-1], -1)


def _widened(x_RI: jax.Array, values_OI: jax.Array) -> jax.Array:
    return jax.lax.dot_general(x_RI, values_OI.astype(x_RI.dtype), (((1,), (1,)), ((), ())))


def _by_digits(x_RI: jax.Array, values_OI: jax.Array) -> jax.Array:
    """The same with int8 read as int8: x is written as three int8 digits to the base 254, the first in units of
    `max |x| / 127` of its row, each digit is multiplied in integers, exactly, and the products are put together.

    Three digits are 23 bits, a float32's mantissa, for one pass over the weights, whose bytes are what decoding waits for.
    """
    R = x_RI.shape[0]
    unit_R1 = jnp.maximum(jnp.abs(x_RI).max(-1, keepdims=True), jnp.finfo(jnp.float32).tiny) / 127
    rest_RI, digits = x_RI / unit_R1, []
    for _ in range(DIGITS):
        digit_RI = jnp.round(rest_RI)
        digits.append(digit_RI.astype(jnp.int8))
        rest_RI = BASE * (rest_RI - digit_RI)
    products = jax.lax.dot_general(
        jnp.concatenate(digits), values_OI, (((1,), (1,)), ((), ())), preferred_element_type=jnp.int32
    )
    y_RO = jnp.zeros((R, values_OI.shape[0]), jnp.float32)
    for place in reversed(range(DIGITS)):
        y_RO = y_RO / BASE + products[place * R : (place + 1) * R].astype(jnp.float32)
    return unit_R1 * y_RO
