"""The work of a step: objective, batches and frozen weights, and the answers that the model generates for them."""

from __future__ import annotations

from collections.abc import Callable
from dataclasses import replace
from functools import partial
from typing import Any, NamedTuple

import jax

from jaxgpt.config import Config, ModelConfig
from jaxgpt.model import GPT
from jaxgpt.model.init import boxed_params
from jaxgpt.parallel.rules import RULES, Rules
from jaxgpt.plan.one_device import model_of_one_device
from jaxgpt.train.adapters import FrozenParts
from jaxgpt.train.loss import Objective
from jaxgpt.trainer.build import make_program
from jaxgpt.trainer.given import ProgramParts
from jaxgpt.trainer.program import Program


class Answers(NamedTuple):
    """The answers of a rollout, over all devices."""

    rows: int  # number of answers
    tokens: int  # maximum number of tokens of an answer
    steps: int  # optimizer steps of a rollout
    checked: int  # number of answers with probabilities computed as in training, to check the sampler


class Work(NamedTuple):
    """The objective and rows of a step; by default, the next-token loss of windows.

    Plans are cached by the value of these fields, or by the identity of functions.

    Attributes:
        objective_of: function from the model and `teacher` to the objective; None: the next-token loss.
        rows: function that returns a batch with zero rows, for its shapes and dtypes (`parallel.rows.row_spec`); None: windows.
        windows: number of windows in a row.
        reference: whether the objective reads a frozen copy of the model's weights.
        teacher: architecture of the frozen weights of a teacher that the objective reads; None: no teacher.
        answers: the answers that the model generates for a batch; None: no answers.
    """

    objective_of: Callable[[GPT, ModelConfig | None], Objective] | None = None
    rows: Callable[[], Any] | None = None
    windows: int = 1
    reference: bool = False
    teacher: ModelConfig | None = None
    answers: Answers | None = None

    def frozen_model(self, config: Config) -> ModelConfig | None:
        """Return the architecture of the frozen weights that the objective reads; None: no such weights."""
        return config.model if self.reference else self.teacher

    def program(
        self,
        config: Config,
        mesh: Any,
        parts: ProgramParts = ProgramParts(),  # noqa: B008  # immutable
        rules: Rules = RULES,
    ) -> Program:
        """Make the program of a step on absent devices, with shapes instead of frozen arrays.

        Args:
            config: settings of the step.
            mesh: the absent devices: a `Mesh` or, for estimates, an `AbstractMesh`.
            parts: parts given in Python; an objective of the work replaces an objective in `parts`.
            rules: the complete sharding table.
        """
        parts = parts._replace(frozen=self._frozen_shapes(config, parts.model))
        objective_of = self.objective_of
        if objective_of is not None:
            parts = parts._replace(objective_of=lambda decoder: objective_of(decoder, self.teacher))
        return make_program(config, mesh, parts, rules)

    def _frozen_shapes(self, config: Config, model: GPT | None) -> Any:
        """Return the argument `frozen` of `make_program`; None: nothing is frozen, or only the base of adapters."""
        architecture = self.frozen_model(config)
        if architecture is None:
            return None
        decoder = GPT(architecture)
        if self.reference and model is not None:
            decoder = model
        shapes = jax.eval_shape(partial(boxed_params, decoder, 0))
        return FrozenParts(base=None, of_objective=shapes) if config.lora.rank else shapes

    def on_one_device(self, config: Config) -> Work:
        """Return the work of one device, with its share of the teacher; see `one_device`."""
        if self.teacher is None:
            return self
        return self._replace(teacher=model_of_one_device(self.teacher, config.mesh))

    def with_teacher_layers(self, layers: int) -> Work:
        """Return the work with a different number of layers of the teacher, if there is one."""
        if self.teacher is None:
            return self
        return self._replace(teacher=replace(self.teacher, n_layer=layers))


NEXT_TOKEN = Work()
