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
        c = self.config
        act = functools.partial(self.ops.activate, c.activation)
        widen = functools.partial(Linear, c, self.ops, (c.n_embd, c.mlp_width), ("embed", "mlp"), c.bias)
        narrow = functools.partial(Linear, c, self.ops, (c.mlp_width, c.n_embd), ("mlp", "embed"), c.bias)

        up_proj = widen(name="up_proj")
        h_BTF = up_proj(x_BTD)
        if c.mlp == "gated":
            gate_proj = widen(name="gate_proj")
            gate_BTF = self.named("pre", gate_proj(x_BTD))
            h_BTF = act(gate_BTF) * self.named("up", h_BTF)
        else:
            h_BTF = act(self.named("pre", h_BTF))
        h_BTF = self.named("post", constrain(h_BTF, ("residual", "length", "mlp")))

        down_proj = narrow(residual=True, name="down_proj")
        return down_proj(h_BTF)
