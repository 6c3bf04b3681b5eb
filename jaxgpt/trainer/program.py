"""Program: the functions of a run on a mesh: initial state, train step, evaluation, and calls of any function."""

from __future__ import annotations

import math
from collections.abc import Callable, Mapping, Sequence
from contextlib import AbstractContextManager
from dataclasses import dataclass, field, replace
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
from jaxgpt.checkpoint.info import find_damage
from jaxgpt.checkpoint.source import Place
from jaxgpt.config import Config, ModelConfig
from jaxgpt.errors import UserError
from jaxgpt.kernels import best, choose_attention, in_balanced_order
from jaxgpt.kernels.remat import POLICIES
from jaxgpt.model import GPT
from jaxgpt.model.init import boxed_params
from jaxgpt.model.lora import merge
from jaxgpt.model.scan import ScannedGPT, unstack_layers
from jaxgpt.ops import Ops
from jaxgpt.ops.attention import attend
from jaxgpt.parallel.host import precision_note, step_compile_options
from jaxgpt.parallel.mesh import block_on_cpu_mesh, make_mesh, resolve
from jaxgpt.parallel.processes import process_count
from jaxgpt.parallel.rows import Microbatches, batch_sharding, batch_ways, microbatches, put, rows_of
from jaxgpt.parallel.rules import RULES, Rules, change_rules, replicated, use_mesh
from jaxgpt.parallel.sums import sums_by_device
from jaxgpt.runtime import set_quick_flag
from jaxgpt.train.loss import (
    FrozenParts,
    Objective,
    RowSums,
    base_of,
    next_token_loss,
    of_objective,
    router_penalties,
    with_adapters,
)
from jaxgpt.train.optimizer import (
    Numbers,
    make_optimizer,
    numbers_of,
    restart_schedules,
    schedule,
    schedule_states,
)
from jaxgpt.train.skip import init_statistics
from jaxgpt.train.step import (
    TrainState,
    apply_gradients,
    check_names,
    dropout_key,
    gradient_sums,
    mean_gradients,
)
from jaxgpt.trainer.given import parts_of_build
from jaxgpt.trainer.metrics import HOST_METRICS
from jaxgpt.trainer.states import (
    Abstract,
    Fresh,
    abstract,
    compute,
    first_state,
    fresh,
    put_stacked,
    shardings_of,
    stacked,
)


class Several(NamedTuple):
    """Batches for one call of up to K steps, as a tree with leaves `[K, rows, ...]`; the call uses the first n batches."""

    batches: Any
    n: Any


