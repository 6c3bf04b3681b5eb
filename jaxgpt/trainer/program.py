"""Program: the compiled functions of training and evaluation on a mesh."""

from __future__ import annotations

import math
from collections.abc import Sequence
from contextlib import AbstractContextManager
from dataclasses import dataclass
from functools import cached_property, partial
from typing import Any, NamedTuple

import jax
import jax.numpy as jnp
import numpy as np
import optax
from jax.sharding import AbstractMesh

from jaxgpt.config import Config
from jaxgpt.errors import UserError
from jaxgpt.kernels import best, choose_attention
from jaxgpt.kernels.remat import POLICIES
from jaxgpt.lm.model import FrozenBase
from jaxgpt.model import GPT
from jaxgpt.model.scan import ScannedGPT
from jaxgpt.ops import Ops
from jaxgpt.ops.attention import attend
from jaxgpt.parallel.host import precision_note, step_compile_options
from jaxgpt.parallel.mesh import (
    Microbatches,
    Rules,
    batch_sharding,
    batch_ways,
    block_on_cpu_mesh,
    change_rules,
    make_mesh,
    microbatches,
    put,
    replicated,
    resolve,
    use_mesh,
)
from jaxgpt.parallel.processes import process_count
from jaxgpt.parallel.sums import sums_by_device
from jaxgpt.train.loss import Objective, next_token_loss
from jaxgpt.train.optimizer import Numbers, make_optimizer, numbers_of, schedule
from jaxgpt.train.step import TrainState, gradient_sums, train_step
from jaxgpt.trainer.states import States, shardings_of


class Several(NamedTuple):
    """Batches for one call of up to K steps; the call uses the first n batches."""

    windows_KBT1: Any
    n: Any


