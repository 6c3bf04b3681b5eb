"""Conversion of a model's weights to `kernels.stored.Stored` for decoding, and back."""

from __future__ import annotations

from typing import Any, Literal

import jax
import jax.numpy as jnp

from jaxgpt.kernels.stored import Stored
from jaxgpt.model.params import Model, Weight, map_weights

Precision = Literal["float32", "bfloat16", "int8"]


def quantize(params: Any, model: Model, precision: Precision) -> Any:
    """Convert the matrices and the token embeddings of a model to `Stored`.

    int8: `values = round(w / scale)` with `scale = max |w| / 127` per output (per row of the embedding table) of each matrix.
    Biases, norms, learned positions and routers of experts are unchanged.

    Source: Dettmers et al. 2022, section 2.1.
    """

    def store(weight: Weight | None, w: jax.Array) -> Any:
        if weight is None or weight.kind not in ("matrix", "table"):
            return w
        if "router" in weight.axes:  # a small matrix; rounding it would change the choice of experts
            return w

        transposed = weight.kind == "matrix"
        w_OI = w.mT if transposed else w
        if precision != "int8":
            ones_O = jnp.ones(w_OI.shape[:-1], jnp.float32)
            return Stored(w_OI.astype(precision), ones_O, transposed)

        largest_O = jnp.abs(w_OI).max(-1)
        scale_O = jnp.maximum(largest_O / 127, jnp.finfo(jnp.float32).tiny)  # above 0 even if all weights are 0
        values_OI = jnp.round(w_OI / scale_O[..., None])
        return Stored(values_OI.astype(jnp.int8), scale_O, transposed)

    return map_weights(store, params, model)


def dequantize(params: Any) -> Any:
    """Convert each `Stored` weight to a float32 array."""
    return jax.tree.map(_dense, params, is_leaf=_is_stored)


def _dense(weight: Any) -> Any:
    """Convert a `Stored` weight to a float32 array; arrays are unchanged."""
    return weight.dense() if _is_stored(weight) else weight


def _is_stored(weight: Any) -> bool:
    return isinstance(weight, Stored)
