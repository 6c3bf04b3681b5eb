"""Embedding tables, for tokens and for learned positions."""

from __future__ import annotations

import flax.linen as nn
import jax

from jaxgpt.model.module import Module


class Embedding(Module):
    """A table `[rows, D]`; row `i` is the vector of token id or position `i`.

    Attributes:
        rows: number of ids or positions.
        axes: logical names of the two axes, for the sharding table.
    """

    rows: int
    axes: tuple[str, str]

    def setup(self) -> None:
        std = 1.0 if self.config.init == "torch" else self.config.init_std
        shape = (self.rows, self.config.n_embd)
        self.embedding = self.weight("embedding", nn.initializers.normal(std), shape, self.axes)

    def __call__(self, ids: jax.Array) -> jax.Array:
        """Look up the embeddings of ids: `[...]` to `[..., D]`."""
        return self.embedding.take(ids, axis=0).astype(self.ops.dtype)

    def logits(self, x_BTD: jax.Array) -> jax.Array:
        """Compute the logits of the tied head, `x E^T`: `[B, T, rows]`."""
        return self.ops.linear(x_BTD, self.embedding.T, None, self.ops.dtype)
