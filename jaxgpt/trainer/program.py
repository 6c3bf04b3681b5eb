"""Program: the functions of a run on a mesh, such as initial state, train step and evaluation."""

from __future__ import annotations

import math
from collections.abc import Callable, Mapping, Sequence
from contextlib import AbstractContextManager
from dataclasses import dataclass, field
from functools import partial
from pathlib import Path
from typing import Any, NamedTuple

import flax.linen as nn
import jax
import jax.numpy as jnp
import numpy as np
import optax
from jax.sharding import AbstractMesh, Mesh

from jaxgpt.checkpoint import store
from jaxgpt.checkpoint.placement import Place
from jaxgpt.config import Config
from jaxgpt.data_files import has_documents
from jaxgpt.errors import UserError
from jaxgpt.model import GPT
from jaxgpt.model.lora import merge
from jaxgpt.model.scan import unstack_layers
from jaxgpt.ops import Ops
from jaxgpt.parallel.host import step_compile_options
from jaxgpt.parallel.mesh import block_on_cpu_mesh
from jaxgpt.parallel.rows import Microbatches, batch_sharding, batch_ways, microbatches, put, put_batches, rows_of
from jaxgpt.parallel.rules import Rules, replicated, use_mesh
from jaxgpt.parallel.sums import sums_by_device
from jaxgpt.train.adapters import base_of, of_objective
from jaxgpt.train.loss import Objective, RowSums
from jaxgpt.train.optimizer import Hyperparameters, hyperparameters_of, make_optimizer, schedule, schedule_states
from jaxgpt.train.step import TrainState, apply_gradients, check_names, dropout_key, gradient_sums, mean_gradients
from jaxgpt.trainer.metrics import HOST_METRICS
from jaxgpt.trainer.states import Abstract, Fresh, compute, first_state, put_stacked, shardings_of, stacked

# A step without other arguments: a function from a state and a batch to the next state and the metrics.
Step = Callable[[TrainState, Any], tuple[TrainState, dict[str, jax.Array]]]


class Several(NamedTuple):
    """Batches for one call of up to K steps, as a tree with leaves `[K, rows, ...]`; the call uses the first n batches."""

    batches: Any
    n: Any