@dataclass(eq=False)
class Program(States):
    """Training and evaluation of a config on a mesh, compiled at the first call.

    Frozen weights and optimizer hyperparameters are arguments of the compiled functions: new values need no recompilation.

    Attributes:
        objective: objective of training and evaluation, as in `build`.
        ops: operations of the decoder, as in `build`.
        note: advice about mesh, kernels and settings for the user, or "".
    """

    objective: Objective | None = None
    ops: Ops | None = None
    note: str = ""

    @property
    def microbatches(self) -> Microbatches:
        """Number of microbatches of a step, and rows per microbatch."""
        return microbatches(self.config.train, batch_ways(self.mesh))

    def batch(self, steps: int = 1) -> Any:
        """Return an abstract, padded batch `[rows, T + 1]`; for K > 1 steps, `Several` of `[K, rows, T + 1]`.

        With document ids, windows are `[T, 3]` (see `train.loss.split_windows`).
        """
        T = self.config.window
        shape = math.prod(self.microbatches), *((T, 3) if self.config.data.has_documents else (T + 1,))
        if steps == 1:
            return jax.ShapeDtypeStruct(shape, jnp.int32, sharding=batch_sharding(self.mesh))
        sharding = batch_sharding(self.mesh, several=True)
        return Several(jax.ShapeDtypeStruct((steps, *shape), jnp.int32, sharding=sharding), steps)

    def put(self, batch: Any) -> Any:
        """Put windows, or a tree of arrays of rows, on their devices, padded with rows of -1.

        `train.batch_size` rows are padded for `step`, any other number of rows for `eval`.
        """

        def put_rows(array: Any) -> jax.Array:
            n, *row = array.shape
            ways = batch_ways(self.mesh)
            training = n == self.config.train.batch_size
            rows = math.prod(self.microbatches) if training else math.ceil(n / ways) * ways
            return put(self.mesh, [array], (rows, *row))

        return jax.tree.map(put_rows, batch)

    def put_batches(self, batches: Sequence[Any]) -> Any:
        """Put 1 to `train.steps_per_call` batches for one call of `step` on their devices."""
        most = self.config.train.steps_per_call
        if not 0 < len(batches) <= most:
            raise UserError(f"expected 1 to {most} batches per call (train.steps_per_call), not {len(batches)}")
        if most == 1:
            return self.put(batches[0])
        shape = self.batch(most).windows_KBT1.shape
        return Several(put(self.mesh, batches, shape, several=True), len(batches))

    def step(self, state: TrainState, batch: Any) -> tuple[TrainState, dict[str, jax.Array]]:
        """Take one optimizer step on the result of `put`, or a step on each batch of `put_batches`.

        The given state is donated. Returns the next state, the metrics of `train_step` and, without a custom optimizer, `lr`.
        For several steps, metrics are `[K, ...]`, and zero beyond the last step.
        """
        return self._call(self._train, state, batch, self._numbers)

    def eval(self, params: Any, batch: Any) -> tuple[jax.Array, jax.Array]:
        """Compute the summed loss and the number of tokens of each window, for `params` or an EMA."""
        return self._call(self._eval, params, batch)

    def lower(self, state: TrainState, batch: Any) -> jax.stages.Lowered:
        """Lower `step` for concrete or abstract arguments, to inspect or compile it."""
        # Abstract arguments have the shardings of a call: otherwise a call would not find the compiled program in
        # JAX's cache.
        place = replicated(self.mesh)
        numbers = jax.tree.map(lambda x: jax.ShapeDtypeStruct((), x.dtype, sharding=place), self.numbers)
        function, frozen = self._train, self.abstract_frozen  # computed outside the mesh context
        with self._on_mesh():
            return function.lower(state, batch, numbers, frozen)

    @cached_property
    def decoder_ops(self) -> Ops:
        """The operations of the decoder."""
        return self.ops or best(self.config, self.mesh)

    def bound_objective(self, frozen: Any = ()) -> Objective:
        """Return the objective, by default the next-token loss, as a function of the `params` of a state."""
        config = self.config
        gpt = ScannedGPT if config.train.scan_layers else GPT
        model = self.model or gpt(config.model, self.decoder_ops, POLICIES[config.train.remat])
        objective = self.objective or next_token_loss(model.apply, config.train.loss_chunk)
        return lambda params, *batch_and_key: objective(self.merged(frozen, params), *batch_and_key)

    def bound_step(self, frozen: Any = (), numbers: Numbers | None = None) -> Any:
        """Return the train step `(state, batch) -> (state, metrics)`, with the config's `numbers` by default."""
        config, numbers = self.config, numbers or self.numbers
        step = partial(
            train_step,
            objective=self.bound_objective(frozen),
            optimizer=self.optimizer or make_optimizer(config, numbers),
            dropout_seed=config.train.seed if config.model.dropout else None,
            accumulation=self.microbatches.accumulation,
            sum_gradients=sums_by_device if self._sums_by_device() else gradient_sums,
            ema_decay=config.optim.ema_decay,
            spike_factor=config.optim.spike_factor,
        )

        def with_rate(state: TrainState, batch: Any) -> tuple[TrainState, dict[str, jax.Array]]:
            # The optimizer counts its updates: skipped updates do not advance the schedule.
            (_, count), *_ = optax.tree.get_all_with_path(state.opt_state, "count")
            state, metrics = step(state, batch)
            return state, metrics | {"lr": schedule(config, numbers)(count)}

        return step if self.optimizer else with_rate

    @property
    def numbers(self) -> Numbers:
        """The optimizer hyperparameters that are arguments of the step, such as the learning rate."""
        return jax.tree.map(np.float32, numbers_of(self.config.optim))

    @cached_property
    def _numbers(self) -> Numbers:
        """`numbers`, replicated over the devices."""
        return jax.jit(lambda numbers: numbers, out_shardings=replicated(self.mesh))(self.numbers)

    @cached_property
    def _train(self) -> jax.stages.Wrapped:
        def train(state: TrainState, batch: Any, numbers: Numbers, frozen: Any) -> Any:
            step = self.bound_step(frozen, numbers)
            return train_steps(state, batch, step) if isinstance(batch, Several) else step(state, batch)

        places = shardings_of(self.abstract_state), replicated(self.mesh)
        options = step_compile_options(self.mesh)
        return jax.jit(train, out_shardings=places, donate_argnums=0, compiler_options=options)

    @cached_property
    def _eval(self) -> jax.stages.Wrapped:
        def evaluate(params: Any, batch: Any, frozen: Any) -> Any:
            sums = self.bound_objective(frozen)(params, batch, None)
            return sums.loss_B, sums.count_B

        return jax.jit(evaluate, out_shardings=replicated(self.mesh))

    def _call(self, function: Any, *args: Any) -> Any:
        """Call a compiled function on the mesh, with the frozen weights as its last argument."""
        frozen = self.frozen  # computed outside the mesh context
        with self._on_mesh():
            return block_on_cpu_mesh(self.mesh, function(*args, frozen))

    def _on_mesh(self) -> AbstractContextManager[None]:
        """Map the logical axes of layers to the axes of the mesh within the context."""
        return use_mesh(self.mesh, self.config.model, self.rules)

    def _sums_by_device(self) -> bool:
        """Return whether to use `sums_by_device`: several CPU devices with replicated weights, and no dropout."""
        mesh = self.mesh
        if isinstance(mesh, AbstractMesh) or mesh.devices.flat[0].platform != "cpu" or self.config.model.dropout:
            return False
        weights = self.abstract_state.params, self.abstract_frozen
        whole = all(each.is_fully_replicated for each in jax.tree.leaves(shardings_of(weights)))
        return whole and 1 < mesh.shape["data"] == mesh.size


