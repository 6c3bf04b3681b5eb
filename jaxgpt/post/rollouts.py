"""Rollouts: answers sampled with the weights of the state, as batches of a policy gradient or of a distillation.

A rollout is a function of (seed, step, state): a resumed run needs no other state.
"""

from __future__ import annotations

import math
from collections.abc import Mapping, Sequence
from functools import partial
from typing import Any

import jax
import numpy as np

from jaxgpt.checkpoint.info import Info
from jaxgpt.config import Config
from jaxgpt.data import Data, PromptSplit
from jaxgpt.data.order import shuffled
from jaxgpt.data.prompts import Prompt
from jaxgpt.errors import UserError
from jaxgpt.lm import LM, generate
from jaxgpt.lm.generation import Generation
from jaxgpt.ops.random import named_key
from jaxgpt.parallel.processes import on_leader
from jaxgpt.parallel.rows import row_spec
from jaxgpt.post.policy import VARIANTS, advantages
from jaxgpt.post.reward_names import Reward
from jaxgpt.post.rewards import metrics_of, overlong_penalty, rewards_of
from jaxgpt.train.loss import token_losses
from jaxgpt.train.step import TrainState
from jaxgpt.trainer.feed import Feed
from jaxgpt.trainer.program import Program

OVERLONG = "reward_overlong"  # metric of the penalty for long answers
DIFFERENCE = "log_p_difference"  # metric of the difference in log p between sampler and training
TOLERANCE = 1e-3  # maximum difference in float32, in nats: rounding is below 1e-4


