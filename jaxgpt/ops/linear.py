"""Linear layers."""

from __future__ import annotations

from typing import Any, Protocol, runtime_checkable

import jax
import jax.numpy as jnp


@runtime_checkable
class StoredWeight(Protocol):
    """The protocol of weights that need not be arrays, such as `kernels.stored.Stored`; arrays satisfy it too."""

    def astype(self, dtype: Any) -> Any:
        """Return the weight for products in a dtype."""
        ...

    def __rmatmul__(self, x: Any) -> Any:
        """Compute `x W`."""
        ...


def linear(x: jax.Array, w: Any, b: jax.Array | None, dtype: Any) -> jax.Array:
    """Compute `x W + b` in `dtype`: `[..., in]` to `[..., out]`.

    Args:
        x: inputs.
        w: weight `[in, out]`, an array or a `StoredWeight`.
        b: bias `[out]`, or None.
        dtype: dtype of the result, and of the product if w is an array.
    """
    y = x.astype(dtype) @ w.astype(dtype)
    if b is None:
        return y
    # Broadcast in float32, so that the gradient of b, a sum over all tokens, is accumulated in float32.
    bias = jnp.broadcast_to(b, y.shape)
    return y + bias.astype(dtype)
