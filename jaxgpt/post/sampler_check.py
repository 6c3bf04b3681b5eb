"""The check that the sampler of a rollout computes the same log probabilities as training."""

from __future__ import annotations

import math
from typing import Any

import jax
import numpy as np

from jaxgpt.config import Config
from jaxgpt.errors import UserError
from jaxgpt.train.loss import token_losses
from jaxgpt.trainer.program import Program

TOLERANCE = 1e-3  # maximum difference between sampler and training in float32, in nats: rounding is below 1e-4


def checked_answers(config: Config) -> int:
    """Return the number of answers of a rollout with log probabilities that are also computed as in training."""
    post = config.post
    if post.has_rewards and config.train.compute_dtype != "float32":
        return config.rollout_answers
    return min(post.group, config.rollout_answers)


def target_log_p(program: Program, weights: Any, windows_BT3: jax.Array) -> jax.Array:
    """Compute the log probability of each target, `[B, T]`, as in training; 0 without a target."""
    config = program.config
    losses_BT, _ = token_losses(
        program.model.apply,
        weights,
        windows_BT3,
        chunk=config.train.loss_chunk,
        longest=config.post.max_new_tokens,
    )
    return -losses_BT


def check_sampler(difference_BT: np.ndarray, dtype: str) -> None:
    """Raise `UserError` if log probabilities of a rollout differ from training in float32, or are not finite.

    In bfloat16, rounding differs between the sampler and training: 0.04 nats on average for SmolLM2, up to 0.17. The
    metric `rollout_batch.DIFFERENCE` is the mean absolute difference.

    Args:
        difference_BT: absolute differences, 0 without a target.
        dtype: `train.compute_dtype`.
    """
    difference = float(difference_BT.max(initial=0.0))
    if not math.isfinite(difference):
        raise UserError("log probabilities of a rollout are not finite: training has diverged; lower the learning rate")
    if dtype == "float32" and difference > TOLERANCE:
        raise UserError(
            f"log probabilities of a rollout differ by {difference:.2g} nats between the sampler and training, more than by "
            "the rounding of float32: report this as a bug"
        )


def mean_difference(difference_BT: np.ndarray, windows_BT3: np.ndarray) -> float:
    """Return the mean over answers of the mean absolute difference at their targets."""
    is_target_BT = windows_BT3[:, :, 1] >= 0
    difference_B = difference_BT.sum(1) / is_target_BT.sum(1)
    return float(difference_B.mean())
