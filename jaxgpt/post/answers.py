"""Answers to prompts: sampled with the weights of a model, and rewarded."""

from __future__ import annotations

from collections.abc import Sequence
from typing import Any

import jax
import numpy as np

from jaxgpt.config import Config
from jaxgpt.data.prompts import Prompt
from jaxgpt.lm import LM, generate
from jaxgpt.lm.results import Generation
from jaxgpt.parallel.processes import on_leader
from jaxgpt.post.reward_calls import Answered, rewards_of
from jaxgpt.post.reward_names import Reward
from jaxgpt.post.rewards import TOTAL, Rewards, overlong_penalty

OVERLONG = "reward_overlong"  # metric of the penalty for long answers


def answer_ids(answer: Generation) -> list[int]:
    """Return the ids that the model generated, including the id that ended the answer."""
    return answer.ids if answer.stop_id is None else [*answer.ids, answer.stop_id]


def sample(lm: LM, prompts: Sequence[Prompt], key: jax.Array | None) -> list[Generation]:
    """Generate an answer to each prompt, at temperature 1; without a key, by greedy decoding."""
    # Without filters and at temperature 1, tokens are drawn with the probabilities that the objective computes.
    options: dict[str, Any] = {"temperature": 0.0 if key is None else 1.0, "top_k": 0, "top_p": 1.0, "min_p": 0.0}
    options |= {"repetition_penalty": 1.0, "no_repeat_ngram_size": 0, "overflow": "error"}

    if key is not None:
        options["key"] = key
    return generate(lm, [prompt.ids for prompt in prompts], max_new_tokens=lm.config.post.max_new_tokens, **options)


def reward_answers(reward: Reward, config: Config, prompts: Sequence[Prompt], answers: Sequence[Generation]) -> Rewards:
    """Return the rewards of answers, including the penalty of `post.overlong_tokens`; raise `UserError` if a reward fails.

    Only process 0 calls the reward, because the reward may be code that writes files or uses a service.
    """
    answered = Answered(
        prompts=[prompt.prompt for prompt in prompts],
        texts=[answer.text for answer in answers],
        records=[prompt.record for prompt in prompts],
    )
    name = " ".join(config.post.reward)

    def called() -> dict[str, list[float]]:
        rewards = rewards_of(reward, name, answered, config.post.reward_seconds)
        return {metric: value_B.tolist() for metric, value_B in rewards.metrics.items()}

    values = {metric: np.array(value_B, np.float32) for metric, value_B in on_leader(called).items()}
    total_B = values.pop(TOTAL)
    if config.post.overlong_tokens:
        lengths = [len(answer_ids(answer)) for answer in answers]
        penalty_B = overlong_penalty(lengths, config.post.max_new_tokens, config.post.overlong_tokens)
        total_B = total_B + penalty_B
        values[OVERLONG] = penalty_B
    return Rewards(total_B, values)
