"""Laws of experts: routing, losses of routers, padding. Models without experts skip them.

The definitions here share no code with `ops/experts.py`: an expert is chosen if fewer than A experts rank before it.

Letters in names: E experts, A active experts of a token.
"""

from __future__ import annotations

from collections.abc import Mapping
from dataclasses import replace
from functools import partial
from typing import Any, NamedTuple

import jax
import jax.numpy as jnp
import numpy as np

from jaxgpt.config import ModelConfig
from jaxgpt.model import GPT
from jaxgpt.model.gpt import Block
from jaxgpt.model.moe import MoE
from jaxgpt.ops.activations import activate
from jaxgpt.ops.attention import Visible, document_positions, row_positions
from jaxgpt.train import step
from jaxgpt.train.loss import next_token_loss, token_losses
from jaxgpt.train.side_outputs import router_penalties
from jaxgpt.verify.subject import NotApplicable, Subject, distance

# Minimum difference between the preferences of a token's last chosen and next expert: below it, rounding may change the choice.
MARGIN = 1e-5


def routed(s: Subject) -> float:
    """Compare the experts of the first block to NumPy in float64, for random inputs.

    Tokens are not compared if rounding could change their choice.
    """
    c = _with_experts(s)
    x_BTD = _random_stream(s)
    weights = s.params["h_0"]["mlp"]
    token_1T = jnp.ones((1, s.length), bool)
    apply = jax.jit(lambda params, x_BTD: MoE(c, s.model.ops).apply({"params": params}, x_BTD, token_1T)[0])
    found_BTD = np.asarray(apply(weights, jnp.asarray(x_BTD)), np.float64)

    w = jax.tree.map(lambda leaf: np.asarray(leaf, np.float64), weights)
    score_BTE = _scores(c, x_BTD @ w["router"]["kernel"], np)
    preference_BTE = score_BTE + w["router"].get("bias", 0.0)
    share_BTE = np.where(_chosen(preference_BTE, c.experts_per_token), score_BTE, 0.0)
    if c.router_normalize:
        share_BTE = share_BTE / share_BTE.sum(-1, keepdims=True)
    expected_BTD = _sum_of_experts(c, x_BTD, c.router_scale * share_BTE, w)

    certain_BT1 = _margin(preference_BTE, c.experts_per_token) > MARGIN
    return distance(np.where(certain_BT1, found_BTD, 0.0), np.where(certain_BT1, expected_BTD, 0.0))


def _sum_of_experts(c: ModelConfig, x_BTD: np.ndarray, share_BTE: np.ndarray, w: Mapping[str, Any]) -> np.ndarray:
    """Apply all experts and the shared experts with the weights `w` of an `MoE`, in NumPy."""
    sum_BTD = np.zeros(x_BTD.shape, np.float64)
    for expert in range(c.n_experts):
        matrices = {name: w[name]["kernel"][expert] for name in ("up_proj", "gate_proj", "down_proj") if name in w}
        sum_BTD += share_BTE[..., expert : expert + 1] * _mlp(c, x_BTD, matrices)
    if c.shared_experts:
        sum_BTD += _mlp(c, x_BTD, {name: each["kernel"] for name, each in w["shared"].items()})
    return sum_BTD


def losses(s: Subject) -> float:
    """Compare the means of the losses and the gradient of the step to the formulas of balance loss, z-loss and bias.

    The factors of the losses are 1, so that an omitted gradient exceeds the tolerance.
    """
    _with_experts(s)
    config = replace(s.config, optim=replace(s.config.optim, balance_loss=1.0, router_z_loss=1.0))
    objective = next_token_loss(s.model.apply, penalties=router_penalties(config))
    compute: Any = jax.jit(lambda params, windows: step.gradients(params, windows, None, objective=objective))
    means, gradient = compute(s.params, s.windows)

    by_formula = jax.jit(jax.grad(partial(_losses_by_formula, s), has_aux=True))
    expected_gradient, expected = by_formula(s.params)
    found = {name: means[name] for name in expected}
    return max(distance(found, expected), distance(gradient, expected_gradient))


