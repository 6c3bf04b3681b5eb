"""The work of a step: objective, batches and frozen weights, and the answers that the model generates for them."""

from __future__ import annotations

from collections.abc import Callable
from dataclasses import replace
from typing import Any, NamedTuple

from jaxgpt.config import Config, ModelConfig
from jaxgpt.model import GPT
from jaxgpt.plan.one_device import model_of_one_device
from jaxgpt.train.adapters import FrozenParts
from jaxgpt.train.loss import Objective


class Answers(NamedTuple):
    """The answers of a rollout, over all devices."""

    rows: int  # number of answers
    tokens: int  # maximum number of tokens of an answer
    steps: int  # optimizer steps of a rollout
    checked: int  # number of answers with probabilities computed as in training, to check the sampler


class Work(NamedTuple):
    """The objective and rows of a step; by default, the next token of windows.

    Plans are cached by the value of these fields, or by the identity of functions.

    Attributes:
        objective_of: function from the model and `frozen_model` to the objective; None: the next token.
        rows: function that returns a batch with zero rows, for its shapes and dtypes (`parallel.rows.row_spec`); None: windows.
        windows: number of windows in a row.
        frozen: whether the objective reads a frozen copy of the weights, or weights of `frozen_model`.
        frozen_model: architecture of the frozen weights, such as a teacher's; None: the architecture of the model.
        answers: the answers that the model generates for a batch; None: no answers.
    """

    objective_of: Callable[[GPT, ModelConfig | None], Objective] | None = None
    rows: Callable[[], Any] | None = None
    windows: int = 1
    frozen: bool = False
    frozen_model: ModelConfig | None = None
    answers: Answers | None = None

    def for_model(self) -> Callable[[GPT], Objective] | None:
        """Return the argument `objective_of` of `make_program`; None: the next token."""
        objective_of = self.objective_of
        if objective_of is None:
            return None
        return lambda model: objective_of(model, self.frozen_model)

    def any_frozen(self, config: Config) -> Any:
        """Return the argument `frozen` of `make_program`; None: nothing is frozen, or only the base of adapters."""
        if not self.frozen:
            return None
        return FrozenParts(None, unread_weights) if config.lora.rank else unread_weights

    def on_one_device(self, config: Config) -> Work:
        """Return the work of one device, with its share of `frozen_model`; see `one_device`."""
        if self.frozen_model is None:
            return self
        return self._replace(frozen_model=model_of_one_device(self.frozen_model, config.mesh))

    def with_frozen_layers(self, layers: int) -> Work:
        """Return the work with a different number of layers of `frozen_model`, if there is one."""
        if self.frozen_model is None:
            return self
        return self._replace(frozen_model=replace(self.frozen_model, n_layer=layers))


def unread_weights(place: Any) -> None:
    """Stand in for a function that reads frozen weights: a program on absent devices needs only their shapes.

    If `frozen` is a function, `make_program` takes the shapes of the model's weights, and does not call the function.
    """


NEXT_TOKEN = Work()