@dataclass(eq=False)
class Program:
    """The functions of a run on a mesh; `build` makes one. No method changes its fields.

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
        """Make the jitted functions; tracing and compilation happen at the first call."""
        everywhere = replicated(self.mesh)

        def train(state: TrainState, batch: Any, hyperparameters: Hyperparameters, frozen: Any) -> Any:
            step = partial(self.pure_step, hyperparameters=hyperparameters, frozen=frozen)
            return train_steps(state, batch, step) if isinstance(batch, Several) else step(state, batch)

        def evaluate(params: Any, batch: Any, frozen: Any) -> Any:
            sums = self.objective(params, batch, None, frozen)
            # Arrays of each row, such as the loads of experts, are metrics of training only.
            values = {name: each for name, each in sums.others.items() if each.ndim == 1}
            return sums._replace(penalty_B=None, others=values)

        def unstack(state: TrainState) -> TrainState:
            return unstack_layers(state, self.config.model.n_layer)

        shardings = shardings_of(self.abstract.state), everywhere
        options = step_compile_options(self.mesh)
        self.jitted_step = jax.jit(train, out_shardings=shardings, donate_argnums=0, compiler_options=options)
        self.jitted_eval = jax.jit(evaluate, out_shardings=everywhere)
        self._unstack = jax.jit(unstack, out_shardings=shardings_of(self.abstract.checkpoint))
        self._called: dict[Any, jax.stages.Wrapped] = {}  # the jitted functions of `call`

    # Batches.

    @property
    def microbatches(self) -> Microbatches:
        """Number of microbatches of a step, and rows per microbatch."""
        return microbatches(self.config.train, batch_ways(self.mesh))

    @property
    def rows_per_step(self) -> int:
        """Number of rows of a step on the devices, including padding."""
        return math.prod(self.microbatches)

    def padded_rows(self, rows: int) -> int:
        """Return the number of rows after padding: `train.batch_size` rows are padded for `step`, other numbers for `call`."""
        if rows == self.config.train.batch_size:
            return self.rows_per_step
        ways = batch_ways(self.mesh)
        return math.ceil(rows / ways) * ways

    def put(self, batch: Any) -> Any:
        """Put a batch on the devices, sharded over rows, and padded to `padded_rows` rows; see `rows.put`."""
        return put(self.mesh, batch, self.padded_rows(rows_of(batch)))

    def put_batches(self, batches: Sequence[Any]) -> Any:
        """Put 1 to `train.steps_per_call` batches on the devices, for one call of `step`."""
        train = self.config.train
        most = train.steps_per_call
        if not 0 < len(batches) <= most:
            raise UserError(f"expected 1 to {most} batches per call (train.steps_per_call), not {len(batches)}")
        if most == 1:
            return self.put(batches[0])
        return Several(put_batches(self.mesh, batches, self.rows_per_step, most), len(batches))

    def batch(self, steps: int = 1, spec: Any = None) -> Any:
        """Return an abstract, padded batch of a step; for K > 1 steps, `Several` with leaves `[K, rows, ...]`.

        Args:
            steps: number of batches.
            spec: shapes and dtypes of the rows, from `rows.row_spec`; None: windows, `[T + 1]` or with document ids `[T, 3]`
                (see `train.loss.split_windows`).
        """
        if spec is None:
            T = self.config.window
            spec = np.zeros((0, T, 3) if has_documents(self.config) else (0, T + 1), np.int32)
        shape = (self.rows_per_step,) if steps == 1 else (steps, self.rows_per_step)
        sharding = batch_sharding(self.mesh, several=steps > 1)

        def leaf(x: Any) -> jax.ShapeDtypeStruct:
            return jax.ShapeDtypeStruct((*shape, *x.shape[1:]), x.dtype, sharding=sharding)

        batches = jax.tree.map(leaf, spec)
        return batches if steps == 1 else Several(batches, steps)

    # States.

    @property
    def abstract_state(self) -> TrainState:
        """Shapes, dtypes and shardings of the state."""
        return self.abstract.state

    @property
    def abstract_frozen(self) -> Any:
        """Shapes, dtypes and shardings of `frozen`."""
        return self.abstract.frozen

    @property
    def abstract_weights(self) -> Any:
        """Shapes, dtypes and shardings of the model's weights."""
        return self.abstract.weights

    @property
    def place(self) -> Place:
        """The mesh, sharding table and model class for reading weights from a checkpoint."""
        is_given = "model" in self.given
        return Place(self.mesh, self.rules, GPT if is_given else None)

    def init(self, params: Any = None, donate: bool = False) -> TrainState:
        """Make the initial state.

        Args:
            params: parameters with unstacked layers; None: random parameters.
            donate: use the arrays of `params` in the state; the first step, or stacking, deletes them. False: copy them.
        """
        like = self.abstract.state
        if params is None:
            seed = self.config.train.seed
            return compute(self.mesh, lambda seed: nn.unbox(self.fresh(seed).state), seed, like)

        def others(params: Any) -> TrainState:
            if self.config.train.scan_layers:
                params = unstack_layers(params, self.config.model.n_layer)
            state = first_state(self.config, self.optimizer, self.model, params)
            state = nn.unbox(stacked(self.config, state))
            return state._replace(params=())

        # `others` does not return the parameters, because XLA would copy an argument that is returned.
        params = put_stacked(self.config, params, like.params, donate)
        if not donate:
            params = compute(self.mesh, lambda params: params, params, like.params)
        return compute(self.mesh, others, params, like._replace(params=()))._replace(params=params)

    def restore(self, directory: Path, step: int) -> TrainState:
        """Restore a checkpoint's state; raise `UserError` if it cannot be read or does not match the config."""
        state = store.restore(directory, step, self.abstract.checkpoint)
        return put_stacked(self.config, state, self.abstract.state, donate=True)

    def to_checkpoint(self, state: TrainState) -> TrainState:
        """Return a state with unstacked layers: a copy with `train.scan_layers`, otherwise the state itself."""
        return block_on_cpu_mesh(self.mesh, self._unstack(state)) if self.config.train.scan_layers else state

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
        For several steps, metrics are `[K, ...]`, and zero beyond the last step.
        """
        return self._run(self.jitted_step, state, batch, self.hyperparameters, self.frozen)

    def eval(self, params: Any, batch: Any) -> tuple[jax.Array, jax.Array]:
        """Compute the summed loss and the number of tokens of each row, for `params` or an EMA."""
        sums = self.sums(params, batch)
        return sums.loss_B, sums.count_B

    def sums(self, params: Any, batch: Any) -> RowSums:
        """Compute the sums of the objective for each row, for `params` or an EMA.

        Dropout is off. The penalty, and sums `[B, ...]` with further axes, are omitted.
        """
        result: RowSums = self._run(self.jitted_eval, params, batch, self.frozen)
        return result

    def call(self, function: Callable[[Any, Any], Any], params: Any, batch: Any) -> Any:
        """Run `function(params, batch)` on the mesh, compiled, and return its results for the rows of the batch.

        Args:
            function: a pure function of arrays. Each result has the rows of the batch as its first axis. Compiled programs are
                cached by function: define it once.
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
            return self.jitted_step.lower(state, batch, hyperparameters, self.abstract.frozen)

    def pure_step(
        self, state: TrainState, batch: Any, hyperparameters: Hyperparameters | None = None, frozen: Any = ()
    ) -> tuple[TrainState, dict[str, jax.Array]]:
        """Take one `train_step` with the settings of the config; by default, `hyperparameters` also come from the config."""
        config = self.config
        hyperparameters = hyperparameters or host_hyperparameters(config)

        # Sums over rows; on CPUs with replicated weights, each device adds its own rows first.
        key = dropout_key(state, config.train.seed if config.model.dropout else None)
        add = sums_by_device if self._sums_by_device() else gradient_sums
        accumulation = self.microbatches.accumulation
        grads, sums = add(state.params, batch, key, frozen, objective=self.objective, accumulation=accumulation)
        check_names(sums.others, HOST_METRICS)
        metrics, grads = mean_gradients(grads, sums)

        # The learning rate of this update, at the optimizer's count, which skipped updates do not advance.
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

    def on_mesh(self) -> AbstractContextManager[None]:
        """Return a context that sets the mesh, and maps the logical axes of layers to mesh axes."""
        return use_mesh(self.mesh, self.config.model, self.rules, length=self.config.window)

    def _run(self, function: Any, *args: Any) -> Any:
        """Call a jitted function on the mesh."""
        with self.on_mesh():
            return block_on_cpu_mesh(self.mesh, function(*args))

    def _sums_by_device(self) -> bool:
        """Return whether to use `sums_by_device`: several CPU devices with replicated weights, and no dropout."""
        mesh = self.mesh
        is_on_cpus = not isinstance(mesh, AbstractMesh) and mesh.devices.flat[0].platform == "cpu"
        if not is_on_cpus or self.config.model.dropout:
            return False
        has_only_data = mesh.size > 1 and mesh.shape["data"] == mesh.size
        weights = self.abstract.state.params, self.abstract.frozen
        return has_only_data and all(each.is_fully_replicated for each in jax.tree.leaves(shardings_of(weights)))


def train_steps(state: TrainState, several: Several, step: Step) -> tuple[TrainState, dict[str, jax.Array]]:
    """Take the n steps of `several` in a loop compiled once for any n; metrics are zero beyond n."""

    def batch(i: int | jax.Array) -> Any:
        return jax.tree.map(lambda x: x[i], several.batches)

    K = len(jax.tree.leaves(several.batches)[0])
    _, shapes = jax.eval_shape(step, state, batch(0))
    zeros = jax.tree.map(lambda x: jnp.zeros((K, *x.shape), x.dtype), shapes)

    def one(i: jax.Array, carry: tuple[TrainState, Any]) -> tuple[TrainState, Any]:
        state, rows = carry
        state, metrics = step(state, batch(i))
        return state, jax.tree.map(lambda row, x: row.at[i].set(x), rows, metrics)

    result: tuple[TrainState, Any] = jax.lax.fori_loop(0, several.n, one, (state, zeros))
    return result


def host_hyperparameters(config: Config) -> Hyperparameters:
    """Return the optimizer hyperparameters that are arguments of the step, such as the learning rate, float32."""
    return jax.tree.map(np.float32, hyperparameters_of(config.optim))
