"""A matrix stored for decoding: in the layout `[out, in]`, which CPUs read faster, in float32, bfloat16 or int8."""

from __future__ import annotations

import functools
from collections.abc import Iterator
from dataclasses import dataclass, field, replace
from typing import Any

import jax
import jax.numpy as jnp

from jaxgpt.cpu import cpu_supports
from jaxgpt.kernels.cpu import call_without_inlining

FEW_ROWS = 8  # maximum number of rows of a product limited by memory bandwidth
LOOP_ROWS = 2  # maximum number of rows that a loop multiplies faster than a library

_dot = functools.partial(jnp.einsum, "ai,bi->ab")


@jax.tree_util.register_dataclass
@dataclass(frozen=True)
class Stored:
    """A matrix `W[i, o] = values[o, i] * scale[o]`; supports `x @ W`, `W.T` and `W.T.take(ids, axis=0)`.

    A stack of matrices, `[*stack, in, out]`, also supports `W[e]`, the matrix or stack at index e, and iteration.

    Attributes:
        values_OI: stored weights, float32, bfloat16 or int8; `[*stack, out, in]`.
        scale_O: float32, quantization scale of each output; ones, except for int8; `[*stack, out]`.
        transposed: true: the matrix is `W`, `[in, out]`; false: `W^T`, `[out, in]`, such as the embedding table `[V, D]`.
    """

    values_OI: jax.Array
    scale_O: jax.Array
    transposed: bool = field(default=True, metadata={"static": True})

    @property
    def shape(self) -> tuple[int, ...]:
        """Shape of the matrix, or of the stack."""
        *stack, outputs, inputs = self.values_OI.shape
        return (*stack, inputs, outputs) if self.transposed else self.values_OI.shape

    @property
    def T(self) -> Stored:  # noqa: N802
        """The transposed matrix."""
        return replace(self, transposed=not self.transposed)

    def __getitem__(self, index: Any) -> Stored:
        """Return the matrix at an index of the first stack axis, or a stack with fewer axes."""
        assert self.values_OI.ndim > 2, "not a stack"
        return replace(self, values_OI=self.values_OI[index], scale_O=self.scale_O[index])

    def __iter__(self) -> Iterator[Stored]:
        """Return an iterator of the matrices of a stack."""
        return (self[index] for index in range(self.shape[0]))

    def astype(self, dtype: Any) -> Stored:
        """Convert float32 values to a dtype; values of lower precision are unchanged."""
        if self.values_OI.dtype != jnp.float32:
            return self
        return replace(self, values_OI=self.values_OI.astype(dtype))

    def take(self, ids: jax.Array, axis: int) -> jax.Array:
        """Look up rows of a table: ids `[...]` to float32 `[..., D]`."""
        assert (axis, self.transposed) == (0, False)
        return self.values_OI.take(ids, axis=0).astype(jnp.float32) * self.scale_O.take(ids, axis=0)[..., None]

    def dense(self) -> jax.Array:
        """Return the matrix, or the stack, as a float32 array."""
        w_OI = self.values_OI.astype(jnp.float32) * self.scale_O[..., None]
        return w_OI.mT if self.transposed else w_OI

    def __rmatmul__(self, x: jax.Array) -> jax.Array:
        """Compute `x W` in float32, rounded to the dtype of x: `[..., in]` to `[..., out]`.

        For a stack of E matrices, as in `jnp.matmul`: `[R, in]` or `[E, R, in]` to `[E, R, out]`.
        """
        assert self.transposed, "multiply by table.T"
        *stack, inputs, outputs = self.shape
        if stack:
            x_ERI = jnp.broadcast_to(x, (*stack, *x.shape[-2:]))
            return jnp.stack([x_RI @ w_IO for x_RI, w_IO in zip(x_ERI, self, strict=True)])

        dtype = x.dtype if self.values_OI.dtype == x.dtype else jnp.float32
        x_RI = x.reshape(-1, inputs).astype(dtype)
        on_cpu = _product_by_digits if _is_faster_by_digits(self.values_OI, rows=len(x_RI)) else _product
        y_RO = jax.lax.platform_dependent(x_RI, self.values_OI, cpu=on_cpu, default=_product) * self.scale_O[None]
        return y_RO.astype(x.dtype).reshape(*x.shape[:-1], outputs)


