"""The objective of a run for a plan: its function, the shapes of its batches, its answers."""

from __future__ import annotations

from dataclasses import dataclass, replace
from typing import Any

from jaxgpt.config import Config, PostConfig
from jaxgpt.errors import UserError
from jaxgpt.plan.residuals import NEXT_TOKEN, Answers, Work
from jaxgpt.post.reference import is_once
from jaxgpt.post.start import batch_rows, objective_of


@dataclass(frozen=True)
class Rows:
    """Function that returns a batch without rows; it compares by value, so that plans can be cached."""

    config: Config

    def __call__(self) -> Any:
        """Return the batch."""
        return batch_rows(self.config)


def work_of(config: Config) -> tuple[Config, Work]:
    """Return the config of a plan, and the objective of its steps.

    The config has no objective and takes one step per call, because a plan changes the number of rows, which the checks of an
    objective could reject. With adapters, the reference is their frozen base, a part of every program.
    """
    post = config.post
    if post.objective == "next-token":
        return config, NEXT_TOKEN
    if post.objective == "distill":
        raise UserError(
            "jaxgpt plan does not support post.objective distill: omit it, to plan the training of the student alone"
        )
    answers = None
    if post.is_rollout:
        is_float32 = config.train.compute_dtype == "float32"
        answers = Answers(
            rows=config.rollout_answers,
            tokens=post.max_new_tokens,
            steps=config.train.steps_per_call,
            checked=post.group if is_float32 else config.rollout_answers,
        )
    work = Work(
        objective_of=objective_of(config),
        rows=Rows(config),
        windows=config.row_tokens // config.window,
        frozen=post.has_reference and not config.lora.rank and not is_once(config),
        answers=answers,
    )
    train = replace(config.train, steps_per_call=1)
    return replace(config, post=PostConfig(), train=train), work
