"""Embedding tables, for tokens and for learned positions."""

from __future__ import annotations

import flax.linen as nn
import jax

from jaxgpt.config import ModelConfig
from jaxgpt.model.init import partitioned, weight
from jaxgpt.ops import Ops


class Embedding(nn.Module):
    """A table `[rows, D]`; row `i` is the vector of id `i`."""

    config: ModelConfig
    ops: Ops
    rows: int
    axes: tuple[str, str]

    def setup(self) -> None:
        std = 1.0 if self.config.init == "torch" else self.config.init_std
        init = partitioned(nn.initializers.normal(std), self.axes)
        self.embedding = weight(self, "embedding", init, (self.rows, self.config.n_embd))

    def __call__(self, ids: jax.Array) -> jax.Array:
        """Look up the vectors of ids: `[...]` to `[..., D]`."""
        return self.embedding.take(ids, axis=0).astype(self.ops.dtype)

    def attend(self, x_BTD: jax.Array) -> jax.Array:
        """Compute the logits of the tied head, `x E^T`: `[B, T, rows]`."""
        return self.ops.linear(x_BTD, self.embedding.T, None, self.ops.dtype)
