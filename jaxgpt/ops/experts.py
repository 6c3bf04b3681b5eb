"""Mixture of experts: the router's choice, its side losses, and the reference definition of the experts.

Letters in names: B rows, T tokens of a row, D width of the model, F width of an expert's MLP, E experts, A active experts of a
token.
"""

from __future__ import annotations

from collections.abc import Callable
from typing import Any, NamedTuple

import jax
import jax.numpy as jnp

TINY = 1e-20  # added to the sum of a token's scores, so that the sum is above 0
EXPANSION = 2.0**40  # factor of the scores and of their sum, so that the square of the sum does not underflow
# SCORES maps the kinds of scores to functions from the logits of a token's experts to their scores.
SCORES: dict[str, Callable[[jax.Array], jax.Array]] = {"softmax": jax.nn.softmax, "sigmoid": jax.nn.sigmoid}


class Routing(NamedTuple):
    """The chosen experts of each token, their shares, and the scores of all experts.

    Attributes:
        choice_BTA: indices of the token's experts, int32.
        share_BTA: factor of each expert's output, float32.
        score_BTE: scores of all experts, float32.
    """

    choice_BTA: jax.Array
    share_BTA: jax.Array
    score_BTE: jax.Array


class ExpertWeights(NamedTuple):
    """The matrices of all experts: arrays, or stored weights, such as `kernels.stored.Stored`.

    A stored stack has a `shape`, and its matrix `stack[e]` has `astype` and is the right operand of `@`.

    Attributes:
        up_EDF: matrices from the model's width to the MLP's width.
        down_EFD: matrices from the MLP's width to the model's width.
        gate_EDF: matrices of the gates; None: the MLP is not gated.
    """

    up_EDF: Any
    down_EFD: Any
    gate_EDF: Any = None


def route(
    logits_BTE: jax.Array,
    active: int,
    kind: str = "softmax",
    normalize: bool = True,
    scale: float = 1.0,
    bias_E: jax.Array | None = None,
) -> Routing:
    """Choose the `active` experts with the highest scores, or sums of score and bias, and compute their shares.

    With `normalize`, the shares of a token add up to `scale`; for `softmax`, they are `scale` times the softmax over
    the chosen experts. Among equal scores, the first experts are chosen.

    Args:
        logits_BTE: output of the router.
        active: A, number of experts of each token.
        kind: `softmax` over the experts, or `sigmoid` of each logit.
        normalize: whether to divide the scores of a token's experts by their sum.
        scale: factor of the shares.
        bias_E: number added to each expert's score for the choice only; `bias_loss` defines its gradient.

    Source: Jiang et al. 2024 (Mixtral), section 2.1; sigmoid and bias: DeepSeek-AI 2024 (DeepSeek-V3), section 2.1.2.
    """
    logits_BTE = logits_BTE.astype(jnp.float32)
    score_BTE = SCORES[kind](logits_BTE)

    # The choice has no derivative; the shares have the derivative of the chosen scores.
    preference_BTE = score_BTE
    if bias_E is not None:
        preference_BTE = score_BTE + bias_E[None, None, :]
    _, choice_BTA = jax.lax.top_k(jax.lax.stop_gradient(preference_BTE), active)
    share_BTA = jnp.take_along_axis(score_BTE, choice_BTA, axis=-1)
    if normalize:
        share_BTA = _divided_by_sum(share_BTA)
    return Routing(choice_BTA, scale * share_BTA, score_BTE)


def _divided_by_sum(score: jax.Array) -> jax.Array:
    """Divide the scores of a token by their sum; the result is 0 if all scores are 0."""
    # The derivative divides by the square of the sum, which would underflow. Factors of 2 do not change the quotient.
    total = score.sum(-1, keepdims=True) + TINY
    return (EXPANSION * score) / (EXPANSION * total)


def expert_load(choice_BTA: jax.Array, experts: int, is_token_BT: jax.Array) -> jax.Array:
    """Compute the fraction of a row's choices that fall on each expert, float32 `[B, E]`: each row adds up to 1.

    Args:
        choice_BTA: the experts of each token.
        experts: E.
        is_token_BT: bool `[B or 1, T]`; false for padding, which is not counted. A row of padding has the load 0.
    """
    id_E = jnp.arange(experts, dtype=choice_BTA.dtype)
    chosen_BTE = (choice_BTA[..., None] == id_E[None, None, None, :]).astype(jnp.float32).mean(2)
    return row_mean(chosen_BTE, is_token_BT)


