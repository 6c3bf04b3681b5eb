"""Program: the functions of a run on a mesh, such as initial state, train step and evaluation."""

from __future__ import annotations

from collections.abc import Callable, Mapping, Sequence
from contextlib import AbstractContextManager
from dataclasses import dataclass, field
from pathlib import Path
from typing import Any

import jax
import optax
from jax.sharding import Mesh

from jaxgpt.checkpoint import store
from jaxgpt.checkpoint.placement import Place
from jaxgpt.config import Config
from jaxgpt.model import GPT
from jaxgpt.model.lora import merge
from jaxgpt.ops import Ops
from jaxgpt.parallel.mesh import block_on_cpu_mesh
from jaxgpt.parallel.rows import Microbatches, rows_of
from jaxgpt.parallel.rules import Rules, replicated, use_mesh
from jaxgpt.train.adapters import base_of, of_objective
from jaxgpt.train.loss import Objective, RowSums
from jaxgpt.train.schedule import Hyperparameters
from jaxgpt.train.step import TrainState
from jaxgpt.trainer.jitted import jit_functions
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


@dataclass(eq=False)
class Program:
    """The functions of a run on a mesh, made by `build`. No method changes the fields of a program.

    `frozen` and optimizer hyperparameters are arguments of the compiled functions: new values need no compilation, and no
    array becomes a constant of a program. Functions are compiled at their first call.

    Attributes:
        config: settings of the run, with `model.vocab_size` set.
        mesh: the devices.
        rules: the complete sharding table.
        ops: operations of the decoder.
        model: the decoder, without weights.
        objective: objective of training and evaluation, `(params, batch, key, frozen) -> RowSums`; it merges adapters.
        optimizer: as in `build`; None: from the config.
        abstract: shapes and shardings of all arrays.
        fresh: function from a seed to random weights and the initial state.
        hyperparameters: optimizer hyperparameters that are arguments of the step, replicated over the devices.
        frozen: argument of the objective, on the devices; with adapters, their base, or `FrozenParts`. None: the devices are
            absent, and programs are only lowered.
        note: advice about mesh, kernels and settings for the user, or "".
        given: names of the parts that are given in Python, keyed by part; a resumed run must receive these parts again.
        pure_step: the train step as a pure function `(state, batch, hyperparameters, frozen) -> (state, metrics)`.
        jitted: the jitted functions of `step`, `sums` and `to_checkpoint`.
    """

    config: Config
    mesh: Mesh
    rules: Rules
    ops: Ops
    model: GPT
    objective: Objective
    optimizer: optax.GradientTransformation | None
    abstract: Abstract
    fresh: Callable[[jax.typing.ArrayLike], Fresh]
    hyperparameters: Hyperparameters
    frozen: Any = field(default=None, repr=False)
    note: str = ""
    given: Mapping[str, str] = field(default_factory=dict)

    def __post_init__(self) -> None:
        """Make the step and the jitted functions."""
        self._batches = StepBatches(self.config, self.mesh)
        self.pure_step = RunStep(
            config=self.config,
            mesh=self.mesh,
            model=self.model,
            objective=self.objective,
            optimizer=self.optimizer,
            abstract=self.abstract,
            accumulation=self.microbatches.accumulation,
        )
        self.jitted = jit_functions(self.pure_step)
        self._called: dict[Any, jax.stages.Wrapped] = {}  # the jitted functions of `call`

    # Batches.

    @property
    def microbatches(self) -> Microbatches:
        """Number of microbatches of a step, and rows per microbatch."""
        return self._batches.microbatches

    def put(self, batch: Any) -> Any:
        """Put a batch on the devices, sharded over rows, and padded for `step` or `eval`; see `rows.put`."""
        return self._batches.put(batch)

    def put_batches(self, batches: Sequence[Any]) -> Any:
        """Put 1 to `train.steps_per_call` batches on the devices, for one call of `step`."""
        return self._batches.put_for_call(batches)

    def batch(self, steps: int = 1, spec: Any = None) -> Any:
        """Return an abstract, padded batch of a step; for K = `steps` > 1, `Several` with leaves `[K, rows, ...]`.

        Args:
            steps: number of batches.
            spec: shapes and dtypes of the rows, from `rows.row_spec`; None: windows, `[T + 1]` or with document ids `[T, 3]`
                (see `train.loss.split_windows`).
        """
        return self._batches.abstract(steps, spec)

    # States.

    @property
    def place(self) -> Place:
        """The mesh, sharding table and model class for reading weights from a checkpoint."""
        is_given = "model" in self.given
        return Place(self.mesh, self.rules, GPT if is_given else None)

    def init(self, params: Any = None) -> TrainState:
        """Make the initial state, with a copy of `params`, which have unstacked layers; None: random parameters."""
        like = self.abstract.state
        if params is None:
            return random_state(self.mesh, self.fresh, self.config.train.seed, like)
        params = put_stacked(self.config, params, like.params)
        return self._with_params(copy_params(self.mesh, params, like.params))

    def init_donating(self, params: Any) -> TrainState:
        """Make the initial state with the arrays of `params`, which have unstacked layers.

        Arrays on the devices with their final sharding are not copied. Do not use `params` afterwards: stacking the arrays,
        or the first step, deletes them.
        """
        return self._with_params(put_stacked(self.config, params, self.abstract.state.params, donate=True))

    def _with_params(self, params: Any) -> TrainState:
        return state_with_params(self.config, self.mesh, self.optimizer, self.model, params, self.abstract.state)

    def restore(self, directory: Path, step: int) -> TrainState:
        """Restore a checkpoint's state; raise `UserError` if it cannot be read or does not match the config."""
        state = store.restore(directory, step, self.abstract.checkpoint)
        return put_stacked(self.config, state, self.abstract.state, donate=True)

    def to_checkpoint(self, state: TrainState) -> TrainState:
        """Return a state with unstacked layers: a copy with `train.scan_layers`, otherwise the state itself."""
        return block_on_cpu_mesh(self.mesh, self.jitted.unstack(state)) if self.config.train.scan_layers else state

    def put_params(self, params: Any) -> Any:
        """Put parameters with unstacked layers on their devices, for `eval`."""
        return put_stacked(self.config, params, self.abstract.state.params)

    def weights(self, params: Any) -> Any:
        """Return the weights of the model from the `params` or the EMA of a state, on their devices."""
        if not self.config.lora.rank:
            return params

        def merged(trees: tuple[Any, Any]) -> Any:
            frozen, adapters = trees
            return merge(frozen, adapters, self.config.lora.alpha)

        return compute(self.mesh, merged, (base_of(self.frozen), params), self.abstract.weights)

    @property
    def reference(self) -> Any:
        """The frozen arrays that the objective receives, such as the weights of its reference."""
        return of_objective(self.frozen)

    # Calls.

    def step(self, state: TrainState, batch: Any) -> tuple[TrainState, dict[str, jax.Array]]:
        """Take one optimizer step on the result of `put`, or a step on each batch of `put_batches`.

        The given state is donated. Returns the next state, the metrics of `train_step` and, without a custom optimizer, `lr`.
        For `put_batches` with K = `train.steps_per_call` > 1, metrics are `[K, ...]`, and zero beyond the last step.
        """
        return self._run(self.jitted.step_for(batch), state, batch, self.hyperparameters, self.frozen)

    def eval(self, params: Any, batch: Any) -> tuple[jax.Array, jax.Array]:
        """Compute the summed loss and the count of each row, as in `RowSums`, for `params` or an EMA."""
        sums = self.sums(params, batch)
        return sums.loss_B, sums.count_B

    def sums(self, params: Any, batch: Any) -> RowSums:
        """Compute the sums of the objective for each row, for `params` or an EMA.

        Dropout is off. The penalty, and sums `[B, ...]` with further axes, are omitted.
        """
        result: RowSums = self._run(self.jitted.eval, params, batch, self.frozen)
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
        return use_mesh(self.mesh, self.config.model, self.rules, length=self.config.window)

    def _run(self, function: Any, *args: Any) -> Any:
        """Call a jitted function on the mesh."""
        with self.on_mesh():
            return block_on_cpu_mesh(self.mesh, function(*args))
