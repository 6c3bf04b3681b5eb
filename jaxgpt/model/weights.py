"""Weights kept in fewer bits, for decoding: what is stored is smaller; activations and sums keep float32's accuracy.

On a CPU XLA widens bfloat16 matrices once before the loop over tokens: decoding reads as many bytes as in float32. For
int8 it has a product of its own, which few rows take (`_by_digits`).
"""

from __future__ import annotations

import math
from typing import Any, Literal, NamedTuple

import jax
import jax.numpy as jnp

Precision = Literal["float32", "bfloat16", "int8"]

DIGITS, BASE = 3, 254.0  # a rest of at most half a unit is at most 127 of the next
FEW_ROWS = 8  # from there on the products, not the bytes, take the time


class Narrow(NamedTuple):
    """A matrix in fewer bits, transposed: `W[i, o] = values[o, i] * scale[o]`.

    Attributes:
        values: int8 or bfloat16, `[O, I]`.
        scale: float32, `[O]`; of bfloat16 values: ones.
    """

    values: jax.Array
    scale: jax.Array


def lower(params: Any, precision: Precision) -> Any:
    """The weights with every matrix and the token table in a lower precision.

    int8: `scale = max |w| / 127` of an output channel (of a table: of a row), `values = round(w / scale)`. Biases, norms and
    learned positions stay as they are.

    Source: Dettmers et al. 2022, section 2.1.
    """
    if precision == "float32":
        return params

    def one(path: tuple[Any, ...], w: jax.Array) -> Any:
        names = [entry.key for entry in path]
        if names[-1] not in ("kernel", "embedding") or names[0] == "wpe":
            return w
        inputs = 2 if names[-2] == "o_proj" else 1
        w_OI = w if names[-1] == "embedding" else w.reshape(math.prod(w.shape[:inputs]), -1).T
        if precision == "bfloat16":
            return Narrow(w_OI.astype(jnp.bfloat16), jnp.ones(w_OI.shape[0], jnp.float32))
        scale_O = jnp.maximum(jnp.abs(w_OI).max(-1), jnp.finfo(jnp.float32).tiny) / 127
        return Narrow(jnp.round(w_OI / scale_O[:, None]).astype(jnp.int8), scale_O)

    return jax.tree_util.tree_map_with_path(one, params)


def rounded(params: Any, precision: Precision) -> Any:
    """The weights as they are, but for what `lower` rounds off."""

    def one(path: tuple[Any, ...], w: jax.Array, low: Any) -> jax.Array:
        if not isinstance(low, Narrow):
            return w
        wide_OI = low.values.astype(jnp.float32) * low.scale[:, None]
        return wide_OI if path[-1].key == "embedding" else wide_OI.T.reshape(w.shape)

    return jax.tree_util.tree_map_with_path(one, params, lower(params, precision))


def narrow_matmul(x: jax.Array, low: Narrow) -> jax.Array:
    """`x W` for x of any lead axes, float32 `[..., I]` to `[..., O]`."""
    x_RI = x.astype(jnp.float32).reshape(-1, x.shape[-1])
    if low.values.dtype == jnp.int8 and x_RI.shape[0] <= FEW_ROWS:
        y_RO = jax.lax.platform_dependent(x_RI, low.values, cpu=_by_digits, default=_widened)
    else:
        y_RO = _widened(x_RI, low.values)
    return (y_RO * low.scale[None]).reshape(*x.shape[:-1], -1)


def _widened(x_RI: jax.Array, values_OI: jax.Array) -> jax.Array:
    return jax.lax.dot_general(x_RI, values_OI.astype(jnp.float32), (((1,), (1,)), ((), ())))


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