def balance_loss(routing: Routing, is_token_BT: jax.Array) -> jax.Array:
    """Compute the load-balancing loss of each row, `E * sum_e load_e * mean score_e`: `[B]`; 1 if the load is uniform.

    The scores of a token are divided by their sum. The loss of a row is not a sum over its tokens. The loss of a batch
    is the sum over its rows, weighted by their numbers of targets (`train.side_outputs.side_sums`), so the loss does
    not depend on the number of microbatches or devices.

    Args:
        routing: the experts of each token, and the scores.
        is_token_BT: bool `[B or 1, T]`; false for padding, which is not counted.

    Source: Fedus et al. 2021, section 2.2; per row: DeepSeek-V3, equation 17.
    """
    experts = routing.score_BTE.shape[-1]
    load_BE = expert_load(routing.choice_BTA, experts, is_token_BT)
    normalized_BTE = _divided_by_sum(routing.score_BTE)
    return experts * (load_BE * row_mean(normalized_BTE, is_token_BT)).sum(-1)


def z_loss(logits_BTE: jax.Array) -> jax.Array:
    """Compute `logsumexp(logits)^2` of each token, float32 `[B, T]`. Source: Zoph et al. 2022, section 3.2."""
    return jnp.square(jax.nn.logsumexp(logits_BTE.astype(jnp.float32), axis=-1))


def bias_loss(bias_E: jax.Array, load_BE: jax.Array) -> jax.Array:
    """Return zeros `[B]`; their gradient with respect to the bias is the load error of each expert, `load_e - 1 / E`.

    Like every gradient, load errors are summed over rows, weighted by their numbers of targets, and over microbatches and
    devices. The optimizer subtracts a multiple of the gradient's sign (`router_bias_rate`): the bias of an overloaded
    expert decreases, and the bias of an underloaded expert increases (DeepSeek-V3, section 2.1.2).
    """
    # A row of padding has the load 0 and the error -1 / E, but no targets, so its weight is 0.
    error_BE = load_BE - 1 / len(bias_E)
    product_B = (bias_E[None] * jax.lax.stop_gradient(error_BE)).sum(-1)
    return product_B - jax.lax.stop_gradient(product_B)


def row_mean(x_BTE: jax.Array, is_token_BT: jax.Array) -> jax.Array:
    """Compute the mean over the tokens of each row, without padding: `[B, E]`; 0 for a row of padding."""
    weight_BT = jnp.broadcast_to(is_token_BT, x_BTE.shape[:2]).astype(x_BTE.dtype)
    count_B1 = jnp.maximum(weight_BT.sum(-1, keepdims=True), 1)
    return (weight_BT[..., None] * x_BTE).sum(1) / count_B1


def experts(
    x_BTD: jax.Array,
    choice_BTA: jax.Array,
    share_BTA: jax.Array,
    weights: ExpertWeights,
    activate: Callable[[jax.Array], jax.Array],
    dtype: Any,
) -> jax.Array:
    """Compute `y = sum_a share_a * mlp_{choice_a}(x)` for each token: `[B, T, D]` in `dtype`.

    In this definition, every expert computes every token, and the share of an expert that a token did not choose is 0. The sum
    over experts is float32.

    Args:
        x_BTD: inputs.
        choice_BTA: the experts of each token.
        share_BTA: the share of each of these experts.
        weights: the matrices of the experts.
        activate: activation function of the MLP.
        dtype: dtype of the matrix products and of the result.
    """
    x_BTD = x_BTD.astype(dtype)
    y_BTD = jnp.zeros(x_BTD.shape, jnp.float32)
    for expert in range(weights.up_EDF.shape[0]):
        share_BT1 = jnp.where(choice_BTA == expert, share_BTA, 0.0).sum(-1, keepdims=True)
        out_BTD = mlp_of(x_BTD, expert, weights, activate, dtype)
        y_BTD += share_BT1 * out_BTD.astype(jnp.float32)
    return y_BTD.astype(dtype)


def mlp_of(
    x: jax.Array, expert: Any, weights: ExpertWeights, activate: Callable[[jax.Array], jax.Array], dtype: Any
) -> Any:
    """Apply the MLP of one expert: `[..., D]` to `[..., D]`; the index `expert` may be traced."""
    up = x @ weights.up_EDF[expert].astype(dtype)
    if weights.gate_EDF is None:
        h = activate(up)
    else:
        gate = x @ weights.gate_EDF[expert].astype(dtype)
        h = activate(gate) * up
    return h @ weights.down_EFD[expert].astype(dtype)