def train_steps(state: TrainState, batches: Several, step: Any) -> tuple[TrainState, dict[str, jax.Array]]:
    """Take the n steps of `batches` in a loop compiled once for any n; metrics are zero beyond n."""
    shapes = jax.eval_shape(step, state, batches.windows_KBT1[0])[1]
    zeros = jax.tree.map(lambda x: jnp.zeros((len(batches.windows_KBT1), *x.shape), x.dtype), shapes)

    def one(i: jax.Array, carry: tuple[TrainState, Any]) -> tuple[TrainState, Any]:
        state, metrics = step(carry[0], batches.windows_KBT1[i])
        return state, jax.tree.map(lambda row, x: row.at[i].set(x), carry[1], metrics)

    result: tuple[TrainState, Any] = jax.lax.fori_loop(0, batches.n, one, (state, zeros))
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
        config: settings of the run, with `model.vocab_size` set.
        optimizer: optax transformation to use instead of `config.optim`, which then sets only `ema_decay` and the skipping
            of updates. The metrics then have no `lr`. With `train.scan_layers`, the optimizer receives one array
            for each weight of a block, stacked over the layers.
        rules: changes to the sharding table (`jaxgpt.parallel.mesh.RULES`), from logical axis to mesh axes: `{"length":
            ("tensor",)}` shards the activations between blocks along the sequence. Losses match a single device up to rounding.
        base: with `lora.rank`, the frozen weights, with unstacked layers; None: random weights.
        model: module to train instead of `GPT(config.model, ...)`, with weights of the same names; with `train.scan_layers`,
            a `ScannedGPT` (`model/scan.py`).
        objective: objective to use instead of `next_token_loss`.
        ops: operations to use instead of `jaxgpt.kernels.best(config, mesh)`.

    Raises:
        UserError: if a rule is invalid (see `change_rules`), or a rule, the mesh or a setting does not fit the devices, the
            batch or the model.
    """
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
    kernel_note = choose_attention(config, device)[1] if ops is None and model is None else ""
    note = "; ".join(filter(None, [note, kernel_note, precision_note(config.train.compute_dtype, device)]))
    table = change_rules(rules or {})
    program = Program(config, mesh, optimizer, model, table, objective=objective, ops=ops, note=note)
    if rules:
        _ = program.abstract_state, program.abstract_frozen  # validation of the rules on every array
    if base is not None:
        program.put_base(base)
    return program


def check_remat(policy: str, device: jax.Device) -> None:
    """Raise `UserError` if a device lacks the pinned host memory that the policy `offload` needs."""
    if policy == "offload" and "pinned_host" not in {memory.kind for memory in device.addressable_memories()}:
        raise UserError(
            f"train.remat offload needs pinned host memory, which {device.platform} devices lack: use --train.remat dots"
        )
