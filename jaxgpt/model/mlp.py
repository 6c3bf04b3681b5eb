"""The MLP of a block, applied to each token separately. Source of the gated MLP: Shazeer 2020."""

from __future__ import annotations

import functools

import flax.linen as nn
import jax

from jaxgpt.model.linear import Linear
from jaxgpt.model.module import Module
from jaxgpt.ops.sharding import constrain


class MLP(Module):
    """Compute `act(x W_up) W_down`, or gated `(act(x W_gate) * (x W_up)) W_down`; `bias` adds biases."""

    @nn.compact
    def __call__(self, x_BTD: jax.Array) -> jax.Array:
        """Apply the MLP: `[B, T, D]` to `[B, T, D]`."""
        c, o, act = self.config, self.ops, functools.partial(self.ops.activate, self.config.activation)
        widen = functools.partial(Linear, c, o, (c.n_embd, c.mlp_width), ("embed", "mlp"), c.bias)
        h_BTF = widen(name="up_proj")(x_BTD)
        if c.mlp == "gated":
            h_BTF = act(self.named("pre", widen(name="gate_proj")(x_BTD))) * self.named("up", h_BTF)
        else:
            h_BTF = act(self.named("pre", h_BTF))
        h_BTF = self.named("post", constrain(h_BTF, ("batch", "length", "mlp")))
        return Linear(c, o, (c.mlp_width, c.n_embd), ("mlp", "embed"), c.bias, residual=True, name="down_proj")(h_BTF)