@dataclass(eq=False)
class Program:
    """The functions of a run on a mesh; `build` makes one. No method changes it.

    `frozen` and optimizer hyperparameters are arguments of the compiled functions: new values need no compilation, and no
    array becomes a constant of a program. Functions are compiled at their first call.

    Attributes:
        config: settings of the run, with `model.vocab_size` set.
        mesh: the devices.
        rules: the complete sharding table.
        ops: operations of the decoder.
        model: the decoder, without weights.
        objective: objective of training and evaluation, `(params, batch, key, frozen) -> RowSums`; with adapters, it merges.
        optimizer: as in `build`; None: from the config.
        abstract: shapes and shardings of all arrays.
        fresh: function from a seed to random weights and the initial state.
        numbers: optimizer hyperparameters that are arguments of the step, replicated over the devices.
        frozen: argument of the objective, on the devices; with adapters, their base, or `FrozenParts`. None: the devices are
            absent, and programs are only lowered.
        note: advice about mesh, kernels and settings for the user, or "".
        given: names of the parts that are given in Python, keyed by part: a resumed run needs them.
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
    numbers: Numbers
    frozen: Any = field(default=None, repr=False)
    note: str = ""
    given: Mapping[str, str] = field(default_factory=dict)

    def __post_init__(self) -> None:
        """Make the jitted functions; tracing and compilation happen at the first call."""
        everywhere = replicated(self.mesh)

        def train(state: TrainState, batch: Any, numbers: Numbers, frozen: Any) -> Any:
            step = partial(self.pure_step, numbers=numbers, frozen=frozen)
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

    def padded_rows(self, rows: int) -> int:
        """Return the number of rows on the devices: `train.batch_size` rows are padded for `step`, others for `call`."""
        if rows == self.config.train.batch_size:
            return math.prod(self.microbatches)
        ways = batch_ways(self.mesh)
        return math.ceil(rows / ways) * ways

    def put(self, batch: Any) -> Any:
        """Put a batch on the devices, sharded by rows, with `padded_rows`. For batches and padding, see `rows.put`."""
        return put(self.mesh, [batch], self.padded_rows(rows_of(batch)))

    def put_batches(self, batches: Sequence[Any]) -> Any:
        """Put 1 to `train.steps_per_call` batches for one call of `step` on their devices."""
        train = self.config.train
        most = train.steps_per_call
        if not 0 < len(batches) <= most:
            raise UserError(f"expected 1 to {most} batches per call (train.steps_per_call), not {len(batches)}")
        if most == 1:
            return self.put(batches[0])
        return Several(put(self.mesh, batches, math.prod(self.microbatches), most), len(batches))

    def batch(self, steps: int = 1, spec: Any = None) -> Any:
        """Return an abstract, padded batch of a step; for K > 1 steps, `Several` with leaves `[K, rows, ...]`.

        Args:
            steps: number of batches.
            spec: shapes and dtypes of the rows, from `rows.row_spec`; None: windows, `[T + 1]` or with document ids `[T, 3]`
                (see `train.loss.split_windows`).
        """
        if spec is None:
            T = self.config.window
            spec = np.zeros((0, T, 3) if self.config.has_documents else (0, T + 1), np.int32)
        rows = math.prod(self.microbatches)
        shape = (rows,) if steps == 1 else (steps, rows)
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
        """The devices of the weights, to read them from a checkpoint."""
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

        # The parameters are not an argument that is returned: XLA would copy them.
        params = put_stacked(self.config, params, like.params, donate)
        if not donate:
            params = compute(self.mesh, lambda params: params, params, like.params)
        return compute(self.mesh, others, params, like._replace(params=()))._replace(params=params)

    def restore(self, directory: Path, step: int) -> TrainState:
        """Restore a checkpoint's state; raise `UserError` if it cannot be read or does not match the config."""
        state = store.restore(directory, step, self.abstract.checkpoint)
        return put_stacked(self.config, state, self.abstract.state, donate=True)

    def with_new_schedule(self, directory: Path, step: int) -> TrainState:
        """Restore a checkpoint of a different run as the state before step 0.

        Weights, EMA and moments are kept; steps, learning-rate schedule and statistics of skipped updates start again. An EMA
        that the checkpoint lacks starts at its weights.

        Raises:
            UserError: if the checkpoint is damaged or does not match the config.
        """
        path = directory / str(step)
        damage = find_damage(path)
        if damage:
            fix = "choose a different step, or omit --keep-optimizer"
            raise UserError(f"checkpoint {path} is damaged: {damage}; {fix}")
        saved = self.abstract.checkpoint._replace(skip=None)
        like = self.abstract.state._replace(skip=None)
        if not (path / "ema").is_dir():
            saved = saved._replace(ema=None)
            like = like._replace(ema=None)

        # Only the counts of the schedules are new arrays: the restored arrays are used without a copy.
        state = store.restore(directory, step, saved)
        state = state._replace(step=jnp.zeros_like(state.step), opt_state=restart_schedules(state.opt_state))
        state = put_stacked(self.config, state, like, donate=True)
        if self.abstract.state.ema is not None and state.ema is None:
            average = compute(self.mesh, lambda params: params, state.params, like.params)
            state = state._replace(ema=average)
        if self.abstract.state.skip is not None:
            statistics = compute(self.mesh, lambda _: init_statistics(), (), self.abstract.state.skip)
            state = state._replace(skip=statistics)
        return state

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
        return self._run(self.jitted_step, state, batch, self.numbers, self.frozen)

    def eval(self, params: Any, batch: Any) -> tuple[jax.Array, jax.Array]:
        """Compute the summed loss and the number of tokens of each row, for `params` or an EMA."""
        sums = self.sums(params, batch)
        return sums.loss_B, sums.count_B

    def sums(self, params: Any, batch: Any) -> RowSums:
        """Compute the sums of the objective for each row, without dropout, penalties and arrays, for `params` or an EMA."""
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
        numbers = jax.tree.map(lambda x: jax.ShapeDtypeStruct((), x.dtype, sharding=place), self.numbers)
        with self.on_mesh():
            return self.jitted_step.lower(state, batch, numbers, self.abstract.frozen)

    def pure_step(
        self, state: TrainState, batch: Any, numbers: Numbers | None = None, frozen: Any = ()
    ) -> tuple[TrainState, dict[str, jax.Array]]:
        """Take one step, as `train_step` with the settings of the config; `numbers` by default from the config."""
        config = self.config
        numbers = numbers or host_numbers(config)

        # Sums over rows; on CPUs with replicated weights, each device adds its own rows first.
        key = dropout_key(state, config.train.seed if config.model.dropout else None)
        add = sums_by_device if self._sums_by_device() else gradient_sums
        accumulation = self.microbatches.accumulation
        grads, sums = add(state.params, batch, key, frozen, objective=self.objective, accumulation=accumulation)
        check_names(sums[2], HOST_METRICS)
        metrics, grads = mean_gradients(grads, sums)

        # The rate of this update. The optimizer counts its updates: skipped updates do not advance the schedule.
        if self.optimizer is None:
            counted, *_ = schedule_states(state.opt_state)
            metrics |= {"lr": schedule(config, numbers)(counted.count)}

        optimizer = self.optimizer or make_optimizer(config, numbers, self.model)
        return apply_gradients(
            state,
            grads,
            metrics,
            optimizer=optimizer,
            ema_decay=config.optim.ema_decay,
            spike_factor=config.optim.spike_factor,
        )

    def on_mesh(self) -> AbstractContextManager[None]:
        """Map the logical axes of layers to the axes of the mesh within the context."""
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


