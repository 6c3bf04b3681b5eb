"""A mean of MLPs, with stacks of weights `[E, in, out]` and `[E, out]`, that tests of several packages share."""

from __future__ import annotations

from typing import Any

import flax.linen as nn
import jax
import jax.numpy as jnp

from jaxgpt.model.mlp import MLP
from jaxgpt.model.module import Module

E, D, F = 3, 16, 8


class Stack(Module):
    """A stack of matrices, and of biases."""

    inputs: tuple[str, int]
    outputs: tuple[str, int]

    @nn.compact
    def __call__(self) -> Any:
        (input_axis, inputs), (output_axis, outputs) = self.inputs, self.outputs
        init = nn.initializers.normal(0.3)
        kernel = self.weight("kernel", init, (E, inputs, outputs), ("expert", input_axis, output_axis))
        bias = self.weight("bias", init, (E, outputs), ("expert", output_axis))
        return kernel, bias


class Experts(MLP):
    """The mean of E MLPs."""

    @nn.compact
    def __call__(self, x_BTD: jax.Array) -> jax.Array:
        up_EDF, up_EF = Stack(self.config, self.ops, ("embed", D), ("mlp", F), name="up_proj")()
        down_EFD, down_ED = Stack(self.config, self.ops, ("mlp", F), ("embed", D), name="down_proj")()
        out_BTD = jnp.zeros_like(x_BTD)
        for e in range(E):
            h_BTF = jnp.tanh(x_BTD @ up_EDF[e] + up_EF[e].reshape(1, 1, -1))
            out_BTD += h_BTF @ down_EFD[e] + down_ED[e].reshape(1, 1, -1)
        return out_BTD / E