class Rollouts(Feed):
    """A feed of rollouts: every call of the step takes `train.steps_per_call` batches, from one rollout.

    With E = `post.rollout_epochs`, a rollout has `batch_size * steps_per_call / E` answers, `post.answers_per_prompt` to
    each prompt. Each epoch uses every answer once, in a different order. Without a reward, answers have no advantage.
    """

    reads_state = True

    def __init__(self, program: Program, data: Data, last: Info | None, *, reward: Reward | None = None) -> None:
        assert isinstance(data.train, PromptSplit)
        self.program = program
        self.tokenizer = data.tokenizer
        self.prompts = data.train.prompts
        self.reward = reward
        self.rows = program.config.rollout_answers
        self.spec = row_spec(no_rollout(program.config))
        self._log_p = partial(target_log_p, program)

    def at(self, steps: range, state: TrainState | None) -> Sequence[Any]:
        """Return the batches of the steps of a call.

        Raises:
            UserError: if the reward fails, or the log probabilities of the sampler differ from training.
        """
        assert state is not None
        config = self.program.config
        epochs = config.post.rollout_epochs
        index = steps.start // len(steps)
        rollout = self._sampled(index, state)
        rollout |= self._log_probabilities(rollout, state)

        batches = []
        for epoch in range(epochs):
            number = index * epochs + epoch
            order = shuffled(np.arange(self.rows), self.rows, config.train.seed, number, "rollout")
            for rows in np.split(order, len(steps) // epochs):
                batch = jax.tree.map(lambda x, rows=rows: x[rows], rollout)
                batches.append(batch | {"weight": token_weights(batch)})
        return batches

    def _sampled(self, index: int, state: TrainState) -> dict[str, Any]:
        """Sample the answers of a rollout, and reward them."""
        config = self.program.config
        post = config.post
        prompts = [prompt for prompt in self.prompts_of(index) for _ in range(post.answers_per_prompt)]
        key = named_key(config.train.seed, "rollout", index)
        answers = sample(LM(config, self.program.weights(state.params), self.tokenizer), prompts, key)
        if self.reward is None:
            return rollout_batch(config, prompts, answers, None, {})

        rewards = reward_answers(self.reward, config, prompts, answers)
        reward_PG = rewards["reward"].reshape(-1, post.group)
        advantage_PG = advantages(reward_PG, VARIANTS[post.objective].advantage)
        has_spread_P = np.ptp(reward_PG, axis=1) > 0
        metrics = {**rewards, "equal_rewards": np.repeat(~has_spread_P, post.group)}
        return rollout_batch(config, prompts, answers, advantage_PG.reshape(-1), metrics)

    def _log_probabilities(self, rollout: dict[str, Any], state: TrainState) -> dict[str, Any]:
        """Compute the log probabilities of the answers in training and, with a KL penalty, of the reference.

        The sampler must have computed the same probabilities as training, up to rounding. This is checked on the first answers
        (`checked_answers`), because checking all answers in float32 would take a quarter of the update. In bfloat16, the
        objective of rewards uses the log probabilities of training for all answers, so that the first ratio is 1.
        """
        config = self.program.config
        rows = checked_answers(config)
        windows_BT3 = rollout["windows"]
        weights = self.program.weights(state.params)
        trained_BT = np.array(self.program.call(self._log_p, weights, {"windows": windows_BT3[:rows]}))
        difference_BT = np.abs(rollout["log_p"][:rows] - trained_BT)
        check_sampler(difference_BT, config.train.compute_dtype)

        log_p_BT = rollout["log_p"].copy()
        log_p_BT[:rows] = trained_BT
        is_target_BT = windows_BT3[:rows, :, 1] >= 0
        difference_B = difference_BT.sum(1) / is_target_BT.sum(1)
        mean_B = np.full(self.rows, difference_B.mean(), np.float32)
        computed = {"log_p": log_p_BT, "metrics": rollout["metrics"] | {DIFFERENCE: mean_B}}
        if config.post.kl:
            reference_BT = self.program.call(self._log_p, self.program.reference, {"windows": windows_BT3})
            computed["reference_log_p"] = np.array(reference_BT)
        return computed

    def prompts_of(self, index: int) -> list[Prompt]:
        """Return the prompts of a rollout; each epoch of the data uses each prompt once, in a different order."""
        P = self.rows // self.program.config.post.answers_per_prompt
        n = len(self.prompts)
        epochs, positions = np.divmod(np.arange(index * P, (index + 1) * P), n)
        chosen = []
        for epoch, position in zip(epochs.tolist(), positions, strict=True):
            [place] = shuffled(np.array([position]), n, self.program.config.train.seed, epoch, "prompts")
            chosen.append(self.prompts[int(place)])
        return chosen


def checked_answers(config: Config) -> int:
    """Return the number of answers of a rollout whose log probabilities are computed as in training."""
    post = config.post
    if post.has_rewards and config.train.compute_dtype != "float32":
        return config.rollout_answers
    return min(post.group, config.rollout_answers)


def no_rollout(config: Config) -> dict[str, Any]:
    """Return a batch without rows of the objective of a rollout."""
    if not config.post.has_rewards:
        return rollout_batch(config, [], [], None, {})
    none = np.zeros(0, np.float32)
    names = [*metrics_of(config.post.reward_weights), "equal_rewards"]
    if config.post.overlong_tokens:
        names.append(OVERLONG)
    return rollout_batch(config, [], [], none, dict.fromkeys(names, none))


def rollout_batch(
    config: Config,
    prompts: Sequence[Prompt],
    answers: Sequence[Generation],
    advantage_B: np.ndarray | None,
    metrics: Mapping[str, np.ndarray],
) -> dict[str, Any]:
    """Return a batch of `policy_objective`; `weight` and `reference_log_p` are not yet computed.

    Without advantages, it is a batch of `on_policy_objective`.
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
    batch: dict[str, Any] = {
        "windows": windows_BT3,
        "log_p": log_p_BT,
        "metrics": {name: value_B.astype(np.float32) for name, value_B in metrics.items()}
        | {"truncated": is_truncated_B, DIFFERENCE: np.zeros(B, np.float32)},
        "weight": np.zeros(B, np.float32),
    }
    if advantage_B is not None:
        batch["advantage"] = advantage_B.astype(np.float32)
    if config.post.mask_truncated:
        batch["counted"] = 1 - is_truncated_B
    if config.post.kl:
        batch["reference_log_p"] = np.zeros((B, T), np.float32)
    return batch


def token_weights(batch: Mapping[str, Any]) -> np.ndarray:
    """Return the weight of each answer of a batch for a mean over tokens, float32 `[B]`: answers per target with a loss."""
    is_target_BT = batch["windows"][..., 1] >= 0
    if "counted" in batch:
        is_target_BT &= batch["counted"][:, None] > 0
    rows = len(is_target_BT)
    tokens = max(is_target_BT.sum(), 1)
    return np.full(rows, rows / tokens, np.float32)


def answer_ids(answer: Generation) -> list[int]:
    """Return the ids that the model generated, including the id that ended the answer."""
    return answer.ids if answer.stop_id is None else [*answer.ids, answer.stop_id]


def sample(lm: LM, prompts: Sequence[Prompt], key: jax.Array | None) -> list[Generation]:
    """Generate an answer to each prompt, at temperature 1; without a key, by greedy decoding."""
    # Without filters and at temperature 1, tokens are drawn from the probabilities of the loss.
    options: dict[str, Any] = {"temperature": 0.0 if key is None else 1.0, "top_k": 0, "top_p": 1.0, "min_p": 0.0}
    options |= {"repetition_penalty": 1.0, "no_repeat_ngram_size": 0, "overflow": "error"}

    if key is not None:
        options["key"] = key
    return generate(lm, [prompt.ids for prompt in prompts], max_new_tokens=lm.config.post.max_new_tokens, **options)


def reward_answers(
    reward: Reward, config: Config, prompts: Sequence[Prompt], answers: Sequence[Generation]
) -> dict[str, np.ndarray]:
    """Return the rewards of each answer, float32 `[B]`, keyed by metric; raise `UserError` if a reward fails.

    With `post.overlong_tokens`, the reward includes the penalty for long answers.

    Process 0 calls the reward, because it may be code that writes files or uses a service.
    """
    texts = [answer.text for answer in answers]
    originals = [prompt.prompt for prompt in prompts]
    records = [prompt.record for prompt in prompts]
    name = " ".join(config.post.reward)

    def rewards() -> dict[str, list[float]]:
        found = rewards_of(reward, name, originals, texts, records, config.post.reward_seconds)
        return {metric: value_B.tolist() for metric, value_B in found.items()}

    found = {metric: np.array(values, np.float32) for metric, values in on_leader(rewards).items()}
    if config.post.overlong_tokens:
        lengths = [len(answer_ids(answer)) for answer in answers]
        found[OVERLONG] = overlong_penalty(lengths, config.post.max_new_tokens, config.post.overlong_tokens)
        found["reward"] = found["reward"] + found[OVERLONG]
    return found


def target_log_p(program: Program, weights: Any, batch: Mapping[str, jax.Array]) -> jax.Array:
    """Compute the log probability of each target, `[B, T]`, as in training; 0 without a target."""
    config = program.config
    losses_BT, _ = token_losses(
        program.model.apply,
        weights,
        batch["windows"],
        chunk=config.train.loss_chunk,
        longest=config.post.max_new_tokens,
    )
    return -losses_BT


def check_sampler(difference_BT: np.ndarray, dtype: str) -> None:
    """Raise `UserError` if log probabilities of a rollout differ from training in float32, or are not finite.

    In bfloat16, rounding differs between the sampler and training: 0.04 nats on average for SmolLM2, up to 0.17. The metric
    `DIFFERENCE` shows it.

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
            "the rounding of float32: report this"
        )
