"""The MLP of a block, applied to each token separately."""

from __future__ import annotations

import functools

import flax.linen as nn
import jax
import jax.numpy as jnp

from jaxgpt.config import ModelConfig
from jaxgpt.model.linear import Linear
from jaxgpt.model.named import Named
from jaxgpt.ops.activations import ACTIVATIONS
from jaxgpt.ops.sharding import constrain


class MLP(Named):
    """Compute `act(x W_up) W_down`, or gated: `(act(x W_gate) * (x W_up)) W_down` (Shazeer 2020)."""

    config: ModelConfig
    dtype: jnp.dtype

    @nn.compact
    def __call__(self, x_BTD: jax.Array) -> jax.Array:
        c = self.config
        widen = functools.partial(Linear, c, (c.n_embd, c.mlp_width), ("embed", "mlp"), bias=c.bias, dtype=self.dtype)
        h_BTF, act = widen(name="up_proj")(x_BTD), ACTIVATIONS[c.activation]
        if c.mlp == "gated":
            h_BTF = act(self.named("pre", widen(name="gate_proj")(x_BTD))) * self.named("up", h_BTF)
        else:
            h_BTF = act(self.named("pre", h_BTF))
        h_BTF = self.named("post", constrain(h_BTF, ("batch", "length", "mlp")))
        narrow = Linear(
            c, (c.mlp_width, c.n_embd), ("mlp", "embed"), c.bias, self.dtype, residual=True, name="down_proj"
        )
        return narrow(h_BTF)
