"""Policy gradients: advantages of a group of answers, and the clipped objective of their tokens."""

from __future__ import annotations

from collections.abc import Callable, Mapping
from typing import Any, Literal, NamedTuple

import jax
import jax.numpy as jnp
import numpy as np

from jaxgpt.config import PostConfig
from jaxgpt.post.rollout_batch import RolloutBatch
from jaxgpt.train.loss import Forward, Objective, RowSums
from jaxgpt.train.side_outputs import penalty_of, side_means, side_metrics


class Variant(NamedTuple):
    """The choices that distinguish an objective from the others.

    Attributes:
        advantage: argument `kind` of `advantages`.
        ratio: kind of ratio of the probabilities. token: of each token; mean: its geometric mean over the tokens of the answer;
            product: its product over these tokens.
        average: kind of mean. answer: over the tokens of each answer, then over answers; token: over all tokens of the batch;
            fixed: the sum over each answer divided by the maximum number of tokens, then over answers.
    """

    advantage: Literal["normalized", "centered", "leave-one-out"]
    ratio: Literal["token", "mean", "product"]
    average: Literal["answer", "token", "fixed"]


VARIANTS = {
    "grpo": Variant("normalized", "token", "answer"),  # Shao et al. 2024
    "dr-grpo": Variant("centered", "token", "fixed"),  # Liu et al. 2025
    "dapo": Variant("normalized", "token", "token"),  # Yu et al. 2025
    "gspo": Variant("normalized", "mean", "answer"),  # Zheng et al. 2025
    "rloo": Variant("leave-one-out", "product", "answer"),  # Ahmadian et al. 2024
}


def advantages(reward_PG: np.ndarray, kind: Literal["normalized", "centered", "leave-one-out"]) -> np.ndarray:
    """Compute the advantages of the G answers to each of P prompts, float32 `[P, G]`.

    centered: `r - mean`; normalized: `(r - mean) / (std + 1e-4)`, with the unbiased standard deviation of the group;
    leave-one-out: r minus the mean of the other answers, `(r - mean) G / (G - 1)`.
    """
    # Subtract the first reward, so that equal rewards have the advantage 0, not a rounding error divided by 1e-4.
    reward_PG = reward_PG.astype(np.float64)
    reward_PG = reward_PG - reward_PG[:, :1]
    centered_PG = reward_PG - reward_PG.mean(1, keepdims=True)
    if kind == "normalized":
        centered_PG = centered_PG / (reward_PG.std(1, ddof=1, keepdims=True) + 1e-4)
    elif kind == "leave-one-out":
        G = reward_PG.shape[1]
        centered_PG = centered_PG * G / (G - 1)
    return centered_PG.astype(np.float32)


def kl_estimate(delta: jax.Array, kind: Literal["k1", "k2", "k3"]) -> jax.Array:
    """Estimate `KL(p || p_reference)` from a token drawn from p, with `delta = log p_reference - log p` (Schulman 2020).

    k1: `-delta`; k2: `delta^2 / 2`; k3: `exp(delta) - delta - 1`. The estimates k2 and k3 are never negative.
    """
    if kind == "k1":
        return -delta
    if kind == "k2":
        return delta**2 / 2
    return jnp.exp(delta) - delta - 1


def clipped_loss(ratio: jax.Array, advantage: jax.Array, low: float, high: float) -> jax.Array:
    """Compute `-min(r A, clip(r, 1 - low, 1 + high) A)` (Schulman et al. 2017), with broadcasting."""
    return -jnp.minimum(ratio * advantage, jnp.clip(ratio, 1 - low, 1 + high) * advantage)


def is_clipped(ratio: jax.Array, advantage: jax.Array, low: float, high: float) -> jax.Array:
    """Return whether `clipped_loss` is constant because of the clip, bool, with broadcasting."""
    is_below = (ratio < 1 - low) & (advantage < 0)
    is_above = (ratio > 1 + high) & (advantage > 0)
    return is_below | is_above


def answer_ratio(
    log_ratio_BT: jax.Array, is_counted_BT: jax.Array, length_B: jax.Array, kind: Literal["token", "mean", "product"]
) -> jax.Array:
    """Return the ratio of the probabilities for each token, `[B, T]`.

    Args:
        log_ratio_BT: log of the ratio of each token, 0 without a target.
        is_counted_BT: whether a token counts in the mean or product of its answer.
        length_B: number of tokens of each answer, at least 1.
        kind: `Variant.ratio`.
    """
    if kind == "token":
        return jnp.exp(log_ratio_BT)
    log_ratio_B = jnp.where(is_counted_BT, log_ratio_BT, 0.0).sum(-1)
    if kind == "mean":
        log_ratio_B = log_ratio_B / length_B
    return jnp.exp(jnp.broadcast_to(log_ratio_B[:, None], log_ratio_BT.shape))


