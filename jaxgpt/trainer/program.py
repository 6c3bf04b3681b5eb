"""Program: the compiled functions of training and evaluation on a mesh, with the shapes and shardings of their arrays."""

from __future__ import annotations

import math
from collections.abc import Callable, Sequence
from contextlib import AbstractContextManager
from dataclasses import dataclass, field
from functools import cached_property, partial
from typing import Any, TypeVar

import flax.linen as nn
import jax
import jax.numpy as jnp
import numpy as np
import optax
from jax.sharding import AbstractMesh, Mesh

from jaxgpt.config import Config
from jaxgpt.errors import UserError
from jaxgpt.kernels import best, choose_attention
from jaxgpt.kernels.devices import over_data
from jaxgpt.kernels.remat import POLICIES
from jaxgpt.lm.model import FrozenBase
from jaxgpt.model import GPT
from jaxgpt.model.init import boxed_params
from jaxgpt.model.lora import merge, model_adapters
from jaxgpt.model.scan import stack_layers, unstack_layers
from jaxgpt.ops import Ops
from jaxgpt.ops.attention import attend
from jaxgpt.ops.random import named_key
from jaxgpt.parallel.host import quick_compile_options
from jaxgpt.parallel.mesh import (
    RULES,
    Microbatches,
    Rules,
    batch_sharding,
    batch_ways,
    block_on_cpu_mesh,
    change_rules,
    make_mesh,
    microbatches,
    replicated,
    resolve,
    shardings_like,
    use_mesh,
)
from jaxgpt.parallel.processes import process_count
from jaxgpt.parallel.put import put
from jaxgpt.train.loss import Objective, next_token_loss
from jaxgpt.train.optimizer import Numbers, make_optimizer, numbers_of, schedule
from jaxgpt.train.step import TrainState, eval_step, init_state, train_step

T = TypeVar("T")


