"""Weights kept in fewer bits, for decoding: what is stored is smaller; activations and sums stay float32.

On a CPU XLA widens the matrices once before the loop over tokens, so decoding takes the memory and the time of float32:
its int8 and bfloat16 products with few rows were slower than float32's (measured, jax 0.10.2).
"""

from __future__ import annotations

import math
from typing import Any, Literal, NamedTuple

import jax
import jax.numpy as jnp

Precision = Literal["float32", "bfloat16", "int8"]


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
    y = jax.lax.dot_general(x.astype(jnp.float32), low.values.astype(jnp.float32), (((x.ndim - 1,), (1,)), ((), ())))
    return y * jnp.expand_dims(low.scale, range(y.ndim - 1))
