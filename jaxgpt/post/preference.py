"""The objective of preference pairs: one pass over both answers of a pair, and at most one pass of a frozen reference."""

from __future__ import annotations

from collections.abc import Callable, Mapping
from typing import Any, NamedTuple, NotRequired, TypedDict

import jax
import jax.numpy as jnp

from jaxgpt.config import PostConfig
from jaxgpt.post.losses import dpo_loss, ipo_loss, odds_ratio_loss, robust_loss, simpo_loss
from jaxgpt.train.loss import Forward, Objective, RowSums
from jaxgpt.train.side_outputs import penalty_of, side_means, side_metrics


class PairBatch(TypedDict):
    """A batch of preference pairs, on the host or on the devices.

    Attributes:
        windows: int32 `[B, 2, T, 3]`, the windows of the chosen and the rejected text (`train.loss.split_windows`); the targets
            are the answers.
        reference_log_p: log probabilities of the answers under the reference, float32 `[B, 2]` (`jaxgpt.post.reference`);
            absent if the objective computes them.
    """

    windows: Any
    reference_log_p: NotRequired[Any]


class PairLogP(NamedTuple):
    """Log probabilities of both answers of each pair.

    Attributes:
        log_p_B2: log p of the chosen and the rejected answer, summed over the tokens of the answer, float32.
        tokens_B2: number of tokens of each answer, float32; 0 for rows of padding.
        sides: side outputs of the blocks, means over both answers, `[B]` or `[B, ...]`.
    """

    log_p_B2: jax.Array
    tokens_B2: jax.Array
    sides: Mapping[str, jax.Array]

    @property
    def length_B2(self) -> jax.Array:  # noqa: N802
        """Number of tokens of each answer, at least 1."""
        return jnp.maximum(self.tokens_B2, 1)


def preference_objective(
    apply_fn: Callable[..., Any],
    settings: PostConfig,
    chunk: int = 0,
    penalties: Mapping[str, float] | None = None,
) -> Objective:
    """Make the objective of preference pairs (`jaxgpt.data.preferences`).

    A batch is a `PairBatch`, or only its `windows`. The argument `frozen` of the objective holds the weights of the reference;
    it is ignored by SimPO and ORPO, and for batches with `reference_log_p`.

    The metrics are means over pairs: `reward_chosen` and `reward_rejected`, beta times the log ratio to the reference (SimPO
    and ORPO: beta times log p per token); `margin`, their difference; `accuracy`, the fraction of positive margins;
    `log_p_chosen` and `log_p_rejected`, summed over the answers.

    Args:
        apply_fn: `model.apply`.
        settings: objective and its constants.
        chunk: positions of each window per chunk of logits, to save memory (`train.at_positions.chunked`); 0: all.
        penalties: as in `train.loss.next_token_loss`; a side output of a pair is the mean over both answers.
    """

    def objective(params: Any, batch: Any, key: jax.Array | None, frozen: Any) -> RowSums:
        is_array = hasattr(batch, "shape")
        pairs: PairBatch = {"windows": batch} if is_array else batch
        windows_B2T3 = pairs["windows"]
        answers = pair_log_p(apply_fn, params, windows_B2T3, key, chunk, with_sides=penalties is not None)

        reference_B2 = None
        if settings.has_reference:
            reference_B2 = pairs.get("reference_log_p")
            if reference_B2 is None:
                reference_B2 = pair_log_p(apply_fn, frozen, windows_B2T3, chunk=chunk).log_p_B2
            reference_B2 = jax.lax.stop_gradient(reference_B2)
        score_B2 = _scores(answers, reference_B2)
        reward_B2 = settings.beta * score_B2
        if settings.normalize or settings.objective == "ipo":
            score_B2 = score_B2 / answers.length_B2

        loss_B = pair_loss(score_B2, settings)
        cross_entropy_B = -answers.log_p_B2[:, 0] / answers.length_B2[:, 0]
        if settings.objective == "orpo":
            loss_B = cross_entropy_B + loss_B
        elif settings.sft:
            loss_B = loss_B + settings.sft * cross_entropy_B

        # Rows without answers are padding.
        is_pair_B = (answers.tokens_B2 > 0).all(-1)
        metrics = _metrics(reward_B2, answers.log_p_B2)
        sums = {name: jnp.where(is_pair_B, value_B, 0.0) for name, value_B in metrics.items()}
        return RowSums(
            loss_B=jnp.where(is_pair_B, loss_B, 0.0),
            count_B=is_pair_B.astype(jnp.float32),
            others=sums | side_metrics(answers.sides),
            penalty_B=penalty_of(answers.sides, penalties or {}),
        )

    return objective


def _scores(answers: PairLogP, reference_B2: jax.Array | None) -> jax.Array:
    """Return the score of each answer, `[B, 2]`: its log ratio to the reference; without a reference, log p per token."""
    if reference_B2 is None:
        return answers.log_p_B2 / answers.length_B2
    return answers.log_p_B2 - reference_B2


def _metrics(reward_B2: jax.Array, log_p_B2: jax.Array) -> dict[str, jax.Array]:
    """Return the metrics of each pair, `[B]`, see `preference_objective`."""
    chosen_B = reward_B2[:, 0]
    rejected_B = reward_B2[:, 1]
    return {
        "reward_chosen": chosen_B,
        "reward_rejected": rejected_B,
        "margin": chosen_B - rejected_B,
        "accuracy": (chosen_B > rejected_B).astype(jnp.float32),
        "log_p_chosen": log_p_B2[:, 0],
        "log_p_rejected": log_p_B2[:, 1],
    }


def pair_log_p(
    apply_fn: Callable[..., Any],
    weights: Any,
    windows_B2T3: jax.Array,
    key: jax.Array | None = None,
    chunk: int = 0,
    with_sides: bool = False,
) -> PairLogP:
    """Compute the log probabilities of both answers of each pair.

    Args:
        apply_fn, chunk: as for `preference_objective`.
        weights: weights of the model.
        windows_B2T3: windows of the chosen and the rejected text.
        key: dropout key; None: no dropout.
        with_sides: whether to return the side outputs of the blocks.
    """
    # Both answers of a pair are on the same device, so no rows move.
    B, _, T, _ = windows_B2T3.shape
    windows_XT3 = windows_B2T3.reshape(2 * B, T, 3)
    forward = Forward(apply_fn, chunk, with_sides)
    losses_XT, targets_XT, sides = forward(weights, windows_XT3, key)
    tokens_XT = (targets_XT >= 0).astype(jnp.float32)
    means = {name: x_X.reshape(B, 2, *x_X.shape[1:]).mean(1) for name, x_X in side_means(sides, targets_XT).items()}
    return PairLogP(
        log_p_B2=-losses_XT.sum(-1).reshape(B, 2),
        tokens_B2=tokens_XT.sum(-1).reshape(B, 2),
        sides=means,
    )


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