def train_steps(state: TrainState, several: Several, step: Any) -> tuple[TrainState, dict[str, jax.Array]]:
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


def host_numbers(config: Config) -> Numbers:
    """Return the optimizer hyperparameters that are arguments of the step, such as the learning rate, float32."""
    return jax.tree.map(np.float32, numbers_of(config.optim))


def make_program(
    config: Config,
    mesh: Mesh,
    *,
    optimizer: optax.GradientTransformation | None = None,
    rules: Rules = RULES,
    frozen: Any = None,
    frozen_model: ModelConfig | None = None,
    model: GPT | None = None,
    objective: Objective | None = None,
    objective_of: Callable[[GPT], Objective] | None = None,
    ops: Ops | None = None,
    note: str = "",
) -> Program:
    """Make the program of a config on a mesh of present or absent devices. It holds no arrays: see `build`.

    Arguments as for `build`, with the complete sharding table. `frozen` may be abstract.
    """
    ops = ops or best(config, mesh)

    # Shapes. Without frozen arrays, adapters have random weights as their base.
    make = jax.jit(partial(fresh, config=config, model=model, optimizer=optimizer))
    shapes = jax.eval_shape(make, 0)
    arrays = abstract(config, mesh, rules, shapes, frozen_shapes(config, shapes, frozen, frozen_model))

    # Functions.
    given = parts_of_build(config, model, objective, objective_of, optimizer)
    gpt = ScannedGPT if config.train.scan_layers else GPT
    order = None
    of_order = ops
    if model is None:
        of_order, order = in_balanced_order(config, ops)
        model = gpt(config.model, ops, POLICIES[config.train.remat])
    if objective_of is not None:
        objective = objective_of(model)
    if objective is None:
        # Only this objective changes the order of the tokens.
        ordered = model if order is None else model.clone(ops=of_order)
        objective = next_token_loss(ordered.apply, config.train.loss_chunk, router_penalties(config), order)
    if config.lora.rank:
        objective = with_adapters(objective, config.lora.alpha)
    return Program(
        config,
        mesh,
        rules,
        ops,
        model,
        objective,
        optimizer,
        abstract=arrays,
        fresh=make,
        numbers=host_numbers(config),
        note=note,
        given=given,
    )


