"""Rollouts: answers sampled with the weights of the state, as batches of a policy gradient or of a distillation.

A rollout is a function of (seed, step, state): a resumed run needs no other state.
"""

from __future__ import annotations

from collections.abc import Sequence
from functools import partial

import jax
import numpy as np

from jaxgpt.checkpoint.info import Info
from jaxgpt.data import Data, PromptSplit
from jaxgpt.data.order import shuffled
from jaxgpt.data.prompts import Prompt
from jaxgpt.lm import LM
from jaxgpt.ops.random import named_key
from jaxgpt.parallel.rows import row_spec
from jaxgpt.post.answers import reward_answers, sample
from jaxgpt.post.policy import VARIANTS, advantages
from jaxgpt.post.reward_names import Reward
from jaxgpt.post.rollout_batch import (
    DIFFERENCE,
    EQUAL_REWARDS,
    RolloutBatch,
    empty_rollout,
    rollout_batch,
    token_weights,
)
from jaxgpt.post.sampler_check import check_sampler, checked_answers, mean_difference, target_log_p
from jaxgpt.train.step import TrainState
from jaxgpt.trainer.feed import Feed
from jaxgpt.trainer.program import Program


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
        self.spec = row_spec(empty_rollout(program.config))
        self._log_p = partial(target_log_p, program)

    def at(self, steps: range, state: TrainState | None) -> Sequence[RolloutBatch]:
        """Return the batches of the steps of a call.

        Raises:
            UserError: if the reward fails, or the log probabilities of the sampler do not pass `check_sampler`.
        """
        assert state is not None
        config = self.program.config
        epochs = config.post.rollout_epochs
        index = steps.start // len(steps)
        rollout = self._with_log_p(self._sampled(index, state), state)

        batches = []
        for epoch in range(epochs):
            number = index * epochs + epoch
            order = shuffled(np.arange(self.rows), self.rows, config.train.seed, number, "rollout")
            batches += [batch_of(rollout, rows) for rows in np.split(order, len(steps) // epochs)]
        return batches

    def _sampled(self, index: int, state: TrainState) -> RolloutBatch:
        """Sample the answers of a rollout, and reward them."""
        config = self.program.config
        per_prompt = config.post.answers_per_prompt
        prompts = [prompt for prompt in self.prompts_of(index) for _ in range(per_prompt)]
        key = named_key(config.train.seed, "rollout", index)
        answers = sample(LM(config, self.program.weights(state.params), self.tokenizer), prompts, key)
        if self.reward is None:
            return rollout_batch(config, prompts, answers)

        rewards = reward_answers(self.reward, config, prompts, answers)
        reward_PG = rewards.total_B.reshape(-1, per_prompt)
        advantage_PG = advantages(reward_PG, VARIANTS[config.post.objective].advantage)
        has_spread_P = np.ptp(reward_PG, axis=1) > 0
        metrics = rewards.metrics | {EQUAL_REWARDS: np.repeat(~has_spread_P, per_prompt)}
        return rollout_batch(config, prompts, answers, advantage_PG.reshape(-1), metrics)

    def _with_log_p(self, sampled: RolloutBatch, state: TrainState) -> RolloutBatch:
        """Return a rollout with the log probabilities of the answers in training and, with a KL penalty, under the reference.

        The sampler must have computed the same probabilities as training, up to rounding. This is checked on the first answers
        (`checked_answers`), because checking all answers in float32 would take a quarter of the update. In bfloat16, the
        objective of rewards uses the log probabilities of training for all answers, so that the ratio is 1 in the first update.
        """
        config = self.program.config
        windows_BT3 = sampled["windows"]
        checked = slice(checked_answers(config))
        weights = self.program.weights(state.params)
        trained_BT = np.array(self.program.call(self._log_p, weights, windows_BT3[checked]))
        difference_BT = np.abs(sampled["log_p"][checked] - trained_BT)
        check_sampler(difference_BT, config.train.compute_dtype)

        log_p_BT = np.array(sampled["log_p"])
        log_p_BT[checked] = trained_BT
        difference = mean_difference(difference_BT, windows_BT3[checked])
        metrics = {**sampled["metrics"], DIFFERENCE: np.full(self.rows, difference, np.float32)}
        rollout: RolloutBatch = {**sampled, "log_p": log_p_BT, "metrics": metrics}
        if config.post.kl:
            reference_BT = self.program.call(self._log_p, self.program.reference, windows_BT3)
            rollout["reference_log_p"] = np.array(reference_BT)
        return rollout

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


def batch_of(rollout: RolloutBatch, rows: np.ndarray) -> RolloutBatch:
    """Return rows of a rollout as a batch, with their weight in a mean over the tokens of the batch."""
    batch: RolloutBatch = jax.tree.map(lambda x: x[rows], rollout)
    return {**batch, "weight": token_weights(batch)}
