"""The work of a run's objective, for a plan: its function, the shapes of its batches, its teacher and its answers."""

from __future__ import annotations

from dataclasses import dataclass, replace
from typing import Any

from jaxgpt.checkpoint.paths import parse_checkpoint
from jaxgpt.checkpoint.run import Run, open_run
from jaxgpt.config import Config, ModelConfig, PostConfig
from jaxgpt.errors import UserError
from jaxgpt.model import GPT
from jaxgpt.plan.shapes import SHAPES, shape_config
from jaxgpt.plan.work import NEXT_TOKEN, Answers, Work
from jaxgpt.post.frozen_reference import check_reference
from jaxgpt.post.objective import batch_rows, objective_of
from jaxgpt.post.sampler_check import checked_answers
from jaxgpt.presets import PRESETS
from jaxgpt.train.loss import Objective


@dataclass(frozen=True)
class PlannedObjective:
    """Function from a model and its teacher to the objective of a config; it compares by value, so that plans can be cached."""

    config: Config

    def __call__(self, model: GPT, teacher: ModelConfig | None) -> Objective:
        """Make the objective; `teacher`: architecture of the teacher of distillation."""
        return objective_of(self.config, teacher)(model)


@dataclass(frozen=True)
class Rows:
    """Function that returns a batch without rows; it compares by value, so that plans can be cached."""

    config: Config

    def __call__(self) -> Any:
        """Return the batch."""
        return batch_rows(self.config)


def work_of(config: Config) -> tuple[Config, Work]:
    """Return the config of a plan, and the work of its steps.

    Except for the objective next-token, the returned config has the default `post` settings and one step per call, because a
    plan changes the number of rows, which the checks of an objective could reject. With adapters, their frozen base is a part
    of every program, and it is the reference of preferences and rewards.

    Raises:
        UserError: if the architecture of a teacher is unknown, or does not fit the run.
    """
    post = config.post
    if post.objective == "next-token":
        return config, NEXT_TOKEN

    has_copy = post.has_reference and not post.is_distillation  # a teacher has its own argument
    if config.lora.rank or config.computes_reference_once:
        has_copy = False  # the reference is the base of the adapters, or is computed before the first step

    work = Work(
        objective_of=PlannedObjective(config),
        rows=Rows(config) if post.is_rollout or post.is_preference else None,
        windows=config.row_tokens // config.window,
        reference=has_copy,
        teacher=teacher_of(config) if post.is_distillation else None,
        answers=_answers(config) if post.is_rollout else None,
    )
    train = replace(config.train, steps_per_call=1)
    return replace(config, post=PostConfig(), train=train), work


def _answers(config: Config) -> Answers:
    """Return the answers of a rollout of a run."""
    return Answers(
        rows=config.rollout_answers,
        tokens=config.post.max_new_tokens,
        steps=config.train.steps_per_call,
        checked=checked_answers(config),
    )


def teacher_of(config: Config) -> ModelConfig:
    """Return the architecture of the teacher of a plan, `post.reference`: a run, a preset or a published architecture.

    Raises:
        UserError: if the teacher is unknown, has a different vocabulary, or has a shorter context than the run.
    """
    name = config.post.reference
    path, _ = parse_checkpoint(name)
    size = config.model.vocab_size
    if Run(path).exists():
        model = open_run(path).config().model
    elif name in SHAPES:
        model = shape_config(name).model
    elif name in PRESETS:
        model = PRESETS[name].config.model
    else:
        raise UserError(f"post.reference {name} is not a run, preset or published architecture: set it to the teacher")
    # The vocabulary of a preset is determined by its data.
    model = replace(model, vocab_size=model.vocab_size or size)
    if model.vocab_size != size:
        raise UserError(
            f"post.reference {name} has a vocabulary of {model.vocab_size:,}, but the student has {size:,}: add "
            f"--model.vocab-size {model.vocab_size}"
        )
    check_reference(config, model)
    return model