def frozen_shapes(config: Config, shapes: Fresh, frozen: Any, frozen_model: ModelConfig | None) -> Any:
    """Return the shapes of frozen arrays, with stacked layers if training uses them; weights of a `frozen_model` in boxes.

    Arguments as for `make_program`, with the shapes of the result of `fresh`.
    """
    if isinstance(frozen, FrozenParts):
        base = frozen_shapes(config, shapes, frozen.base, None)
        other = frozen_shapes(config, shapes, frozen.of_objective, frozen_model)
        return FrozenParts(base, other)
    if frozen is not None and not callable(frozen):
        return jax.eval_shape(partial(stacked, config), frozen)
    if frozen_model is not None:
        return jax.eval_shape(lambda: stacked(config, boxed_params(GPT(frozen_model), 0)))
    if config.lora.rank or callable(frozen):
        return nn.unbox(shapes.weights)
    return ()


def build(
    config: Config,
    optimizer: optax.GradientTransformation | None = None,
    rules: Rules | None = None,
    frozen: Any = None,
    frozen_model: ModelConfig | None = None,
    model: GPT | None = None,
    objective: Objective | None = None,
    objective_of: Callable[[GPT], Objective] | None = None,
    ops: Ops | None = None,
) -> Program:
    """Build the program of a config on the available devices.

    Args:
        config: settings of the run, with `model.vocab_size` set.
        optimizer: optax transformation to use instead of `config.optim`, which then sets only `ema_decay` and the skipping
            of updates. The metrics then have no `lr`. With `train.scan_layers`, the optimizer receives one array
            for each weight of a block, stacked over the layers.
        rules: changes to the sharding table (`jaxgpt.parallel.rules.RULES`), from logical axis to mesh axes: `{"length":
            ("tensor",)}` shards the activations between blocks along the sequence. Losses match a single device up to rounding.
        frozen: any tree of arrays that the objective reads, but that are not trained, with unstacked layers: with `lora.rank`,
            the base weights (None: random weights), or a `train.loss.FrozenParts` of base weights and other arrays; otherwise,
            for example, a reference model. The arrays are sharded as by `shardings_like`. It may be a function from a `Place`
            to weights of the model, which reads them with their shardings.
        frozen_model: architecture of the weights that the function `frozen` reads; None: as the trained model.
        model: module to train instead of `GPT(config.model, ...)`, with weights of the same names; with `train.scan_layers`,
            a `ScannedGPT` (`model/scan.py`). The default objective calls its methods `hidden_and_sides` and `head`.
        objective: objective to use instead of `next_token_loss`, with the penalties of `router_penalties`;
            with `lora.rank`, it receives the merged weights as `params`, and `FrozenParts.of_objective` as `frozen`.
        objective_of: function from the model, with the operations of the mesh, to the objective; instead of `objective`.
        ops: operations to use instead of `jaxgpt.kernels.best(config, mesh)`.

    Raises:
        UserError: if a rule is invalid (see `change_rules`), or a rule, the mesh or a setting does not fit the devices, the
            batch or the model.
    """
    if config.post.objective != "next-token" and objective is None and objective_of is None:
        raise UserError(
            f"post.objective {config.post.objective} needs its objective: pass build=jaxgpt.post.start.build_program, or an "
            f"objective"
        )

    # The mesh, and settings that do not fit it.
    set_quick_flag()  # before JAX's first use of a device
    sizes, note = resolve(config, jax.device_count(), process_count(), jax.default_backend() == "tpu")
    mesh = make_mesh(sizes)
    device = mesh.devices.flat[0]
    check_remat(config.train.remat, device)
    if ops is not None and config.model.dropout and ops.attend is not attend:
        raise UserError(
            f"model.dropout {config.model.dropout:g} needs the attention of Ops(): pass ops._replace(attend=Ops().attend), or "
            f"set model.dropout to 0"
        )
    if config.train.scan_layers and isinstance(model, GPT) and not isinstance(model, ScannedGPT):
        raise UserError("train.scan_layers needs a ScannedGPT (jaxgpt.model.scan), not a GPT")
    kernel_note = ""
    if ops is None and model is None:
        _, kernel_note = choose_attention(config, device)
    note = "; ".join(filter(None, [note, kernel_note, precision_note(config.train.compute_dtype, device)]))

    # Shapes and functions.
    table = change_rules(rules or {})
    program = make_program(
        config,
        mesh,
        optimizer=optimizer,
        rules=table,
        frozen=frozen,
        frozen_model=frozen_model,
        model=model,
        objective=objective,
        objective_of=objective_of,
        ops=ops,
        note=note,
    )

    notes = [program.note, replicated_note(program.abstract.state.opt_state, mesh)]
    program.note = "; ".join(filter(None, notes))
    return with_arrays(program, frozen)


