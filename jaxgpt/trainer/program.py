"""Program: the functions of a run on a mesh, such as initial state, train step and evaluation."""

from __future__ import annotations

from collections.abc import Callable, Mapping
from contextlib import AbstractContextManager
from dataclasses import dataclass, field
from pathlib import Path
from typing import Any

import jax
from jax.sharding import Mesh

from jaxgpt.checkpoint import store
from jaxgpt.checkpoint.placement import Place
from jaxgpt.config import Config
from jaxgpt.model import GPT
from jaxgpt.model.lora import merge
from jaxgpt.parallel.mesh import block_on_cpu_mesh
from jaxgpt.parallel.rows import rows_of
from jaxgpt.parallel.rules import replicated, use_mesh
from jaxgpt.train.adapters import base_of, of_objective
from jaxgpt.train.loss import RowSums
from jaxgpt.train.schedule import Hyperparameters
from jaxgpt.train.step import TrainState
from jaxgpt.trainer.jitted import Jitted
from jaxgpt.trainer.run_step import RunStep
from jaxgpt.trainer.states import (
    Abstract,
    Fresh,
    compute,
    copy_params,
    put_stacked,
    random_state,
    state_with_params,
)
from jaxgpt.trainer.step_batches import StepBatches


@dataclass(frozen=True, eq=False)
class Program:
    """The functions of a run on a mesh, made by `build`.

    `frozen` and optimizer hyperparameters are arguments of the compiled functions: new values need no compilation, and no
    array becomes a constant of a program. Functions are compiled at their first call.

    Attributes:
        config: settings of the run, with `model.vocab_size` set.
        mesh: the devices.
        place: the mesh, the complete sharding table and the model class, for reading weights from a checkpoint.
        model: the decoder, without weights.
        abstract: shapes and shardings of all arrays.
        fresh: function from a seed to random weights and the initial state.
        batches: shapes of the batches of a step, and their placement on the devices.
        pure_step: the train step as a pure function `(state, batch, hyperparameters, frozen) -> (state, metrics)`, with the
            objective and the optimizer.
        jitted: the jitted functions of `step`, `sums` and `to_checkpoint`.
        hyperparameters: optimizer hyperparameters that are arguments of the step, replicated over the devices.
        frozen: argument of the objective, on the devices; with adapters, their base, or `FrozenParts`. None: the devices are
            absent, and programs are only lowered.
        note: advice about mesh, kernels and settings for the user, or "".
        given: names of the parts that are given in Python, keyed by part; a resumed run must receive these parts again.
    """

    config: Config
    mesh: Mesh
    place: Place
    model: GPT
    abstract: Abstract
    fresh: Callable[[jax.typing.ArrayLike], Fresh]
    batches: StepBatches
    pure_step: RunStep
    jitted: Jitted
    hyperparameters: Hyperparameters
    frozen: Any = field(default=None, repr=False)
    note: str = ""
    given: Mapping[str, str] = field(default_factory=dict)

    # The jitted functions of `call`, which adds each function at its first call.
    _called: dict[Callable[[Any, Any], Any], jax.stages.Wrapped] = field(default_factory=dict, init=False, repr=False)

    # States.

    def init(self, params: Any = None, donate: bool = False) -> TrainState:
        """Make the initial state.

        Args:
            params: parameters with unstacked layers; None: random parameters.
            donate: use the arrays of `params` that are on the devices with their final sharding, without a copy. Do not use
                `params` afterwards: stacking the arrays, or the first step, deletes them.
        """
        config = self.config
        like = self.abstract.state
        if params is None:
            return random_state(self.mesh, self.fresh, config.train.seed, like)
        params = put_stacked(config, params, like.params, donate)
        if not donate:
            params = copy_params(self.mesh, params, like.params)
        return state_with_params(config, self.mesh, self.pure_step.optimizer, self.model, params, like)

    def restore(self, directory: Path, step: int) -> TrainState:
        """Restore a checkpoint's state; raise `UserError` if it cannot be read or does not match the config."""
        state = store.restore(directory, step, self.abstract.checkpoint)
        return put_stacked(self.config, state, self.abstract.state, donate=True)

    def to_checkpoint(self, state: TrainState) -> TrainState:
        """Return a state with unstacked layers: a copy with `train.scan_layers`, otherwise the state itself."""
        if not self.config.train.scan_layers:
            return state
        unstacked: TrainState = block_on_cpu_mesh(self.mesh, self.jitted.unstack(state))
        return unstacked

    # Weights.

    def put_params(self, params: Any) -> Any:
        """Put parameters with unstacked layers on their devices, as `params` of `sums`."""
        return put_stacked(self.config, params, self.abstract.state.params)

    def weights(self, params: Any) -> Any:
        """Return the weights of the model from the `params` or the EMA of a state, on their devices; merge adapters."""
        if not self.config.lora.rank:
            return params

        def merged(trees: tuple[Any, Any]) -> Any:
            base, adapters = trees
            return merge(base, adapters, self.config.lora.alpha)

        return compute(self.mesh, merged, (base_of(self.frozen), params), self.abstract.weights)

    @property
    def reference(self) -> Any:
        """The frozen arrays that the objective receives, such as the weights of its reference or teacher."""
        return of_objective(self.frozen)

    # Calls.

    def put(self, batch: Any) -> Any:
        """Put a batch on the devices for `step` or `sums`, sharded over rows, and padded; see `rows.put`."""
        return self.batches.put(batch)

    def step(self, state: TrainState, batch: Any) -> tuple[TrainState, dict[str, jax.Array]]:
        """Take one optimizer step on the result of `put`, or a step on each batch of `batches.put_for_call`.

        The given state is donated. Returns the next state, the metrics of `train_step` and, without a custom optimizer, `lr`.
        For `put_for_call` with K = `train.steps_per_call` > 1, metrics are `[K, ...]`, and zero beyond the last step.
        """
        return self._run(self.jitted.step_for(batch), state, batch, self.hyperparameters, self.frozen)

    def sums(self, params: Any, batch: Any) -> RowSums:
        """Compute the sums of the objective for each row, for the `params` or the EMA of a state.

        Dropout is off. The penalty, and sums `[B, ...]` with further axes, are omitted.
        """
        result: RowSums = self._run(self.jitted.sums, params, batch, self.frozen)
        return result

    def call(self, function: Callable[[Any, Any], Any], params: Any, batch: Any) -> Any:
        """Run `function(params, batch)` on the mesh, compiled, and return its results for the rows of the batch.

        Args:
            function: a pure function of arrays. Each result has the rows of the batch as its first axis. Compiled programs are
                cached by function: define the function once.
            params: any tree of arrays on the devices, such as the `params` of a state, `frozen`, or `weights(params)`.
            batch: a batch as for `put`; its padding is removed from the results.
        """
        if function not in self._called:
            self._called[function] = jax.jit(function, out_shardings=replicated(self.mesh))
        rows = rows_of(batch)
        results = self._run(self._called[function], params, self.put(batch))
        return jax.tree.map(lambda x: x[:rows], results)

    def lower(self, state: TrainState, batch: Any) -> jax.stages.Lowered:
        """Lower `step` for concrete or abstract arguments, to inspect or compile it."""
        # Abstract arguments have the shardings of a call: otherwise a call would not find the compiled program in
        # JAX's cache.
        place = replicated(self.mesh)
        hyperparameters = jax.tree.map(
            lambda x: jax.ShapeDtypeStruct((), x.dtype, sharding=place), self.hyperparameters
        )
        with self.on_mesh():
            return self.jitted.step_for(batch).lower(state, batch, hyperparameters, self.abstract.frozen)

    def on_mesh(self) -> AbstractContextManager[None]:
        """Return a context that sets the mesh, and maps the logical axes of layers to mesh axes."""
        return use_mesh(self.mesh, self.config.model, self.place.rules, length=self.config.window)

    def _run(self, function: Any, *args: Any) -> Any:
        """Call a jitted function on the mesh."""
        with self.on_mesh():
            return block_on_cpu_mesh(self.mesh, function(*args))
