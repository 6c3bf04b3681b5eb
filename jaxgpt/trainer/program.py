"""Program: the compiled functions of training and evaluation, built from a config."""

from __future__ import annotations

import math
import time
from collections.abc import Callable, Iterator, Sequence
from concurrent.futures import ThreadPoolExecutor
from contextlib import contextmanager
from dataclasses import dataclass, field
from functools import cached_property, partial
from typing import Any

import flax.linen as nn
import jax
import jax.numpy as jnp
import optax
from jax.sharding import AbstractMesh, Mesh

from jaxgpt.checkpoint.base import FrozenBase
from jaxgpt.config import Config
from jaxgpt.errors import UserError, one_line
from jaxgpt.kernels import choose_attention
from jaxgpt.kernels.devices import over_data
from jaxgpt.kernels.remat import POLICIES
from jaxgpt.model import GPT
from jaxgpt.model.lora import merge
from jaxgpt.model.scan import unstack_layers
from jaxgpt.ops import Ops
from jaxgpt.ops.attention import attend
from jaxgpt.parallel.mesh import Rules, batch_ways, block_on_cpu_mesh, change_rules, make_mesh, replicated, resolve
from jaxgpt.parallel.processes import is_peer_failure, process_count
from jaxgpt.parallel.put import put
from jaxgpt.train.loss import Objective, next_token_loss
from jaxgpt.train.optimizer import Numbers, make_optimizer, schedule
from jaxgpt.train.step import TrainState, eval_step, init_state, train_step
from jaxgpt.trainer.layout import Layout, compute_sharded, shardings_of
from jaxgpt.trainer.report import Report


