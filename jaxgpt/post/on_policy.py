"""The objective of on-policy distillation: the divergence from a teacher on answers of the student (Agarwal et al. 2024)."""

from __future__ import annotations

from typing import Any

import jax
import jax.numpy as jnp

from jaxgpt.post.rollout_batch import RolloutBatch
from jaxgpt.train.loss import Objective, RowSums


def on_policy_objective(distillation: Objective) -> Objective:
    """Make the objective of rollouts from the distillation objective: the mean divergence over the answer tokens.

    The drawn tokens are constants in the gradient.

    A batch is a `RolloutBatch`. Only its `windows`, `weight` and `metrics` are used.

    The metrics of the given objective are means over tokens; `cross_entropy` becomes `entropy`, because the mean `-log p` of
    tokens that the student draws estimates the student's entropy. `answer_tokens` and the `metrics` of the batch are means over
    answers.

    Args:
        distillation: objective of windows, from `distillation_objective`.
    """

    def objective(params: Any, batch: RolloutBatch, key: jax.Array | None, frozen: Any) -> RowSums:
        sums = distillation(params, batch["windows"], key, frozen)
        tokens_B = sums.count_B

        # Rows without answers are padding.
        is_answer_B = tokens_B > 0
        weight_B = jnp.where(is_answer_B, batch["weight"], 0.0)

        def weighted(x_B: jax.Array) -> jax.Array:
            return x_B * weight_B.reshape(-1, *(1,) * (x_B.ndim - 1))

        token_metrics = {name: weighted(x_B) for name, x_B in sums.others.items()}
        token_metrics["entropy"] = token_metrics.pop("cross_entropy")
        answer_metrics = {**batch["metrics"], "answer_tokens": tokens_B}
        answer_metrics = {name: jnp.where(is_answer_B, x_B, 0.0) for name, x_B in answer_metrics.items()}
        return RowSums(
            loss_B=weighted(sums.loss_B),
            count_B=is_answer_B.astype(jnp.float32),
            others=token_metrics | answer_metrics,
            penalty_B=None if sums.penalty_B is None else weighted(sums.penalty_B),
        )

    return objective