def _is_faster_by_digits(values_OI: jax.Array, rows: int) -> bool:
    """Return whether a CPU multiplies this number of rows faster with `_product_by_digits` than with `_product`."""
    inputs = values_OI.shape[1]
    if values_OI.dtype != jnp.int8 or inputs > 2**17:  # 2^17: limit for int32 sums of int8 products
        return False
    # Since JAX 0.12, three int8 products with VNNI take less time than a float32 product.
    return rows <= FEW_ROWS or (jax.__version_info__ >= (0, 12) and cpu_supports("avx512_vnni"))


def _product(x_RI: jax.Array, values_OI: jax.Array) -> jax.Array:
    """Compute `x V^T`, with V `[O, I]` converted to the dtype of x: `[R, I]` to float32 `[R, O]`."""
    values_OI = values_OI.astype(x_RI.dtype)
    if 1 < len(x_RI) <= FEW_ROWS:
        # XLA's CPU backend copies the right operand, so the smaller operand, x, is on the right. The barrier keeps XLA from
        # swapping the operands.
        return jax.lax.optimization_barrier(_dot(values_OI, x_RI, preferred_element_type=jnp.float32)).T
    return _dot(x_RI, values_OI, preferred_element_type=jnp.float32)


@jax.custom_jvp
def _product_by_digits(x_RI: jax.Array, values_OI: jax.Array) -> jax.Array:
    """Compute `x V^T` in integer arithmetic, without widening int8 weights.

    Rows of x are split into digits in `[-most, most]`, the first in units of `max |x| / most`:
    `x = unit * (d_0 + d_1 / (2 most) + d_2 / (2 most)^2)`. A loop uses two int16 digits, a library three int8 digits: 23 bits
    (up to 8,260 inputs), like a float32 mantissa. Products of digits are exact.

    The custom derivative is the derivative of `_product`, because rounding has the derivative 0.
    """
    dtype: Any
    if len(x_RI) <= LOOP_ROWS:
        count = 2
        most = min(2047, 2**31 // (127 * x_RI.shape[1]))  # int32 sums of the products do not overflow
        dtype = jnp.int16
    else:
        count = 3
        most = 127
        dtype = jnp.int8

    # Split the rows into digits.
    unit_R1 = jnp.maximum(jnp.abs(x_RI).max(-1, keepdims=True), jnp.finfo(jnp.float32).tiny) / most
    rest_RI = x_RI / unit_R1
    digits = []
    for _ in range(count):
        digit_RI = jnp.round(rest_RI)
        digits.append(digit_RI.astype(dtype))
        rest_RI = 2 * most * (rest_RI - digit_RI)  # magnitude at most `most`, because the rounding error is at most 0.5

    # If inlined, the loop would compute the digits again for each output.
    products_XO = call_without_inlining(_integer_product, jnp.concatenate(digits), values_OI, small=False)
    products = jnp.split(products_XO.astype(jnp.float32), count)  # one product for each digit
    return unit_R1 * sum(y_RO / (2.0 * most) ** i for i, y_RO in enumerate(products))


_product_by_digits.defjvps(lambda dx_RI, _, x_RI, values_OI: _product(dx_RI, values_OI), None)


def _integer_product(x_XI: jax.Array, values_OI: jax.Array) -> jax.Array:
    """Compute the int32 product `x V^T`: int8 by a library, int16 by a loop that LLVM vectorizes (VNNI)."""
    if x_XI.dtype == jnp.int8:
        return _dot(x_XI, values_OI, preferred_element_type=jnp.int32)
    # Compute at least two sums: XLA converts a single sum to a matrix product without vector instructions.
    terms = tuple(values_OI.astype(jnp.int32) * x_1I for x_1I in x_XI[:, None].astype(jnp.int32))
    zeros = (jnp.int32(0),) * len(terms)
    sums = jax.lax.reduce(terms, zeros, lambda a, b: tuple(map(jnp.add, a, b)), (1,))
    return jnp.stack(sums)