@dataclass(frozen=True)
class Program:
    """Training and evaluation of a layout, compiled at the first call.

    Attributes:
        layout: config, mesh and optimizer; shapes and shardings.
        note: advice about mesh, kernels and settings for the user, or "".
        base: the frozen weights of adapters, on their devices; None: random weights.
    """

    layout: Layout
    note: str = ""
    base: FrozenBase | None = field(default=None, repr=False, compare=False)

    @cached_property
    def frozen(self) -> Any:
        """The frozen weights, on their devices; `()` if all weights are trained."""
        return _frozen(self.layout) if self.base is None else self.base.params

    def weights(self, trained: Any) -> Any:
        """Return the weights of the model: `trained`, or the frozen weights merged with the adapters `trained`."""
        if not self.layout.abstract_base:
            return trained
        layout, alpha = self.layout, self.layout.config.lora.alpha
        merged = lambda trees: merge(trees[0], trees[1], alpha)  # noqa: E731
        weights = compute_sharded(layout, merged, (self.frozen, trained), layout.abstract_base)
        return block_on_cpu_mesh(layout.mesh, weights)

    def init(self, params: Any = None) -> TrainState:
        """Make the state before the first step from weights per layer; None: random weights."""
        layout, ema = self.layout, self.layout.config.optim.ema_decay > 0
        if params is None:
            seed = layout.config.train.seed
            return compute_sharded(layout, lambda seed: layout.fresh(seed)[2], seed, layout.abstract_state)
        first = lambda params: layout.stacked(init_state(params, layout.optimizer, ema))  # noqa: E731
        return compute_sharded(layout, first, params, layout.abstract_state)

    def put_params(self, params: Any) -> Any:
        """Put weights per layer on their devices, for `eval`."""
        shardings = shardings_of(self.layout.abstract_state.params)
        return block_on_cpu_mesh(self.layout.mesh, jax.device_put(self.layout.stacked(params), shardings))

    def to_checkpoint(self, state: TrainState) -> TrainState:
        """Unstack the layers of a state. The result is a copy, in device memory until it is written."""
        if not self.layout.config.train.scan_layers:
            return state
        return block_on_cpu_mesh(self.layout.mesh, self._unstack(state))

    def from_checkpoint(self, state: TrainState) -> TrainState:
        """Invert `to_checkpoint`."""
        if not self.layout.config.train.scan_layers:
            return state
        stack = jax.jit(self.layout.stacked, out_shardings=shardings_of(self.layout.abstract_state))
        return block_on_cpu_mesh(self.layout.mesh, stack(state))

    def put(self, batch: Any) -> Any:
        """Put windows, or a tree of arrays of rows, on their devices, padded with rows of -1.

        A training batch is padded for `step`, any other number of rows for `eval`.
        """

        def put_rows(array: Any) -> jax.Array:
            n, *row = array.shape
            ways = batch_ways(self.layout.mesh)
            training = n == self.layout.config.train.batch_size
            rows = math.prod(self.layout.microbatches) if training else math.ceil(n / ways) * ways
            return put(self.layout.mesh, [array], (rows, *row))

        return jax.tree.map(put_rows, batch)

    def put_batches(self, batches: Sequence[Any]) -> jax.Array:
        """Put the batches of the next steps, at most `train.steps_per_call`, on their devices, for `steps`."""
        steps = self.layout.config.train.steps_per_call
        return put(self.layout.mesh, batches, self.layout.batch(steps).shape, several=steps > 1)

    def step(self, state: TrainState, batch: Any) -> tuple[TrainState, dict[str, jax.Array]]:
        """Take one optimizer step on a batch of `put`. The given state is donated."""
        return self._call(self._train[False], state, batch, self._numbers)

    def steps(
        self, state: TrainState, batches: jax.Array, n: int
    ) -> tuple[TrainState, Callable[[], list[dict[str, Any]]]]:
        """Take the next n optimizer steps on the result of `put_batches`. The given state is donated.

        Returns the next state, and a function that blocks on the metrics of the steps and returns them.
        """
        if not self._several(batches):
            state, metrics = self.step(state, batches)
            return state, lambda: [jax.device_get(metrics)]
        state, metrics = self._call(self._train[True], state, batches, self._numbers, n)

        def read() -> list[dict[str, Any]]:
            host = jax.device_get(metrics)
            return [{name: value[i] for name, value in host.items()} for i in range(n)]

        return state, read

    def eval(self, params: Any, windows_BT1: jax.Array) -> tuple[jax.Array, jax.Array]:
        """Compute the summed loss and the number of tokens of each window."""
        return self._call(self._eval, params, windows_BT1)

    def lower(self, state: TrainState, batches: Any) -> jax.stages.Lowered:
        """Lower the train step for a state and one or several batches, concrete or abstract, to inspect or compile it."""
        several, frozen = self._several(batches), self.layout.abstract_base
        n, rest = (1,) if several else (), replicated(self.layout.mesh)
        # Abstract and with their sharding, as in a call: otherwise JAX would not find the compiled program there.
        numbers = jax.tree.map(lambda x: jax.ShapeDtypeStruct((), x.dtype, sharding=rest), self.layout.numbers)
        with self.layout.use_mesh():
            lowered: jax.stages.Lowered = self._train[several].lower(state, batches, numbers, *n, frozen)
            return lowered

    def _call(self, function: Any, *args: Any) -> Any:
        """Call a compiled function on the mesh, with the frozen weights as its last argument."""
        frozen = self.frozen  # computed outside of the mesh
        with self.layout.use_mesh():
            return block_on_cpu_mesh(self.layout.mesh, function(*args, frozen))

    def _several(self, batches: Any) -> bool:
        """Return whether there is an axis of steps."""
        return batches.ndim > len(self.layout.batch().shape)

    @cached_property
    def _unstack(self) -> Any:
        unstack = partial(unstack_layers, n_layer=self.layout.config.model.n_layer)
        return jax.jit(unstack, out_shardings=shardings_of(self.layout.abstract_checkpoint))

    @cached_property
    def _train(self) -> dict[bool, Any]:
        """The train step of one batch (False) and of several batches (True)."""
        layout, rest = self.layout, replicated(self.layout.mesh)
        states, frozen = shardings_of(layout.abstract_state), shardings_of(layout.abstract_base)
        one, several = layout.batch().sharding, layout.batch(2).sharding
        options: Any = {"out_shardings": (states, rest), "donate_argnums": 0}

        def step(state: TrainState, batch: jax.Array, numbers: Numbers, frozen: Any) -> Any:
            return bound_step(layout, frozen, numbers)(state, batch)

        def steps(state: TrainState, batches: jax.Array, numbers: Numbers, n: jax.Array, frozen: Any) -> Any:
            return train_steps(state, batches, n, step=bound_step(layout, frozen, numbers))

        # Traces and profiles show the names of the compiled functions.
        step.__name__, steps.__name__ = train_step.__name__, train_steps.__name__
        return {
            False: jax.jit(step, in_shardings=(states, one, rest, frozen), **options),
            True: jax.jit(steps, in_shardings=(states, several, rest, rest, frozen), **options),
        }

    @cached_property
    def _numbers(self) -> Numbers:
        """The numbers of the optimizer, on every device."""
        return jax.jit(lambda numbers: numbers, out_shardings=replicated(self.layout.mesh))(self.layout.numbers)

    @cached_property
    def _eval(self) -> Any:
        layout = self.layout
        params, frozen = shardings_of(layout.abstract_state.params), shardings_of(layout.abstract_base)

        def eval_batch(params: Any, windows_BT1: jax.Array, frozen: Any) -> Any:
            return eval_step(params, windows_BT1, objective=objective_of(layout, frozen))

        eval_batch.__name__ = eval_step.__name__
        shardings = (params, layout.batch().sharding, frozen)
        return jax.jit(eval_batch, in_shardings=shardings, out_shardings=replicated(layout.mesh))


