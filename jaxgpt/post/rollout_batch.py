"""Batches of rollouts: prompts and sampled answers as rows of windows, for the objectives of rewards and of distillation."""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from typing import Any, TypedDict

import numpy as np

from jaxgpt.config import Config
from jaxgpt.data.prompts import Prompt
from jaxgpt.lm.results import Generation
from jaxgpt.post.answers import OVERLONG, answer_ids
from jaxgpt.post.rewards import metrics_of

DIFFERENCE = "log_p_difference"  # metric: mean absolute difference of log p between sampler and training, in nats
# Metric of an answer: whether all answers to its prompt have equal rewards, and thus the advantage 0.
EQUAL_REWARDS = "equal_rewards"

Array = Any  # np.ndarray on the host, jax.Array on the devices


class RolloutBatch(TypedDict, total=False):
    """A batch of sampled answers, on the host or on the devices.

    Attributes:
        windows: int32 `[B, T, 3]` (`train.loss.split_windows`); the targets are the answers, at most `post.max_new_tokens`
            consecutive positions of each row.
        log_p: log probabilities of the targets in the rollout, float32 `[B, T]`.
        metrics: numbers of each answer, such as its rewards, float32 `[B]`, keyed by metric.
        weight: answers per token of the batch, for means over all tokens, float32 `[B]`.
        advantage: advantage of each answer, float32 `[B]`; absent in distillation.
        counted: 0 for answers without a loss, float32 `[B]`; only with `post.mask_truncated`.
        reference_log_p: log probabilities of the targets under the reference, float32 `[B, T]`; only with `post.kl`.
    """

    windows: Array
    log_p: Array
    metrics: Mapping[str, Array]
    weight: Array
    advantage: Array
    counted: Array
    reference_log_p: Array


def empty_rollout(config: Config) -> RolloutBatch:
    """Return a batch without rows."""
    if not config.post.has_rewards:
        return rollout_batch(config, [], [])
    none = np.zeros(0, np.float32)
    names = [*metrics_of(config.post.reward_weights), EQUAL_REWARDS]
    if config.post.overlong_tokens:
        names.append(OVERLONG)
    return rollout_batch(config, [], [], none, dict.fromkeys(names, none))


def rollout_batch(
    config: Config,
    prompts: Sequence[Prompt],
    answers: Sequence[Generation],
    advantage_B: np.ndarray | None = None,
    metrics: Mapping[str, np.ndarray] = {},
) -> RolloutBatch:
    """Return a batch; `weight`, `reference_log_p` and the metric `DIFFERENCE` are zeros until the caller computes them.

    Args:
        config: settings of the run.
        prompts: prompt of each answer.
        answers: answers with their log probabilities.
        advantage_B: advantage of each answer, for `policy_objective`; None: a batch of `on_policy_objective`.
        metrics: numbers of each answer, keyed by metric.
    """
    B = len(prompts)
    T = config.window
    windows_BT3 = np.full((B, T, 3), (0, -1, -1), np.int32)
    log_p_BT = np.zeros((B, T), np.float32)
    for row, (prompt, answer) in enumerate(zip(prompts, answers, strict=True)):
        new = answer_ids(answer)
        ids = prompt.ids + new
        n = len(ids) - 1
        targets = slice(len(prompt.ids) - 1, n)
        windows_BT3[row, :n, 0] = ids[:-1]
        windows_BT3[row, targets, 1] = new
        windows_BT3[row, :n, 2] = 0
        log_p_BT[row, targets] = answer.log_p
    is_truncated_B = np.array([answer.finish_reason == "length" for answer in answers], np.float32)
    of_answers = {name: value_B.astype(np.float32) for name, value_B in metrics.items()}
    of_answers |= {"truncated": is_truncated_B, DIFFERENCE: np.zeros(B, np.float32)}
    batch: RolloutBatch = {
        "windows": windows_BT3,
        "log_p": log_p_BT,
        "metrics": of_answers,
        "weight": np.zeros(B, np.float32),
    }
    if advantage_B is not None:
        batch["advantage"] = advantage_B.astype(np.float32)
    if config.post.mask_truncated:
        batch["counted"] = 1 - is_truncated_B
    if config.post.kl:
        batch["reference_log_p"] = np.zeros((B, T), np.float32)
    return batch


def token_weights(batch: RolloutBatch) -> np.ndarray:
    """Return the weight of each answer of a batch for a mean over tokens, float32 `[B]`: answers per target with a loss."""
    is_target_BT = batch["windows"][..., 1] >= 0
    if "counted" in batch:
        is_target_BT &= batch["counted"][:, None] > 0
    rows = len(is_target_BT)
    tokens = max(is_target_BT.sum(), 1)
    return np.full(rows, rows / tokens, np.float32)