def _losses_by_formula(s: Subject, params: Any) -> tuple[jax.Array, dict[str, jax.Array]]:
    """Return the loss to minimize, and the terms that the step reports, keyed by name.

    The loss to minimize is the loss of the tokens plus the means of the router losses over layers.
    """
    c = s.config.model
    passed = _forward(s, params)
    is_target_BT = passed.targets_BT >= 0
    loss = passed.losses_BT.sum() / is_target_BT.sum()

    per_router = []
    for layer, logits_BTE in enumerate(passed.router_logits):
        bias_E = params[f"h_{layer}"]["mlp"]["router"].get("bias", jnp.zeros(c.n_experts))
        per_router.append(_router_losses(c, logits_BTE, bias_E, is_target_BT))
    mean = jax.tree.map(lambda *of_layers: sum(of_layers) / c.n_layer, *per_router)
    minimized = loss + mean.balance + mean.z + mean.bias
    return minimized, {"loss": loss, "balance_loss": mean.balance, "router_z_loss": mean.z}


class _ForwardPass(NamedTuple):
    """The forward pass of the windows of a subject.

    Attributes:
        losses_BT: loss of each target.
        targets_BT: targets; -1: masked.
        router_logits: logits of the router of each layer, `[B, T, E]`.
    """

    losses_BT: jax.Array
    targets_BT: jax.Array
    router_logits: list[jax.Array]


def _forward(s: Subject, params: Any) -> _ForwardPass:
    """Compute the losses of the windows; record the logits of the routers with the hook `Ops.edit`.

    The model calls the hook while JAX traces the pass, so gradients pass through the recorded logits.
    """
    c = s.config.model
    activations: dict[str, jax.Array] = {}

    def record(name: str, x: jax.Array) -> jax.Array:
        activations[name] = x
        return x

    model = GPT(c, s.model.ops._replace(edit=record))
    losses_BT, targets_BT = token_losses(model.apply, params, s.windows)
    logits = [activations[f"h_{layer}/mlp/router.logits"] for layer in range(c.n_layer)]
    return _ForwardPass(losses_BT, targets_BT, logits)


class _RouterLosses(NamedTuple):
    """The terms of a router in the loss to minimize.

    Attributes:
        balance: balance loss.
        z: z-loss.
        bias: sum of the biases times the load errors. Only its gradient, the load error of each bias, has a meaning; the step
            does not report its value.
    """

    balance: jax.Array
    z: jax.Array
    bias: jax.Array


def _router_losses(c: ModelConfig, logits_BTE: jax.Array, bias_E: jax.Array, is_target_BT: jax.Array) -> _RouterLosses:
    """Compute the terms of a router by their formulas."""
    score_BTE = _scores(c, logits_BTE, jnp)
    chosen_BTE = _chosen(score_BTE + bias_E.reshape(1, 1, -1), c.experts_per_token)
    # Means of a row are over all T tokens: -1 in a window masks a target, and the token at this position is still routed.
    load_BE = chosen_BTE.mean(1) / c.experts_per_token
    # In the batch, a row counts once for each target.
    count = is_target_BT.sum()
    weight_B = is_target_BT.sum(-1) / count

    # Balance: E times the load of each expert times its mean fraction of the scores.
    fraction_BE = (score_BTE / score_BTE.sum(-1, keepdims=True)).mean(1)
    balance_B = c.n_experts * (load_BE * fraction_BE).sum(-1)
    balance = (weight_B * balance_B).sum()

    # z-loss: the square of the log of the softmax's denominator.
    highest_BT1 = logits_BTE.max(-1, keepdims=True)
    log_total_BT = highest_BT1[..., 0] + jnp.log(jnp.exp(logits_BTE - highest_BT1).sum(-1))
    z = jnp.where(is_target_BT, jnp.square(log_total_BT), 0.0).sum() / count

    # Biases: the difference between the load of each expert and the mean load.
    excess_BE = load_BE - 1 / c.n_experts
    excess_E = (weight_B.reshape(-1, 1) * excess_BE).sum(0)
    return _RouterLosses(balance, z, bias=(excess_E * bias_E).sum())


