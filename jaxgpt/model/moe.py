"""Mixture of experts: several MLPs; a router chooses a few of them for each token. Source: Shazeer et al. 2017."""

from __future__ import annotations

import functools
from dataclasses import replace
from typing import Any

import flax.linen as nn
import jax
import jax.numpy as jnp

from jaxgpt.model.init import initializers
from jaxgpt.model.mlp import MLP
from jaxgpt.model.module import Module
from jaxgpt.ops.experts import ExpertWeights, Routing, balance_loss, bias_loss, expert_load, route, z_loss


class Matrices(Module):
    """A stack of matrices, one for each expert.

    Attributes:
        shape: `[E, in, out]`.
        axes: logical names of the three axes, for the sharding table.
        residual: whether the output is added to the residual stream, which changes the initial weights.
    """

    shape: tuple[int, int, int]
    axes: tuple[str, str, str]
    residual: bool = False

    @nn.compact
    def __call__(self) -> Any:
        """Return the stack."""
        kernel_init, _ = initializers(self.config, self.shape[1], self.residual)
        return self.weight("kernel", kernel_init, self.shape, self.axes)


class Router(Module):
    """Compute a logit of each expert, `x W`, in float32; the optional bias affects only the choice of experts."""

    @nn.compact
    def __call__(self, x_BTD: jax.Array) -> tuple[jax.Array, jax.Array | None]:
        """Return the logits `[B, T, E]`, and the bias `[E]` or None."""
        c = self.config
        kernel_init, _ = initializers(c, c.n_embd, residual=False)
        w_DE = self.weight("kernel", kernel_init, (c.n_embd, c.n_experts), ("embed", "router"))
        bias_E = None
        if c.router_bias:
            bias_E = self.weight("bias", nn.initializers.zeros, (c.n_experts,), ("router",))
        return self.ops.linear(x_BTD, w_DE, None, jnp.dtype("float32")), bias_E


class MoE(Module):
    """Compute `sum_a share_a * mlp_{choice_a}(x)`, plus the MLP of the shared experts; `MLP` defines each MLP."""

    @nn.compact
    def __call__(self, x_BTD: jax.Array, is_token_BT: jax.Array) -> tuple[jax.Array, dict[str, jax.Array]]:
        """Apply the experts: `[B, T, D]` to `[B, T, D]`; also return `side_outputs`.

        Args:
            x_BTD: inputs.
            is_token_BT: bool `[B or 1, T]`; false for padding, which is not counted in the side outputs of rows.
        """
        c = self.config
        o = self.ops

        # Choose the experts of each token.
        logits_BTE, bias_E = Router(c, o, name="router")(x_BTD)
        logits_BTE = self.named("router.logits", logits_BTE)  # an edit may replace them
        routing = route(logits_BTE, c.experts_per_token, c.router, c.router_normalize, c.router_scale, bias_E)

        # Each module declares the matrices of all experts, and its call returns the stack.
        widen = functools.partial(Matrices, c, o, (c.n_experts, c.n_embd, c.mlp_width), ("expert", "embed", "mlp"))
        narrow = functools.partial(Matrices, c, o, (c.n_experts, c.mlp_width, c.n_embd), ("expert", "mlp", "embed"))
        up_EDF = widen(name="up_proj")()
        gate_EDF = widen(name="gate_proj")() if c.mlp == "gated" else None
        down_EFD = narrow(residual=True, name="down_proj")()
        weights = ExpertWeights(up_EDF, down_EFD, gate_EDF)
        activate = functools.partial(o.activate, c.activation)
        y_BTD = o.experts(x_BTD, routing.choice_BTA, routing.share_BTA, weights, activate, o.dtype)

        # The shared experts are one MLP with the sum of their widths; `n_inner` sets the width of an MLP.
        if c.shared_experts:
            wide = replace(c, n_inner=c.shared_experts * c.mlp_width)
            shared = MLP(wide, o, name="shared")
            y_BTD = y_BTD + shared(x_BTD)

        return y_BTD, side_outputs(logits_BTE, bias_E, routing, is_token_BT)


def side_outputs(
    logits_BTE: jax.Array, bias_E: jax.Array | None, routing: Routing, is_token_BT: jax.Array
) -> dict[str, jax.Array]:
    """Compute the side outputs of a layer with experts, for the objective and the metrics.

    - `balance_loss`, `[B, 1]`: 1 if the experts of a row have equal loads (`ops.experts.balance_loss`).
    - `router_z_loss`, `[B, T]`: the loss of every token; objectives count only tokens with targets.
    - `largest_load`, `[B, 1]`: the largest load of a row, relative to the mean: from 1 to E / A; 0 for a row of padding.
    - `expert_load`, `[B, 1, E]`: the fraction of a row's choices that fall on each expert.
    - `router_bias`, `[B, 1]`, with `model.router_bias`: zeros with the load errors as gradient.

    Args:
        logits_BTE: output of the router.
        bias_E: bias of the router; None: no bias.
        routing: the experts of each token.
        is_token_BT: bool `[B or 1, T]`; false for padding.
    """
    experts = logits_BTE.shape[-1]
    load_BE = expert_load(routing.choice_BTA, experts, is_token_BT)
    largest_B = experts * load_BE.max(-1)
    sides = {
        "balance_loss": balance_loss(routing, is_token_BT)[:, None],
        "router_z_loss": z_loss(logits_BTE),
        "largest_load": largest_B[:, None],
        "expert_load": load_BE[:, None],
    }
    if bias_E is not None:
        sides["router_bias"] = bias_loss(bias_E, load_BE)[:, None]
    return sides