@dataclass(eq=False)
class Program:
    """Training and evaluation of a config on a mesh, compiled at the first call. Shapes and shardings need no devices.

    With `train.scan_layers` the layers of a state are stacked (`model/scan.py`) from the start: stacking within the
    step would copy weights and gradients each time, and compile the optimizer for each layer. Checkpoints are per
    layer.

    Attributes:
        config: settings of the run; the vocabulary is known.
        mesh: the devices; for estimates, which compile nothing, an `AbstractMesh`.
        optimizer: as in `build`, like the next three.
        model: module to train.
        objective: objective of training and evaluation.
        ops: operations of the decoder.
        rules: the sharding table.
        base: the frozen weights of adapters, on their devices; None: random weights.
        note: advice about mesh, kernels and settings for the user, or "".
    """

    config: Config
    mesh: Mesh
    optimizer: optax.GradientTransformation | None = None
    model: GPT | None = None
    objective: Objective | None = None
    ops: Ops | None = None
    rules: Rules = field(default_factory=lambda: RULES)
    base: FrozenBase | None = field(default=None, repr=False)
    note: str = ""

    @cached_property
    def decoder_ops(self) -> Ops:
        """The operations of the decoder."""
        return self.ops or best(self.config, self.mesh)

    @property
    def microbatches(self) -> Microbatches:
        """The microbatches of a step."""
        return microbatches(self.config.train, batch_ways(self.mesh))

    def batch(self, steps: int = 1) -> jax.ShapeDtypeStruct:
        """Return the abstract batch of a step, padded, or the batches of several: `[rows, T + 1]`, `[K, rows, T + 1]`.

        With segment ids, windows are `[T, 3]` (see `train.loss.split_windows`).
        """
        T = self.config.window
        one = math.prod(self.microbatches), *((T, 3) if self.config.data.segmented else (T + 1,))
        shape = one if steps == 1 else (steps, *one)
        return jax.ShapeDtypeStruct(shape, jnp.int32, sharding=batch_sharding(self.mesh, steps > 1))

    @cached_property
    def fresh(self) -> Any:
        """Map a seed to random weights and trained parameters, with their logical axes, and the first state. Traced once."""
        return jax.jit(lambda seed: self.stacked(self._fresh_per_layer(seed)))

    @cached_property
    def abstract_state(self) -> TrainState:
        """Shapes, dtypes and shardings of the state."""
        return self._abstract(*jax.eval_shape(self.fresh, 0)[1:])

    @cached_property
    def abstract_base(self) -> Any:
        """Shapes, dtypes and shardings of the frozen weights; `()` if all weights are trained."""
        if not self.config.lora.rank:
            return ()
        boxed = jax.eval_shape(self.fresh, 0)[0]
        return self._abstract(boxed, nn.unbox(boxed))

    @property
    def abstract_weights(self) -> Any:
        """Shapes, dtypes and shardings of the model's weights."""
        return self.abstract_base or self.abstract_state.params

    @cached_property
    def abstract_checkpoint(self) -> TrainState:
        """Shapes, dtypes and shardings of the state in a checkpoint, which has a tree per layer."""
        if not self.config.train.scan_layers:
            return self.abstract_state
        return self._abstract(*jax.eval_shape(lambda: self._fresh_per_layer(0))[1:])

    @cached_property
    def frozen(self) -> Any:
        """The frozen weights, on their devices; `()` if all weights are trained."""
        if self.base is not None or not self.abstract_base:
            return self.base.params if self.base else ()
        fresh = lambda seed: nn.unbox(self.fresh(seed)[0])  # noqa: E731
        return self.compute(fresh, self.config.train.seed, self.abstract_base)

    def weights(self, trained: Any) -> Any:
        """Return the weights of the model: `trained`, or the frozen weights merged with the adapters `trained`."""
        if not self.abstract_base:
            return trained
        merged = lambda trees: merge(trees[0], trees[1], self.config.lora.alpha)  # noqa: E731
        return self.compute(merged, (self.frozen, trained), self.abstract_base)

    def init(self, params: Any = None) -> TrainState:
        """Make the state before the first step from weights per layer; None: random weights."""
        if params is None:
            return self.compute(lambda seed: self.fresh(seed)[2], self.config.train.seed, self.abstract_state)
        return self.compute(lambda params: self.stacked(self._first_state(params)), params, self.abstract_state)

    def put_params(self, params: Any) -> Any:
        """Put weights per layer on their devices, for `eval`."""
        shardings = shardings_of(self.abstract_state.params)
        return block_on_cpu_mesh(self.mesh, jax.device_put(self.stacked(params), shardings))

    def to_checkpoint(self, state: TrainState) -> TrainState:
        """Unstack the layers of a state. The result is a copy, in device memory until it is written."""
        if not self.config.train.scan_layers:
            return state
        return block_on_cpu_mesh(self.mesh, self._unstack(state))

    def from_checkpoint(self, state: TrainState) -> TrainState:
        """Invert `to_checkpoint`."""
        return self.compute(self.stacked, state, self.abstract_state) if self.config.train.scan_layers else state

    def put(self, batch: Any) -> Any:
        """Put windows, or a tree of arrays of rows, on their devices, padded with rows of -1.

        A training batch is padded for `step`, any other number of rows for `eval`.
        """

        def put_rows(array: Any) -> jax.Array:
            n, *row = array.shape
            ways = batch_ways(self.mesh)
            training = n == self.config.train.batch_size
            rows = math.prod(self.microbatches) if training else math.ceil(n / ways) * ways
            return put(self.mesh, [array], (rows, *row))

        return jax.tree.map(put_rows, batch)

    def put_batches(self, batches: Sequence[Any]) -> jax.Array:
        """Put the batches of the next steps, at most `train.steps_per_call`, on their devices, for `steps`."""
        steps = self.config.train.steps_per_call
        return put(self.mesh, batches, self.batch(steps).shape, several=steps > 1)

    def step(self, state: TrainState, batch: Any) -> tuple[TrainState, dict[str, jax.Array]]:
        """Take one optimizer step on a batch of `put`. The given state is donated."""
        return self._call(self._train[False], state, batch, self._numbers, 1)

    def steps(
        self, state: TrainState, batches: jax.Array, n: int
    ) -> tuple[TrainState, Callable[[], list[dict[str, Any]]]]:
        """Take the next n optimizer steps on the result of `put_batches`. The given state is donated.

        Returns the next state, and a function that blocks on the metrics of the steps and returns them.
        """
        several = self._several(batches)
        state, metrics = self._call(self._train[several], state, batches, self._numbers, n)

        def read() -> list[dict[str, Any]]:
            host = jax.device_get(metrics)
            return [{name: value[i] for name, value in host.items()} for i in range(n)] if several else [host]

        return state, read

    def eval(self, params: Any, windows_BT1: jax.Array) -> tuple[jax.Array, jax.Array]:
        """Compute the summed loss and the number of tokens of each window."""
        return self._call(self._eval, params, windows_BT1)

    def lower(self, state: TrainState, batches: Any) -> jax.stages.Lowered:
        """Lower the train step for a state and one or several batches, concrete or abstract, to inspect or compile it."""
        # Abstract and with their sharding, as in a call: otherwise JAX would not find the compiled program in its
        # cache.
        rest = replicated(self.mesh)
        numbers = jax.tree.map(lambda x: jax.ShapeDtypeStruct((), x.dtype, sharding=rest), self.numbers)
        function = self._train[self._several(batches)]
        with self.use_mesh():
            lowered: jax.stages.Lowered = function.lower(state, batches, numbers, 1, self.abstract_base)
            return lowered

    def compute(self, function: Callable[[Any], Any], argument: Any, like: T) -> T:
        """Call a function once, compiled, with its results on their own devices as in `like`."""
        options = quick_compile_options(self.mesh)
        compiled = jax.jit(function, out_shardings=shardings_of(like), compiler_options=options)
        result: T = block_on_cpu_mesh(self.mesh, compiled(argument))
        return result

    def stacked(self, tree: Any) -> Any:
        """Stack the layers of a tree (weights, a state), if training uses them stacked."""
        return stack_layers(tree) if self.config.train.scan_layers else tree

    def use_mesh(self) -> AbstractContextManager[None]:
        """Map the logical axes of layers to the axes of the mesh within the context."""
        return use_mesh(self.mesh, self.config.model, self.rules)

    def bound_objective(self, frozen: Any = ()) -> Objective:
        """Return the objective, by default the next-token loss. With `frozen` weights, it is a function of adapters."""
        config = self.config
        model = self.model or GPT(config.model, self.decoder_ops, POLICIES[config.train.remat])
        objective = self.objective or next_token_loss(model.apply, config.train.loss_chunk)
        if not config.lora.rank:
            return objective
        return lambda adapters, *batch_and_key: objective(merge(frozen, adapters, config.lora.alpha), *batch_and_key)

    def bound_step(self, frozen: Any = (), numbers: Numbers | None = None) -> Any:
        """Return the train step `(state, batch) -> (state, metrics)`, with the config's `numbers` by default."""
        config, numbers = self.config, numbers or self.numbers
        return partial(
            train_step,
            objective=self.bound_objective(frozen),
            optimizer=make_optimizer(config, self.optimizer, numbers),
            learning_rate=schedule(config, numbers.rate) if self.optimizer is None else None,
            seed=config.train.seed,
            accumulation=self.microbatches.accumulation,
            over_devices=over_data if self._sums_by_device() else None,
            dropout=config.model.dropout > 0,
            ema_decay=config.optim.ema_decay,
        )

    @property
    def numbers(self) -> Numbers:
        """The numbers of the optimizer, which are arguments of the train step."""
        return jax.tree.map(np.float32, numbers_of(self.config.optim))

    @cached_property
    def _numbers(self) -> Numbers:
        """The numbers of the optimizer, on every device."""
        return jax.jit(lambda numbers: numbers, out_shardings=replicated(self.mesh))(self.numbers)

    @cached_property
    def _train(self) -> dict[bool, Any]:
        """The train step of one batch (False) and of several batches (True)."""

        def step(state: TrainState, batch: jax.Array, numbers: Numbers, n: jax.Array, frozen: Any) -> Any:
            return self.bound_step(frozen, numbers)(state, batch)

        def steps(state: TrainState, batches: jax.Array, numbers: Numbers, n: jax.Array, frozen: Any) -> Any:
            return train_steps(state, batches, n, step=self.bound_step(frozen, numbers))

        # Traces and profiles show the names of the compiled functions.
        step.__name__, steps.__name__ = train_step.__name__, train_steps.__name__
        rest = replicated(self.mesh)
        states, frozen = shardings_of(self.abstract_state), shardings_of(self.abstract_base)

        def compiled(function: Any, batches: jax.ShapeDtypeStruct) -> Any:
            shardings = (states, batches.sharding, rest, rest, frozen)
            return jax.jit(function, in_shardings=shardings, out_shardings=(states, rest), donate_argnums=0)

        return {False: compiled(step, self.batch()), True: compiled(steps, self.batch(2))}

    @cached_property
    def _eval(self) -> Any:
        def eval_batch(params: Any, windows_BT1: jax.Array, frozen: Any) -> Any:
            return eval_step(params, windows_BT1, objective=self.bound_objective(frozen))

        eval_batch.__name__ = eval_step.__name__
        params, frozen = shardings_of(self.abstract_state.params), shardings_of(self.abstract_base)
        shardings = (params, self.batch().sharding, frozen)
        return jax.jit(eval_batch, in_shardings=shardings, out_shardings=replicated(self.mesh))

    @cached_property
    def _unstack(self) -> Any:
        unstack = partial(unstack_layers, n_layer=self.config.model.n_layer)
        return jax.jit(unstack, out_shardings=shardings_of(self.abstract_checkpoint))

    def _call(self, function: Any, *args: Any) -> Any:
        """Call a compiled function on the mesh, with the frozen weights as its last argument."""
        frozen = self.frozen  # computed outside the mesh
        with self.use_mesh():
            return block_on_cpu_mesh(self.mesh, function(*args, frozen))

    def _several(self, batches: Any) -> bool:
        """Return whether the batch has an axis of steps."""
        return batches.ndim > len(self.batch().shape)

    def _fresh_per_layer(self, seed: jax.typing.ArrayLike) -> tuple[Any, Any, TrainState]:
        weights = trained = boxed_params(self.model or GPT(self.config.model), seed)
        if self.config.lora.rank:
            trained = model_adapters(named_key(seed, "lora"), weights, self.config.lora)
        return weights, trained, self._first_state(nn.unbox(trained))

    def _first_state(self, params: Any) -> TrainState:
        return init_state(params, make_optimizer(self.config, self.optimizer), self.config.optim.ema_decay > 0)

    def _abstract(self, boxed: Any, tree: T) -> T:
        shardings = shardings_like(tree, boxed, self.config.model, self.mesh, self.rules)
        return jax.tree.map(lambda x, each: jax.ShapeDtypeStruct(x.shape, x.dtype, sharding=each), tree, shardings)

    def _sums_by_device(self) -> bool:
        """Return whether devices sum the gradients of their rows first: on CPUs with all weights, without dropout."""
        mesh = self.mesh
        if isinstance(mesh, AbstractMesh) or mesh.devices.flat[0].platform != "cpu" or self.config.model.dropout:
            return False
        weights = self.abstract_state.params, self.abstract_base
        whole = all(each.is_fully_replicated for each in jax.tree.leaves(shardings_of(weights)))
        return whole and 1 < mesh.shape["data"] == mesh.size


