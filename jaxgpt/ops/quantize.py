"""Weights stored for decoding: transposed, and optionally in lower precision. Activations and sums are float32.

Products with few rows are limited by memory bandwidth. XLA's CPU backend reads a matrix stored as `[outputs, inputs]` a fifth
faster than `[inputs, outputs]`. It widens bfloat16 matrices once, before the loop over tokens, so decoding is no faster than in
float32; int8 weights are read as they are (`_matmul_in_parts`, `_matmul_by_digits`).
"""

from __future__ import annotations

import functools
import math
from dataclasses import dataclass, field
from typing import Any, Literal

import jax
import jax.numpy as jnp

from jaxgpt.ops.cpu import call_without_inlining

Precision = Literal["float32", "bfloat16", "int8"]

DIGITS, BASE = 3, 254.0  # a remainder of at most 0.5 is at most 127 units of the next digit
FEW_ROWS = 8  # with more rows the product is limited by arithmetic


@jax.tree_util.register_dataclass
@dataclass(frozen=True)
class QuantizedMatrix:
    """A weight stored as a matrix `[O, I]` of its flattened output and input axes: `W[i, o] = values[o, i] * scale[o]`.

    Attributes:
        values: float32, bfloat16 or int8, `[O, I]`.
        scale: float32, `[O]`; None means ones.
        shape: shape of the original weight.
    """

    values: jax.Array
    scale: jax.Array | None
    shape: tuple[int, ...] = field(metadata={"static": True})


def quantize(params: Any, precision: Precision) -> Any:
    """Convert the weight matrices of a model, and below float32 the token table, to `QuantizedMatrix`.

    int8: `values = round(w / scale)` with `scale = max |w| / 127` over an output channel (a row of the table). Biases, norms
    and learned positions are unchanged.

    Source: Dettmers et al. 2022, section 2.1.
    """

    def one(path: tuple[Any, ...], w: jax.Array) -> Any:
        names = [entry.key for entry in path]
        table = names[-1] == "embedding"  # its rows are already the outputs of the tied head
        if names[-1] not in ("kernel", "embedding") or names[0] == "wpe" or (table and precision == "float32"):
            return w
        inputs = 2 if names[-2] == "o_proj" else 1
        w_OI = w if table else w.reshape(math.prod(w.shape[:inputs]), -1).T
        if precision != "int8":
            return QuantizedMatrix(w_OI.astype(precision), None, w.shape)
        scale_O = jnp.maximum(jnp.abs(w_OI).max(-1), jnp.finfo(jnp.float32).tiny) / 127
        return QuantizedMatrix(jnp.round(w_OI / scale_O[:, None]).astype(jnp.int8), scale_O, w.shape)

    return jax.tree_util.tree_map_with_path(one, params)


def dequantize(params: Any) -> Any:
    """Convert each `QuantizedMatrix` to a float32 array of the original shape."""

    def one(path: tuple[Any, ...], w: Any) -> jax.Array:
        if not isinstance(w, QuantizedMatrix):
            return w
        w_OI = w.values.astype(jnp.float32) * (1.0 if w.scale is None else w.scale[:, None])
        return w_OI if path[-1].key == "embedding" else w_OI.T.reshape(w.shape)

    return jax.tree_util.tree_map_with_path(one, params, is_leaf=lambda w: isinstance(w, QuantizedMatrix))


def quantized_matmul(x: jax.Array, w: QuantizedMatrix, dtype: jnp.dtype = jnp.float32) -> jax.Array:
    """Compute `x W`: `[..., I]` to `[..., O]`, in `dtype` for float32 weights and in float32 for others."""
    dtype = dtype if w.values.dtype == jnp.float32 else jnp.float32
    x_RI = x.astype(dtype).reshape(-1, x.shape[-1])
    if w.values.dtype == jnp.int8 and x_RI.shape[0] <= FEW_ROWS:
        y_RO = jax.lax.platform_dependent(x_RI, w.values, cpu=_matmul_int8, default=product_with_rows)
    else:
        y_RO = product_with_rows(x_RI, w.values)
    y_RO = y_RO if w.scale is None else y_RO * w.scale[None]
    return y_RO.reshape(*x.shape[:-1], -1)


def quantized_rows(table: QuantizedMatrix, ids: jax.Array, dtype: jnp.dtype) -> jax.Array:
    """Look up rows of a table: ids `[...]` to `[..., I]` in `dtype`."""
    rows = jnp.take(table.values, ids, axis=0).astype(dtype)
    return rows if table.scale is None else rows * jnp.take(table.scale, ids, axis=0)[..., None].astype(dtype)


def product_with_rows(x_RI: jax.Array, values_OI: jax.Array) -> jax.Array:
    """Compute `x V^T` in the type of x, for a matrix V stored as `[outputs, inputs]`: `[R, I]` to `[R, O]`."""
    values_OI, contracted = values_OI.astype(x_RI.dtype), (((1,), (1,)), ((), ()))
    if 1 < x_RI.shape[0] <= FEW_ROWS:
        # XLA's CPU backend copies the right operand: here x, the smaller one. Without the barrier, XLA swaps them again.
        return jax.lax.optimization_barrier(jax.lax.dot_general(values_OI, x_RI, contracted)).T
    return jax.lax.dot_general(x_RI, values_OI, contracted)


def _matmul_int8(x_RI: jax.Array, values_OI: jax.Array) -> jax.Array:
    """Compute `x W` without widening the int8 weights in memory."""
    if x_RI.shape[0] == 1 and _parts(x_RI.shape[1]):
        # Not inlined: otherwise, within the loop over tokens, one core computes the sums, and x again for every output.
        y_1O: jax.Array = call_without_inlining(_matmul_in_parts, x_RI, values_OI, small=False)
        return y_1O
    return _matmul_by_digits(x_RI, values_OI)


def _parts(length: int) -> int:
    """Return the largest divisor of `length` from 8 to 24, or 0."""
    return next((n for n in range(24, 7, -1) if length % n == 0), 0)


def _matmul_in_parts(x_1I: jax.Array, values_OI: jax.Array) -> jax.Array:
    """Compute `x W` for one row in float32: `[1, I]` to `[1, O]`.

    The axis I is split into up to 24 equal parts. Their elementwise products are added in one loop that reads the weights as
    int8 and writes `[O, J]`, where J is the length of a part. A product with ones then sums over J.
    """
    parts = _parts(x_1I.shape[1])
    pairs = zip(jnp.split(x_1I, parts, axis=1), jnp.split(values_OI, parts, axis=1), strict=True)
    sums_OJ = functools.reduce(jnp.add, [x_1J * values_OJ.astype(jnp.float32) for x_1J, values_OJ in pairs])
    return product_with_rows(jnp.ones((1, sums_OJ.shape[1]), jnp.float32), sums_OJ)


def _matmul_by_digits(x_RI: jax.Array, values_OI: jax.Array) -> jax.Array:
    """Compute `x W` in integer arithmetic, without widening the int8 weights.

    Each row of x is split into three int8 digits in base 254, the first in units of `max |x| / 127`: 23 bits, as many as a
    float32 mantissa. The digits are multiplied in one exact integer product, and the results are recombined.
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