def objective_of(layout: Layout, frozen: Any = ()) -> Objective:
    """Return the objective of a layout, by default the next-token loss. With `frozen` weights, it is a function of adapters."""
    config, alpha = layout.config, layout.config.lora.alpha
    model = layout.model or GPT(config.model, layout.decoder_ops, POLICIES[config.train.remat])
    objective = layout.objective or next_token_loss(model.apply, config.train.loss_chunk)
    if not config.lora.rank:
        return objective
    return lambda adapters, *batch_and_key: objective(merge(frozen, adapters, alpha), *batch_and_key)


def bound_step(layout: Layout, frozen: Any = (), numbers: Numbers | None = None) -> Any:
    """Return the train step of a layout, `(state, batch) -> (state, metrics)`, with the config's `numbers` by default."""
    config, numbers, own = layout.config, numbers or layout.numbers, layout.own_optimizer
    return partial(
        train_step,
        objective=objective_of(layout, frozen),
        optimizer=make_optimizer(config, own, numbers),
        learning_rate=schedule(config, numbers.rate) if own is None else None,
        seed=config.train.seed,
        accumulation=layout.microbatches.accumulation,
        over_devices=over_data if sums_by_device(layout) else None,
        dropout=config.model.dropout > 0,
        ema_decay=config.optim.ema_decay,
    )


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


@contextmanager
def compiling(program: Program, report: Report) -> Iterator[None]:
    """Compile the train step in a thread while the context makes the state. JAX caches the result for `step`.

    Leaving the context waits for the compiler, even after an error, and raises its error.
    """
    began, layout = time.perf_counter(), program.layout
    report.stage("compiling")
    batches = layout.batch(layout.config.train.steps_per_call)
    state, *_ = layout.abstract_state, layout.abstract_base, program._numbers  # traced in this thread
    with ThreadPoolExecutor(1) as pool:
        compiled = pool.submit(lambda: compile_lowered(layout, program.lower(state, batches)))
        yield
        compiled.result()
    report.stage("")
    report.compiled(time.perf_counter() - began)


def compile_lowered(layout: Layout, lowered: jax.stages.Lowered) -> jax.stages.Compiled:
    """Compile the result of `Program.lower`.

    Raises:
        UserError: if the compiler fails, with advice.
    """
    try:
        return lowered.compile()
    except jax.errors.JaxRuntimeError as e:
        if is_peer_failure(e):
            raise
        raise UserError(explain_failure(e, layout.mesh, layout.config.train.accumulation)) from None


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
        UserError: if a rule has an unknown axis, or splits two axes of an array along the same mesh axis; or if the mesh or a
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
    layout = Layout(config, mesh, optimizer, change_rules(rules or {}), ops, model, objective)
    if rules:
        _ = layout.abstract_state, layout.abstract_base  # applies the rules to every array, which checks them
    if base is not None:
        base = base._replace(params=_frozen(layout, base.params))
    return Program(layout, "; ".join(filter(None, [note, kernel_note])), base)


def sums_by_device(layout: Layout) -> bool:
    """Return whether each device adds the gradients of its rows first: on CPUs, if each has all weights, without dropout."""
    mesh = layout.mesh
    if isinstance(mesh, AbstractMesh) or mesh.devices.flat[0].platform != "cpu" or layout.config.model.dropout:
        return False
    weights = layout.abstract_state.params, layout.abstract_base
    whole = all(each.is_fully_replicated for each in jax.tree.leaves(shardings_of(weights)))
    return whole and 1 < mesh.shape["data"] == mesh.size


def _frozen(layout: Layout, params: Any = None) -> Any:
    """Put frozen weights per layer on their devices; None: random weights. `()` if all weights are trained."""
    like = layout.abstract_base
    if not like:
        return ()
    if params is None:
        fresh = lambda seed: nn.unbox(layout.fresh(seed)[0])  # noqa: E731
        return compute_sharded(layout, fresh, layout.config.train.seed, like)
    return compute_sharded(layout, layout.stacked, params, like)


def explain_failure(error: jax.errors.JaxRuntimeError, mesh: Mesh, accumulation: int) -> str:
    """Explain a failure of XLA in one line, with the settings that may help."""
    message = one_line(error, 300)
    shape = "mesh " + " x ".join(f"{axis} {size}" for axis, size in mesh.shape.items())
    if "RESOURCE_EXHAUSTED" in message:
        return (
            f"out of device memory (train.accumulation {accumulation}, {shape}): {message}; raise train.accumulation, "
            "set --train.remat dots or full, or split the weights with --mesh.data 1 --mesh.fsdp -1"
        )
    return (
        f"the compiler fails on this step ({shape}): {message}; try mesh sizes that are powers of two, "
        "--train.attention xla, or another version of jax"
    )


def has_host_memory(device: jax.Device) -> bool:
    """Return whether programs on a device can keep arrays in host memory."""
    return "pinned_host" in {memory.kind for memory in device.addressable_memories()}
