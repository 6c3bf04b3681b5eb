"""An evaluator of runs with rewards: the mean reward of greedy answers to the held-out prompts."""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from dataclasses import dataclass
from typing import Any, ClassVar, NamedTuple

import numpy as np

from jaxgpt.post.answers import answer_ids, reward_answers
from jaxgpt.post.held_out import answers_to, held_out_prompts
from jaxgpt.post.reward_names import Reward
from jaxgpt.trainer.evaluators import Watch
from jaxgpt.trainer.program import Program


@dataclass(frozen=True)
class HeldOutReward:
    """An evaluator: the mean reward of greedy answers to held-out prompts, the validation split of `Watch.data`.

    The last evaluation uses all prompts, earlier evaluations up to `train.eval_windows` (0: all).
    """

    reward: Reward
    ranks_by: ClassVar[str] = "reward"

    def __call__(self, program: Program, params: Any, watch: Watch) -> RewardResult | None:
        """Answer the prompts (`answers_to`), and reward the answers."""
        config = program.config
        prompts = held_out_prompts(config, watch)
        answers = answers_to(prompts, program, params, watch, key=None)
        if answers is None:
            return None
        rewards = reward_answers(self.reward, config, prompts, answers)
        reward_B = rewards.total_B
        n = len(reward_B)
        stderr = float(reward_B.std(ddof=1) / np.sqrt(n)) if n > 1 else float("nan")
        texts = [answer.text for answer in answers]
        tokens = float(np.mean([len(answer_ids(answer)) for answer in answers]))
        originals = [prompt.prompt for prompt in prompts]
        return RewardResult(
            reward=float(reward_B.mean()),
            stderr=stderr,
            rewards=reward_B,
            answers=texts,
            prompts=originals,
            tokens=tokens,
            parts=rewards.parts,
        )


class RewardResult(NamedTuple):
    """The rewards of greedy answers to the held-out prompts, with their standard error.

    Attributes:
        reward: mean reward.
        stderr: standard error of the mean over prompts; NaN for a single prompt.
        rewards: reward of each answer, float32.
        parts: values of each of several rewards and of the penalty for long answers, float32, keyed by metric.
        answers: generated texts.
        prompts: prompts, as in their records.
        tokens: mean number of tokens of an answer.
    """

    reward: float
    stderr: float
    rewards: np.ndarray
    answers: Sequence[str]
    prompts: Sequence[Any]
    tokens: float
    parts: Mapping[str, np.ndarray] = {}

    @property
    def metrics(self) -> Mapping[str, float]:
        """The numbers in `metrics.jsonl`."""
        numbers = {"val_reward": self.reward, "val_reward_stderr": self.stderr, "val_answer_tokens": self.tokens}
        return numbers | {f"val_{name}": value for name, value in self.part_means.items()}

    @property
    def part_means(self) -> dict[str, float]:
        """The mean of each entry of `parts`, keyed by metric."""
        return {name: float(value_B.mean()) for name, value_B in self.parts.items()}

    @property
    def ranking(self) -> float:
        """The negative reward: the value that ranks checkpoints; lower is better."""
        return -self.reward

    @property
    def samples(self) -> list[dict[str, Any]]:
        """The lines of samples.jsonl, without the step."""
        lines = []
        for row, (prompt, answer) in enumerate(zip(self.prompts, self.answers, strict=True)):
            line = {"prompt": prompt, "answer": answer, "reward": float(self.rewards[row])}
            lines.append(line | {name: float(value_B[row]) for name, value_B in self.parts.items()})
        return lines

    def __str__(self) -> str:
        """Format the mean reward and its standard error, as `reward 0.8125 +- 0.0701 (32 prompts)`."""
        error = f" +- {self.stderr:.4f}" if np.isfinite(self.stderr) else ""
        return f"reward {self.reward:.4f}{error} ({len(self.rewards)} prompts)"
