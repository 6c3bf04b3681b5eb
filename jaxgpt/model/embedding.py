"""Embedding tables, for tokens and for learned positions."""

from __future__ import annotations

import flax.linen as nn
import jax
import jax.numpy as jnp

from jaxgpt.config import ModelConfig
from jaxgpt.model.init import partitioned, weight
from jaxgpt.ops.matmul import matmul_rows, take_rows


class Embedding(nn.Module):
    """A table `[rows, D]`; row `i` is the vector of id `i`."""

    config: ModelConfig
    rows: int
    axes: tuple[str, str]
    dtype: jnp.dtype

    def setup(self) -> None:
        std = 1.0 if self.config.init == "torch" else self.config.init_std
        init = partitioned(nn.initializers.normal(std), self.axes)
        self.embedding = weight(self, "embedding", init, (self.rows, self.config.n_embd))

    def __call__(self, ids: jax.Array) -> jax.Array:
        """Look up the vectors of ids: `[...]` to `[..., D]`."""
        return take_rows(self.embedding, ids, self.dtype)

    def attend(self, x_BTD: jax.Array) -> jax.Array:
        """Compute the logits of the tied head, `x E^T`: `[B, T, rows]`."""
        return matmul_rows(x_BTD, self.embedding, self.dtype)