def replicated_note(opt_state: Any, mesh: Mesh) -> str:
    """Return a note if more than a tenth of the bytes of the optimizer state is not sharded over fsdp and tensor, or ""."""
    if mesh.shape["fsdp"] * mesh.shape["tensor"] == 1:
        return ""
    total = 0
    replicated_bytes = 0
    can_be_sharded = False
    sizes = [mesh.shape[axis] for axis in ("fsdp", "tensor") if mesh.shape[axis] > 1]
    for leaf in jax.tree.leaves(opt_state):
        size = leaf.size * leaf.dtype.itemsize
        total += size
        if leaf.sharding.is_fully_replicated:
            replicated_bytes += size
            can_be_sharded |= any(length % ways == 0 for length in leaf.shape for ways in sizes)
    if replicated_bytes <= 0.1 * total:
        return ""
    share = f"{replicated_bytes / total:.0%} of the optimizer state is replicated on every device"
    if not can_be_sharded:
        return f"{share}: neither fsdp nor tensor divides a dimension of these arrays"
    return f"{share}: init may return its arrays in nn.Partitioned, with logical axes"


def with_arrays(program: Program, frozen: Any = None) -> Program:
    """Return a program with its arrays on the devices: `frozen` as in `build`, and the hyperparameters."""
    arrays = frozen_arrays(program, frozen, program.abstract.frozen)
    on_mesh = jax.jit(lambda numbers: numbers, out_shardings=replicated(program.mesh))
    numbers = on_mesh(host_numbers(program.config))
    return replace(program, numbers=numbers, frozen=arrays)


def frozen_arrays(program: Program, frozen: Any, like: Any) -> Any:
    """Return frozen arrays on the devices: `frozen` as in `build`, with the shapes and shardings of `like`."""
    if isinstance(frozen, FrozenParts):
        base = frozen_arrays(program, frozen.base, like.base)
        other = frozen_arrays(program, frozen.of_objective, like.of_objective)
        return FrozenParts(base, other)
    if not jax.tree.leaves(like):
        return like

    config = program.config
    if frozen is None:
        return compute(program.mesh, lambda seed: nn.unbox(program.fresh(seed).weights), config.train.seed, like)
    # The given arrays may be on other devices.
    read = callable(frozen)
    arrays = frozen(program.place) if callable(frozen) else frozen
    return put_stacked(config, arrays, like, donate=read)


def check_remat(policy: str, device: jax.Device) -> None:
    """Raise `UserError` if a device lacks the pinned host memory that the policy `offload` needs."""
    kinds = {memory.kind for memory in device.addressable_memories()}
    if policy == "offload" and "pinned_host" not in kinds:
        raise UserError(
            f"train.remat offload needs pinned host memory, which {device.platform} devices lack: use --train.remat dots"
        )