def padded(s: Subject) -> float:
    """Compare the side outputs of the first block for the same rows with and without padding."""
    c = _with_experts(s)
    x_BTD = jnp.asarray(_random_stream(s))
    length = max(2 * s.length // 3, 1)
    is_padding = jnp.arange(s.length) >= length
    document_BT = jnp.broadcast_to(jnp.where(is_padding, -1, 0), x_BTD.shape[:2])

    def sides(x_BTD: jax.Array, positions: Any) -> Any:
        block = Block(c, s.model.ops)
        _, _, outputs = block.apply({"params": s.params["h_0"]}, x_BTD, Visible(positions))  # type: ignore[misc]
        # A side output has a value for each token, or a single value for the row.
        return {name: side_BT[:, :length] for name, side_BT in outputs.items()}

    together = jax.jit(sides)(x_BTD, document_positions(document_BT))
    alone = jax.jit(sides)(x_BTD[:, :length], row_positions(length))
    return distance(together, alone)


def _with_experts(s: Subject) -> ModelConfig:
    """Return the architecture; raise `NotApplicable` if it has no experts."""
    if not s.config.model.n_experts:
        raise NotApplicable("model.n_experts is 0: the model has no experts")
    return s.config.model


def _random_stream(s: Subject) -> np.ndarray:
    """Return random inputs of a block or MLP, float32 `[2, T, D]`."""
    random = np.random.Generator(np.random.Philox(0))
    return random.standard_normal((2, s.length, s.config.model.n_embd), np.float32)


def _scores(c: ModelConfig, logits_BTE: Any, xp: Any) -> Any:
    """Return the score of each expert; `xp`: module that computes it, `numpy` or `jax.numpy`."""
    if c.router == "sigmoid":
        return 1 / (1 + xp.exp(-logits_BTE))
    exp_BTE = xp.exp(logits_BTE - logits_BTE.max(-1, keepdims=True))
    return exp_BTE / exp_BTE.sum(-1, keepdims=True)


def _chosen(preference_BTE: Any, active: int) -> Any:
    """Return whether each token chooses each expert, bool `[B, T, E]`; ties choose the first experts."""
    E = preference_BTE.shape[-1]
    own = preference_BTE[..., :, None]
    other = preference_BTE[..., None, :]
    is_first_EE = np.arange(E)[None, :] < np.arange(E)[:, None]
    is_before = (other > own) | ((other == own) & is_first_EE.reshape(1, 1, E, E))
    return is_before.sum(-1) < active


def _margin(preference_BTE: np.ndarray, active: int) -> np.ndarray:
    """Return the difference between the last chosen and the next preference, `[B, T, 1]`; infinite if all are chosen."""
    if active == preference_BTE.shape[-1]:
        return np.full((*preference_BTE.shape[:-1], 1), np.inf)
    sorted_BTE = -np.sort(-preference_BTE, axis=-1)
    return sorted_BTE[..., active - 1 : active] - sorted_BTE[..., active : active + 1]


def _mlp(c: ModelConfig, x: np.ndarray, matrices: dict[str, np.ndarray]) -> np.ndarray:
    """Apply an MLP in NumPy, except for the activation function."""

    def f(x: np.ndarray) -> np.ndarray:
        return np.asarray(activate(c.activation, jnp.asarray(x, jnp.float32)), np.float64)

    up = x @ matrices["up_proj"]
    h = f(x @ matrices["gate_proj"]) * up if "gate_proj" in matrices else f(up)
    result: np.ndarray = h @ matrices["down_proj"]
    return result
