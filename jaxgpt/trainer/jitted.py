"""The jitted functions of a run, with the shardings of their results."""

from __future__ import annotations

from functools import partial
from typing import Any, NamedTuple

import jax

from jaxgpt.model.scan import unstack_layers
from jaxgpt.parallel.compile_options import step_compile_options
from jaxgpt.parallel.rules import replicated
from jaxgpt.train.schedule import Hyperparameters
from jaxgpt.train.step import TrainState
from jaxgpt.trainer.run_step import RunStep, take_steps
from jaxgpt.trainer.states import shardings_of
from jaxgpt.trainer.step_batches import Several


class Jitted(NamedTuple):
    """The jitted functions of a run; each is traced and compiled at its first call.

    Attributes:
        step: `(state, batch, hyperparameters, frozen) -> (state, metrics)`; the state is donated.
        several_steps: the same for the batches of `Several`; metrics are `[K, ...]`.
        sums: `(params, batch, frozen) -> RowSums`, without the penalty, and with only those other sums that are `[B]`.
        unstack: `(state) -> state`, from stacked layers to the unstacked layers of a checkpoint.
    """

    step: jax.stages.Wrapped
    several_steps: jax.stages.Wrapped
    sums: jax.stages.Wrapped
    unstack: jax.stages.Wrapped

    def step_for(self, batch: Any) -> jax.stages.Wrapped:
        """Return the step for one batch or for `Several`."""
        return self.several_steps if isinstance(batch, Several) else self.step


def jit_functions(step: RunStep) -> Jitted:
    """Jit the pure step of a run, the evaluation with its objective, and the unstacking of its state."""

    def train(state: TrainState, batch: Any, hyperparameters: Hyperparameters, frozen: Any) -> Any:
        return step(state, batch, hyperparameters, frozen)

    def train_several(state: TrainState, several: Several, hyperparameters: Hyperparameters, frozen: Any) -> Any:
        return take_steps(state, several, partial(step, hyperparameters=hyperparameters, frozen=frozen))

    def evaluate(params: Any, batch: Any, frozen: Any) -> Any:
        sums = step.objective(params, batch, None, frozen)
        # Sums `[B, ...]` with further axes, such as the loads of experts, are metrics of training only.
        values = {name: each for name, each in sums.others.items() if each.ndim == 1}
        return sums._replace(penalty_B=None, others=values)

    def unstack(state: TrainState) -> TrainState:
        return unstack_layers(state, step.config.model.n_layer)

    everywhere = replicated(step.mesh)
    jit_step = partial(
        jax.jit,
        out_shardings=(shardings_of(step.abstract.state), everywhere),
        donate_argnums=0,
        compiler_options=step_compile_options(step.mesh),
    )
    return Jitted(
        step=jit_step(train),
        several_steps=jit_step(train_several),
        sums=jax.jit(evaluate, out_shardings=everywhere),
        unstack=jax.jit(unstack, out_shardings=shardings_of(step.abstract.checkpoint)),
    )
