"""The step of a run as a pure function: `train.step` with the settings of a config, and several steps in one call."""

from __future__ import annotations

from collections.abc import Callable
from dataclasses import dataclass
from typing import Any

import jax
import jax.numpy as jnp
import numpy as np
import optax
from jax.sharding import AbstractMesh, Mesh

from jaxgpt.config import Config
from jaxgpt.model import GPT
from jaxgpt.parallel.sums import sums_by_device
from jaxgpt.train.loss import Objective
from jaxgpt.train.optimizer import make_optimizer
from jaxgpt.train.schedule import Hyperparameters, hyperparameters_of, schedule, schedule_states
from jaxgpt.train.step import TrainState, apply_gradients, check_names, dropout_key, gradient_sums, mean_gradients
from jaxgpt.trainer.metrics import HOST_METRICS
from jaxgpt.trainer.states import Abstract, shardings_of
from jaxgpt.trainer.step_batches import Several

# A step without other arguments: a function from a state and a batch to the next state and the metrics.
Step = Callable[[TrainState, Any], tuple[TrainState, dict[str, jax.Array]]]


@dataclass(frozen=True, eq=False)
class RunStep:
    """The pure train step of a run. It is traced within `Program.on_mesh`.

    Attributes:
        config: settings of the run.
        mesh: mesh of the available devices, or of planned hardware.
        model: the decoder, without weights.
        objective: objective of training.
        optimizer: optax transformation; None: from the config.
        abstract: shapes and shardings of the arrays of the run.
        accumulation: number of microbatches of a step.
    """

    config: Config
    mesh: Mesh
    model: GPT
    objective: Objective
    optimizer: optax.GradientTransformation | None
    abstract: Abstract
    accumulation: int

    def __call__(
        self, state: TrainState, batch: Any, hyperparameters: Hyperparameters | None = None, frozen: Any = ()
    ) -> tuple[TrainState, dict[str, jax.Array]]:
        """Take one `train_step` with the settings of the config; by default, `hyperparameters` also come from the config."""
        config = self.config
        hyperparameters = hyperparameters or host_hyperparameters(config)

        # Sum over rows; on CPUs with replicated weights, each device adds its own rows first.
        key = dropout_key(state, config.train.seed if config.model.dropout else None)
        compute_sums = sums_by_device if self._can_sum_by_device() else gradient_sums
        grads, sums = compute_sums(
            state.params, batch, key, frozen, objective=self.objective, accumulation=self.accumulation
        )
        check_names(sums.others, HOST_METRICS)
        metrics, grads = mean_gradients(grads, sums)

        # Add the learning rate of this update, at the optimizer's count, which skipped updates do not advance.
        if self.optimizer is None:
            counted, *_ = schedule_states(state.opt_state)
            metrics |= {"lr": schedule(config, hyperparameters)(counted.count)}

        optimizer = self.optimizer or make_optimizer(config, hyperparameters, self.model)
        return apply_gradients(
            state,
            grads,
            metrics,
            optimizer=optimizer,
            ema_decay=config.optim.ema_decay,
            spike_factor=config.optim.spike_factor,
        )

    def _can_sum_by_device(self) -> bool:
        """Return whether the mesh has several CPU devices, all along data, replicated weights, and a model without dropout."""
        mesh = self.mesh
        is_on_cpus = not isinstance(mesh, AbstractMesh) and mesh.devices.flat[0].platform == "cpu"
        if not is_on_cpus or self.config.model.dropout:
            return False
        has_only_data = mesh.size > 1 and mesh.shape["data"] == mesh.size
        weights = self.abstract.state.params, self.abstract.frozen
        return has_only_data and all(each.is_fully_replicated for each in jax.tree.leaves(shardings_of(weights)))


def take_steps(state: TrainState, several: Several, step: Step) -> tuple[TrainState, dict[str, jax.Array]]:
    """Take the n steps of `several` in a loop compiled once for any n; metrics are `[K, ...]`, and zero beyond n."""

    def batch_at(i: int | jax.Array) -> Any:
        return jax.tree.map(lambda x: x[i], several.batches)

    K = len(jax.tree.leaves(several.batches)[0])
    _, shapes = jax.eval_shape(step, state, batch_at(0))
    zeros = jax.tree.map(lambda x: jnp.zeros((K, *x.shape), x.dtype), shapes)

    def take_step(i: jax.Array, carry: tuple[TrainState, Any]) -> tuple[TrainState, Any]:
        state, metrics_K = carry
        state, metrics = step(state, batch_at(i))
        return state, jax.tree.map(lambda x_K, x: x_K.at[i].set(x), metrics_K, metrics)

    after: tuple[TrainState, Any] = jax.lax.fori_loop(0, several.n, take_step, (state, zeros))
    return after


def host_hyperparameters(config: Config) -> Hyperparameters:
    """Return the optimizer hyperparameters that are arguments of the step, such as the learning rate, float32."""
    return jax.tree.map(np.float32, hyperparameters_of(config.optim))
