"""The objective of preference pairs: both answers of a pair, and a frozen reference, in one pass each."""

from __future__ import annotations

from collections.abc import Callable, Mapping
from typing import Any

import jax
import jax.numpy as jnp

from jaxgpt.config import PostConfig
from jaxgpt.post.losses import dpo_loss, ipo_loss, odds_ratio_loss, robust_loss, simpo_loss
from jaxgpt.train.loss import Forward, Objective, RowSums, penalty_of, side_means, side_metrics


def preference_objective(
    apply_fn: Callable[..., Any],
    settings: PostConfig,
    chunk: int = 0,
    sft_tokens: float = 0.0,
    penalties: Mapping[str, float] | None = None,
) -> Objective:
    """Make the objective of preference pairs (`jaxgpt.data.preferences`).

    A batch is int32 `[B, 2, T, 3]`: the windows of the chosen and the rejected text (`train.loss.split_windows`). The targets
    are the answers. The argument `frozen` of the objective holds the weights of the reference; SimPO and ORPO ignore it. A
    batch may also be a dict with these `windows`, and with `reference_log_p`, float32 `[B, 2]`: the log probabilities of the
    answers under the reference (`jaxgpt.post.reference`). The objective then ignores `frozen`.

    The metrics are means over pairs: `reward_chosen` and `reward_rejected`, beta times the log ratio to the reference (SimPO
    and ORPO: beta times log p per token); `margin`, their difference; `accuracy`, the fraction of positive margins;
    `log_p_chosen` and `log_p_rejected`, summed over the answers.

    Args:
        apply_fn: `model.apply`.
        settings: objective and its constants.
        chunk: positions of each window per chunk of logits, to save memory (`train.loss.chunked`); 0: all.
        sft_tokens: divisor of the cross entropy with `settings.sft`, such as the mean length of the chosen answers; 0: the
            length of each answer.
        penalties: as in `train.loss.next_token_loss`; a side output of a pair is the mean over both answers.
    """

    def objective(params: Any, batch: Any, key: jax.Array | None, frozen: Any) -> RowSums:
        has_log_p = isinstance(batch, Mapping)
        windows_B2T3 = batch["windows"] if has_log_p else batch
        with_sides = penalties is not None
        log_p_B2, tokens_B2, sides = pair_log_p(apply_fn, params, windows_B2T3, key, chunk, with_sides)
        length_B2 = jnp.maximum(tokens_B2, 1)

        # The score that the pairs compare.
        if settings.has_reference:
            if has_log_p:
                reference_B2 = batch["reference_log_p"]
            else:
                reference_B2, _, _ = pair_log_p(apply_fn, frozen, windows_B2T3, chunk=chunk)
            score_B2 = log_p_B2 - jax.lax.stop_gradient(reference_B2)
        else:
            score_B2 = log_p_B2 / length_B2
        reward_B2 = settings.beta * score_B2
        if settings.normalize or settings.objective == "ipo":
            score_B2 = score_B2 / length_B2

        loss_B = pair_loss(score_B2, settings)
        cross_entropy_B = -log_p_B2[:, 0] / (sft_tokens or length_B2[:, 0])
        if settings.objective == "orpo":
            loss_B = cross_entropy_B + loss_B
        elif settings.sft:
            loss_B = loss_B + settings.sft * cross_entropy_B

        # Rows without answers are padding.
        is_pair_B = (tokens_B2 > 0).all(-1)
        others = {
            "reward_chosen": reward_B2[:, 0],
            "reward_rejected": reward_B2[:, 1],
            "margin": reward_B2[:, 0] - reward_B2[:, 1],
            "accuracy": (reward_B2[:, 0] > reward_B2[:, 1]).astype(jnp.float32),
            "log_p_chosen": log_p_B2[:, 0],
            "log_p_rejected": log_p_B2[:, 1],
        }
        sums = {name: jnp.where(is_pair_B, value_B, 0.0) for name, value_B in others.items()}
        loss_B = jnp.where(is_pair_B, loss_B, 0.0)
        count_B = is_pair_B.astype(jnp.float32)
        return RowSums(loss_B, count_B, sums | side_metrics(sides), penalty_of(sides, penalties or {}))

    return objective


def pair_log_p(
    apply_fn: Callable[..., Any],
    weights: Any,
    windows_B2T3: jax.Array,
    key: jax.Array | None = None,
    chunk: int = 0,
    with_sides: bool = False,
) -> tuple[jax.Array, jax.Array, dict[str, jax.Array]]:
    """Compute the log probabilities of both answers of each pair.

    Args:
        apply_fn, chunk: as for `preference_objective`.
        weights: weights of the model.
        windows_B2T3: windows of the chosen and the rejected text.
        key: dropout key; None: no dropout.
        with_sides: whether to return the side outputs of the blocks.

    Returns:
        log p, summed over the tokens of an answer, and the number of these tokens, each float32 `[B, 2]`; and the side outputs
        of each pair.
    """
    # Both answers of a pair are on the same device, so no rows move.
    B, _, T, _ = windows_B2T3.shape
    windows_XT3 = windows_B2T3.reshape(2 * B, T, 3)
    forward = Forward(apply_fn, chunk, with_sides)
    losses_XT, targets_XT, sides = forward(weights, windows_XT3, key)
    tokens_XT = (targets_XT >= 0).astype(jnp.float32)
    means = {name: x_X.reshape(B, 2, *x_X.shape[1:]).mean(1) for name, x_X in side_means(sides, targets_XT).items()}
    return -losses_XT.sum(-1).reshape(B, 2), tokens_XT.sum(-1).reshape(B, 2), means


def pair_loss(score_B2: jax.Array, settings: PostConfig) -> jax.Array:
    """Compute the loss of each pair from the scores of both answers, `[B]`; ORPO: without the cross entropy."""
    beta = settings.beta
    margin_B = score_B2[:, 0] - score_B2[:, 1]
    if settings.objective == "dpo":
        return dpo_loss(margin_B, beta, settings.label_smoothing)
    if settings.objective == "robust":
        return robust_loss(margin_B, beta, settings.label_smoothing)
    if settings.objective == "ipo":
        return ipo_loss(margin_B, beta)
    if settings.objective == "simpo":
        return simpo_loss(margin_B, beta, settings.margin)
    assert settings.objective == "orpo"
    return beta * odds_ratio_loss(score_B2[:, 0], score_B2[:, 1])
