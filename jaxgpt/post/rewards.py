"""Rewards of generated answers: the sum of several rewards, their metrics, and the penalty for long answers."""

from __future__ import annotations

from collections.abc import Collection, Mapping, Sequence
from dataclasses import dataclass
from typing import Any, NamedTuple

import numpy as np

from jaxgpt.errors import UserError
from jaxgpt.post.reward_names import Reward, open_reward
from jaxgpt.reward_words import shown_reward

TOTAL = "reward"  # metric of the reward of an answer


class Rewards(NamedTuple):
    """The rewards of answers.

    Attributes:
        total_B: reward of each answer, float32.
        parts: values of each of several rewards, without its weight, and of the penalty for long answers, float32 `[B]`, keyed
            by metric; empty: a single reward without this penalty.
    """

    total_B: np.ndarray
    parts: Mapping[str, np.ndarray]

    @property
    def metrics(self) -> dict[str, np.ndarray]:
        """The total and the parts, keyed by metric."""
        return {TOTAL: self.total_B, **self.parts}


@dataclass(frozen=True)
class WeightedSum:
    """A reward: the sum of rewards, each times its weight. The value of each reward without its weight is a metric.

    Attributes:
        rewards: the rewards, keyed by name.
        weights: factor of each reward.
    """

    rewards: Mapping[str, Reward]
    weights: Mapping[str, float]

    def __call__(
        self, prompts: Sequence[Any], texts: Sequence[str], records: Sequence[Mapping[str, Any]]
    ) -> list[float]:
        """Return the sum for each text."""
        return self.add({name: reward(prompts, texts, records) for name, reward in self.rewards.items()})

    def add(self, values: Mapping[str, Sequence[float] | np.ndarray]) -> list[float]:
        """Return the weighted sum for each text, from the values of each reward, keyed by name."""
        terms = []
        for name, of_texts in values.items():
            terms.append([self.weights[name] * float(value) for value in of_texts])
        return [sum(terms_of_text) for terms_of_text in zip(*terms, strict=True)]


def open_rewards(weights: Mapping[str, float]) -> Reward:
    """Return the sum of the named rewards, with a weight for each name; a single reward is returned without its weight.

    Raises:
        UserError: as in `open_reward`, or if two rewards have the same metric.
    """
    rewards = {name: open_reward(name) for name in weights}
    if len(rewards) == 1:
        return rewards.popitem()[1]
    names: dict[str, str] = {}  # name of the reward with each metric
    for name in rewards:
        metric = metric_of(name)
        if metric in names:
            raise UserError(f"{names[metric]} and {name} have the same metric, {metric}: rename a function or a file")
        names[metric] = name
    return WeightedSum(rewards, weights)


def metric_of(name: str) -> str:
    """Return the metric of one of several rewards: its name, without the directory of a file."""
    return f"reward_{shown_reward(name)}"


def metrics_of(names: Collection[str]) -> list[str]:
    """Return the keys of `Rewards.metrics` for named rewards, without the penalty: the total and each of several rewards."""
    parts = [metric_of(name) for name in names]
    return [TOTAL, *parts] if len(parts) > 1 else [TOTAL]


def overlong_penalty(lengths: Sequence[int], longest: int, overlong: int) -> np.ndarray:
    """Compute the reward for the length of answers, float32 `[n]`.

    The reward is 0 up to `longest - overlong` tokens, and decreases linearly to -1 at `longest` tokens.

    Soft overlong punishment (Yu et al. 2025, equation 13).

    Args:
        lengths: number of tokens of each answer, including the token that ends it.
        longest: maximum number of tokens of an answer.
        overlong: number of tokens over which the penalty grows.
    """
    beyond = np.array(lengths, np.float32) - (longest - overlong)
    return -np.clip(beyond / overlong, 0, 1).astype(np.float32)
