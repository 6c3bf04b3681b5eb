"""Names of activations."""

from __future__ import annotations

import flax.linen as nn
import jax


class Named(nn.Module):
    """A module that names its activations, so that `jaxgpt.study` can read and replace them."""

    def named(self, name: str, x: jax.Array) -> jax.Array:
        """Return x. An observer (`nn.intercept_methods`) sees the name and the array, and may return another array."""
        return x