def shardings_of(tree: Any) -> Any:
    """Return the sharding of every leaf."""
    return jax.tree.map(lambda leaf: leaf.sharding, tree)


def train_steps(
    state: TrainState,
    windows_KBT1: jax.Array,
    n: jax.typing.ArrayLike,
    *,
    step: Callable[[TrainState, jax.Array], tuple[TrainState, dict[str, jax.Array]]],
) -> tuple[TrainState, dict[str, jax.Array]]:
    """Take `n` optimizer steps on the first of K batches, in a loop on the devices that is compiled once for any n.

    Returns the next state, and the metrics of each step, `[K, ...]`; zero beyond n.
    """
    shapes = jax.eval_shape(step, state, windows_KBT1[0])[1]
    zeros = jax.tree.map(lambda x: jnp.zeros((len(windows_KBT1), *x.shape), x.dtype), shapes)

    def one(i: jax.Array, carry: tuple[TrainState, Any]) -> tuple[TrainState, Any]:
        state, metrics = step(carry[0], windows_KBT1[i])
        return state, jax.tree.map(lambda row, x: row.at[i].set(x), carry[1], metrics)

    result: tuple[TrainState, Any] = jax.lax.fori_loop(0, n, one, (state, zeros))
    return result


def build(
    config: Config,
    optimizer: optax.GradientTransformation | None = None,
    rules: Rules | None = None,
    base: FrozenBase | None = None,
    model: GPT | None = None,
    objective: Objective | None = None,
    ops: Ops | None = None,
) -> Program:
    """Build the program of a config on the available devices.

    Args:
        config: settings of the run; the vocabulary is known.
        optimizer: optax transformation to use instead of `config.optim`, which then sets only `ema_decay` and the skipping
            of updates. The metrics have no `lr`. With `train.scan_layers` it sees the weights of all layers as one array.
        rules: changes to the sharding table (`jaxgpt.parallel.mesh.RULES`), logical axis to mesh axes: `{"length":
            ("tensor",)}` splits the activations between blocks along the sequence. Losses match a single device.
        base: with `lora.rank`, the weights per layer that the adapters change; None: random weights.
        model: module to train instead of `GPT(config.model, ...)`, with weights of the same names.
        objective: objective to use instead of `next_token_loss`.
        ops: operations to use instead of `jaxgpt.kernels.best(config, mesh)`.

    Raises:
        UserError: if a rule has an unknown axis, or splits an array twice along one mesh axis; or if the mesh or a
            setting does not fit the devices, the batch or the model.
    """
    sizes, note = resolve(config, jax.device_count(), process_count(), jax.default_backend() == "tpu")
    mesh = make_mesh(sizes)
    device = mesh.devices.flat[0]
    if config.train.remat == "offload" and not has_host_memory(device):
        raise UserError(f"train.remat offload needs memory of the host that {device.platform} devices reach: use dots")
    if ops is not None and config.model.dropout and ops.attend is not attend:
        raise UserError(
            f"model.dropout {config.model.dropout:g} needs the attention of Ops(); remove attend, or set it to 0"
        )
    kernel_note = choose_attention(config, device)[1] if ops is None and model is None else ""
    note = "; ".join(filter(None, [note, kernel_note]))
    program = Program(config, mesh, optimizer, model, objective, ops, change_rules(rules or {}), note=note)
    if rules:
        _ = program.abstract_state, program.abstract_base  # validates the rules by applying them to every array
    if base is not None:
        program.base = base._replace(params=program.compute(program.stacked, base.params, program.abstract_base))
    return program


def has_host_memory(device: jax.Device) -> bool:
    """Return whether programs on a device can keep arrays in host memory."""
    return "pinned_host" in {memory.kind for memory in device.addressable_memories()}
