"""The objective that `config.post` selects: a function from a model to its objective, and the shapes of its batches."""

from __future__ import annotations

from dataclasses import dataclass
from typing import Any

import numpy as np

from jaxgpt.config import Config, ModelConfig, PostConfig
from jaxgpt.data.batches import Windows
from jaxgpt.data.preferences import Preferences
from jaxgpt.data.tokens import Split
from jaxgpt.model import GPT
from jaxgpt.parallel.rows import row_spec
from jaxgpt.post.distill import distillation_objective
from jaxgpt.post.on_policy import on_policy_objective
from jaxgpt.post.policy import policy_objective
from jaxgpt.post.preference import preference_objective
from jaxgpt.post.referenced_pairs import without_log_p
from jaxgpt.post.rollout_batch import empty_rollout
from jaxgpt.train.loss import Objective
from jaxgpt.train.side_outputs import router_penalties


@dataclass(frozen=True)
class ObjectiveOf:
    """A function from a model to the objective of some settings; it compares by value, so that plans can be cached."""

    post: PostConfig
    chunk: int  # as `train.loss_chunk`
    teacher: ModelConfig | None = None  # architecture of the teacher of distillation
    penalties: tuple[tuple[str, float], ...] | None = None  # penalties of the routers; None: no experts

    def __call__(self, model: GPT) -> Objective:
        """Make the objective."""
        penalties = None if self.penalties is None else dict(self.penalties)
        if self.post.is_distillation:
            assert self.teacher is not None
            teacher = type(model)(self.teacher, model.ops)
            objective = distillation_objective(model.apply, teacher.apply, self.post, self.chunk, penalties)
            return on_policy_objective(objective) if self.post.is_rollout else objective
        make = policy_objective if self.post.is_rollout else preference_objective
        return make(model.apply, self.post, self.chunk, penalties=penalties)


def objective_of(config: Config, teacher: ModelConfig | None = None) -> ObjectiveOf:
    """Return the objective of `config.post`; models with experts also minimize the penalties of their routers."""
    penalties = tuple(router_penalties(config).items()) if config.model.n_experts else None
    return ObjectiveOf(config.post, config.train.loss_chunk, teacher, penalties)


def batch_rows(config: Config) -> Any:
    """Return the `parallel.rows.row_spec` of the batches of a config's objective."""
    if config.post.is_rollout:
        return row_spec(empty_rollout(config))
    pairs: Split = Preferences(())
    if config.computes_reference_once:
        pairs = without_log_p(pairs)
    return row_spec(Windows(pairs, np.zeros(0, np.int64), config.window))