def policy_objective(
    apply_fn: Callable[..., Any], settings: PostConfig, chunk: int = 0, penalties: Mapping[str, float] | None = None
) -> Objective:
    """Make the objective of policy gradients on rollouts (`jaxgpt.post.rollouts.Rollouts`).

    The loss of a token is `-min(r A, clip(r, 1 - clip_low, 1 + clip_high) A) + kl KL(p || p_reference)`, with the advantage
    A of the answer and the ratio r = p / p_rollout (gspo: its geometric mean over the answer; rloo: its product).

    A batch is a `RolloutBatch`. With `settings.mask_truncated`, answers with `counted` 0 have no loss. They still count as
    answers in means over answers, as in TRL.

    The metrics `answer_tokens` and the `metrics` of the batch are means over answers. `clipped` (fraction of tokens), `kl` (if
    `settings.kl` is above 0) and `entropy` are means over the tokens of each answer, averaged over answers (dapo: means over
    all tokens). `entropy` is the mean of `-log p` of the tokens when they were drawn, which estimates the policy's entropy in
    nats per token.

    Args:
        apply_fn: `model.apply`.
        settings: objective and its constants.
        chunk: positions of each window per chunk of logits, to save memory; 0: all.
        penalties: as in `train.loss.next_token_loss`; means over the tokens of each answer.
    """
    variant = VARIANTS[settings.objective]
    forward = Forward(apply_fn, chunk, with_sides=penalties is not None, longest=settings.max_new_tokens)

    def objective(params: Any, batch: RolloutBatch, key: jax.Array | None, frozen: Any) -> RowSums:
        losses_BT, targets_BT, sides = forward(params, batch["windows"], key)
        is_target_BT = targets_BT >= 0
        tokens_B = is_target_BT.sum(-1, dtype=jnp.float32)
        is_counted_BT = is_target_BT
        if settings.mask_truncated:
            is_counted_BT = is_target_BT & (batch["counted"] > 0)[:, None]
        length_B = jnp.maximum(tokens_B, 1)
        log_p_BT = -losses_BT

        def total(x_BT: jax.Array) -> jax.Array:
            return jnp.where(is_counted_BT, x_BT, 0.0).sum(-1)

        # Compute the loss of each token from the ratio of its probabilities now and in the rollout.
        log_ratio_BT = jnp.where(is_target_BT, log_p_BT - batch["log_p"], 0.0)
        ratio_BT = answer_ratio(log_ratio_BT, is_counted_BT, length_B, variant.ratio)
        advantage_B1 = batch["advantage"][:, None]
        loss_BT = clipped_loss(ratio_BT, advantage_B1, settings.clip_low, settings.clip_high)
        is_clipped_BT = is_clipped(ratio_BT, advantage_B1, settings.clip_low, settings.clip_high)
        token_metrics = {"clipped": is_clipped_BT.astype(jnp.float32), "entropy": -batch["log_p"]}
        if settings.kl:
            delta_BT = jnp.where(is_target_BT, batch["reference_log_p"] - log_p_BT, 0.0)
            kl_BT = kl_estimate(delta_BT, settings.kl_estimator)
            loss_BT = loss_BT + settings.kl * kl_BT
            token_metrics["kl"] = kl_BT

        # Weight the answers for means over the tokens of each answer, or over the tokens of the batch.
        weight_B = 1 / length_B
        if variant.average == "token":
            weight_B = batch["weight"]
        loss_weight_B = weight_B
        if variant.average == "fixed":
            loss_weight_B = jnp.full_like(length_B, 1 / settings.max_new_tokens)

        # Rows without answers are padding.
        is_answer_B = tokens_B > 0
        metrics = {name: total(x_BT) * weight_B for name, x_BT in token_metrics.items()}
        metrics |= {**batch["metrics"], "answer_tokens": tokens_B}
        sums = {name: jnp.where(is_answer_B, value_B, 0.0) for name, value_B in metrics.items()}
        loss_B = jnp.where(is_answer_B, total(loss_BT) * loss_weight_B, 0.0)
        means = side_means(sides, targets_BT)
        count_B = is_answer_B.astype(jnp.float32)
        return RowSums(loss_B, count_B, sums | side_metrics(means), penalty_of(means, penalties or {}))

    return objective
