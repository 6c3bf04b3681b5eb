"""The compiled functions of training and evaluation, and the way from a config to them."""

from __future__ import annotations

import math
from collections.abc import Callable, Iterator, Sequence
from concurrent.futures import ThreadPoolExecutor
from contextlib import contextmanager
from dataclasses import dataclass, field
from functools import cached_property, partial
from typing import Any

import jax
import jax.numpy as jnp
import optax
from jax.sharding import AbstractMesh, Mesh

from jaxgpt.checkpoint.base import Base
from jaxgpt.config import Config, UserError
from jaxgpt.model import GPT
from jaxgpt.model.lora import merge
from jaxgpt.parallel import block_on_cpu_mesh, make_mesh, replicated, resolve
from jaxgpt.parallel.mesh import Rules, batch_ways, change_rules
from jaxgpt.parallel.processes import count, is_peer_failure
from jaxgpt.parallel.put import put
from jaxgpt.train.loss import LossFn, make_loss_fn
from jaxgpt.train.optimizer import ignored_settings
from jaxgpt.train.step import TrainState, eval_step, train_step, train_steps
from jaxgpt.trainer.attention_choice import choose_attention
from jaxgpt.trainer.layout import Layout, make_layout, placements
from jaxgpt.trainer.state import fresh_state, frozen_weights


@dataclass(frozen=True)
class Program:
    """Training and evaluation of a layout, compiled where they are first called.

    Attributes:
        layout: config, mesh and optimizer; shapes and placements.
        note: what the user should know about mesh, kernels and settings; or "".
        base: the frozen weights of adapters, on their devices; None: random ones.
    """

    layout: Layout
    note: str = ""
    base: Base | None = field(default=None, repr=False, compare=False)

    @cached_property
    def frozen(self) -> Any:
        """The frozen weights, on their devices; `()` if all weights are trained."""
        return frozen_weights(self.layout) if self.base is None else self.base.params

    def weights(self, trained: Any) -> Any:
        """Return the weights of the model: the trained ones, or the frozen ones merged with the trained adapters."""
        if not self.layout.frozen:
            return trained
        return block_on_cpu_mesh(self.layout.mesh, self._merge(self.frozen, trained))

    def init(self) -> TrainState:
        """Make the state before the first step."""
        return fresh_state(self.layout)

    def put(self, windows_BT1: Any) -> jax.Array:
        """Put windows on their devices: a training batch padded for `step`, any other number of windows padded for `eval`."""
        n, *window = windows_BT1.shape
        ways = batch_ways(self.layout.mesh)
        training = n == self.layout.config.train.batch_size
        rows = math.prod(self.layout.microbatches) if training else math.ceil(n / ways) * ways
        return put(self.layout.mesh, [windows_BT1], (rows, *window))

    def put_steps(self, batches: Sequence[Any]) -> jax.Array:
        """Put the batches of the next steps, `train.steps_per_call` at most, on their devices, for `steps`."""
        steps = self.layout.config.train.steps_per_call
        return put(self.layout.mesh, batches, self.layout.batch(steps).shape, several=steps > 1)

    def step(self, state: TrainState, windows_BT1: jax.Array) -> tuple[TrainState, dict[str, jax.Array]]:
        """Take one optimizer step. The given state is donated."""
        return self._call(self._train[False], state, windows_BT1)

    def steps(
        self, state: TrainState, batches: jax.Array, n: int
    ) -> tuple[TrainState, Callable[[], list[dict[str, Any]]]]:
        """Take the next n optimizer steps. The given state is donated.

        Args:
            state: the state before.
            batches: from `put_steps`.
            n: number of batches in it.

        Returns:
            The state after, and a function that waits for the metrics of the steps and returns them.
        """
        if not self._several(batches):
            state, metrics = self.step(state, batches)
            return state, lambda: [jax.device_get(metrics)]
        state, metrics = self._call(self._train[True], state, batches, n)

        def read() -> list[dict[str, Any]]:
            host = jax.device_get(metrics)
            return [{name: value[i] for name, value in host.items()} for i in range(n)]

        return state, read

    def eval(self, params: Any, windows_BT1: jax.Array) -> tuple[jax.Array, jax.Array]:
        """Compute the summed loss and the number of tokens of each window."""
        return self._call(self._eval, params, windows_BT1)

    def lower(self, state: TrainState, batches: Any) -> jax.stages.Lowered:
        """Lower the train step for a state and one or several batches, of arrays or of shapes: to inspect or compile it."""
        several, frozen = self._several(batches), self.layout.frozen
        n = (1,) if several else ()
        with self.layout.use_mesh():
            lowered: jax.stages.Lowered = self._train[several].lower(state, batches, *n, frozen)
            return lowered

    def _call(self, function: Any, *args: Any) -> Any:
        """Call a compiled function on the mesh, with the frozen weights as its last argument."""
        frozen = self.frozen  # may be made here, outside of the mesh
        with self.layout.use_mesh():
            return block_on_cpu_mesh(self.layout.mesh, function(*args, frozen))

    def _several(self, batches: Any) -> bool:
        """Return whether these are the batches of several steps."""
        return batches.ndim > len(self.layout.batch().shape)

    @cached_property
    def _train(self) -> dict[bool, Any]:
        """The train step of the batch of one step, and of those of several."""
        layout, rest = self.layout, replicated(self.layout.mesh)
        states, frozen = placements(layout.state), placements(layout.frozen)
        one, several = layout.batch().sharding, layout.batch(2).sharding
        options: Any = {"out_shardings": (states, rest), "donate_argnums": 0}

        def step(state: TrainState, batch: jax.Array, frozen: Any) -> Any:
            return bound_step(layout, frozen)(state, batch)

        def steps(state: TrainState, batches: jax.Array, n: jax.Array, frozen: Any) -> Any:
            return train_steps(state, batches, n, step=bound_step(layout, frozen))

        # The names are those of the compiled programs, which traces and profiles show.
        step.__name__, steps.__name__ = train_step.__name__, train_steps.__name__
        return {
            False: jax.jit(step, in_shardings=(states, one, frozen), **options),
            True: jax.jit(steps, in_shardings=(states, several, rest, frozen), **options),
        }

    @cached_property
    def _merge(self) -> Any:
        merged = partial(merge, alpha=self.layout.config.lora.alpha)
        return jax.jit(merged, out_shardings=placements(self.layout.frozen))

    @cached_property
    def _eval(self) -> Any:
        layout = self.layout

        def eval_batch(params: Any, windows_BT1: jax.Array, frozen: Any) -> Any:
            return eval_step(params, windows_BT1, loss_fn=loss_of(layout, frozen))

        eval_batch.__name__ = eval_step.__name__
        return jax.jit(
            eval_batch,
            in_shardings=(placements(layout.state.params), layout.batch().sharding, placements(layout.frozen)),
            out_shardings=replicated(layout.mesh),
        )


def loss_of(layout: Layout, frozen: Any = ()) -> LossFn:
    """Make the loss function of a layout, with the attention kernel of its devices.

    Args:
        layout: the layout.
        frozen: the frozen weights, if adapters are trained: the loss is then a function of the adapters.
    """
    config, alpha = layout.config, layout.config.lora.alpha
    # An abstract mesh has no devices: it is for estimates.
    device = None if isinstance(layout.mesh, AbstractMesh) else layout.mesh.devices.flat[0]
    kernel, _ = choose_attention(config, device)
    model = GPT(config.model, jnp.dtype(config.train.compute_dtype), config.train.remat, kernel)
    loss_fn = make_loss_fn(model.apply, config.train.loss_chunk)
    if not config.lora.rank:
        return loss_fn
    return lambda adapters, *batch: loss_fn(merge(frozen, adapters, alpha), *batch)


def bound_step(layout: Layout, frozen: Any = ()) -> Any:
    """Return the train step of a layout, `(state, batch) -> (state, metrics)`; `frozen` as in `loss_of`."""
    config = layout.config
    return partial(
        train_step,
        loss_fn=loss_of(layout, frozen),
        optimizer=layout.optimizer,
        learning_rate=layout.learning_rate,
        seed=config.train.seed,
        accumulation=layout.microbatches.accumulation,
        dropout=config.model.dropout > 0,
        ema_decay=config.optim.ema_decay,
        data_axis=_data_axis(layout),
    )


def _data_axis(layout: Layout) -> str | None:
    """Return the `data_axis` of `train_step`: "data" for CPU devices that divide only the batch, else None.

    The compiler would add every array over the devices by itself: 3 of the 40 ms of a step of nanoGPT's CPU model.
    """
    mesh = layout.mesh
    on_cpu = not isinstance(mesh, AbstractMesh) and mesh.devices.flat[0].platform == "cpu"
    whole = all(place.is_fully_replicated for place in jax.tree.leaves(placements(layout.state.params)))
    return "data" if on_cpu and whole and mesh.size == mesh.shape["data"] > 1 else None


@contextmanager
def compiling(program: Program) -> Iterator[None]:
    """Within this, the train step is compiled in another thread. JAX keeps what it compiles, so `step` finds it.

    Leaving waits for the compiler, also after an error, and raises what the compiler raises.
    """
    layout = program.layout
    batches = layout.batch(layout.config.train.steps_per_call)
    state, _ = layout.state, layout.frozen  # traced in this thread
    with ThreadPoolExecutor(1) as pool:
        compiled = pool.submit(lambda: compile_lowered(layout, program.lower(state, batches)))
        yield
        compiled.result()


def compile_lowered(layout: Layout, lowered: jax.stages.Lowered) -> jax.stages.Compiled:
    """Compile what `Program.lower` returns.

    Raises:
        UserError: the compiler fails, with what to change.
    """
    try:
        return lowered.compile()
    except jax.errors.JaxRuntimeError as e:
        if is_peer_failure(e):
            raise
        raise UserError(explain_failure(e, layout.mesh, layout.config.train.microbatch)) from None


def build(
    config: Config,
    optimizer: optax.GradientTransformation | None = None,
    rules: Rules | None = None,
    base: Base | None = None,
) -> Program:
    """Build the program of a config on the available devices.

    Args:
        config: the run; the vocabulary is known.
        optimizer: any optax transformation, used instead of the one that `optim.name` names. Of `config.optim`, only
            `ema_decay` and the settings of skipped updates are then read, and the metrics have no `lr`. With
            `train.scan_layers` it sees the weights of all layers as one array.
        rules: changes to the sharding table (`jaxgpt.parallel.mesh.RULES`), logical axis to mesh axes: `{"length":
            ("tensor",)}` splits the activations between blocks along the sequence. Losses are those of one device.
        base: with `lora.rank`, the weights per layer that the adapters change; None: random ones.

    Raises:
        UserError: a rule names an unknown axis, or splits two axes of an array along the same mesh axis; the mesh does not
            fit the devices, the batch or the model; or the devices do not support a setting.
    """
    sizes, note = resolve(config, jax.device_count(), count(), jax.default_backend() == "tpu")
    mesh = make_mesh(sizes)
    device = mesh.devices.flat[0]
    if config.train.remat == "offload" and not has_host_memory(device):
        raise UserError(f"train.remat offload needs memory of the host that {device.platform} devices reach: use dots")
    _, kernel_note = choose_attention(config, device)
    optim_note = ignored_settings(config.optim) if optimizer is None else ""
    layout = make_layout(config, mesh, optimizer, change_rules(rules or {}))
    if rules:
        _ = layout.state, layout.frozen  # places every array, which checks the rules
    if base is not None:
        base = base._replace(params=frozen_weights(layout, base.params))
    return Program(layout, "; ".join(filter(None, [note, kernel_note, optim_note])), base)


def explain_failure(error: jax.errors.JaxRuntimeError, mesh: Mesh, microbatch: int) -> str:
    """Explain a failure of XLA in one line, with the settings that may help."""
    said = " ".join(str(error).split())[:300]
    shape = "mesh " + " x ".join(f"{axis} {size}" for axis, size in mesh.shape.items())
    if "RESOURCE_EXHAUSTED" in said:
        return (
            f"out of device memory (train.microbatch {microbatch}, {shape}): {said}; lower train.microbatch, "
            "set --train.remat dots or full, or split the weights with --mesh.data 1 --mesh.fsdp -1"
        )
    return (
        f"the compiler fails on this step ({shape}): {said}; try mesh sizes that are powers of two, "
        "--train.attention xla, or another version of jax"
    )


def has_host_memory(device: jax.Device) -> bool:
    """Return whether programs on a device can keep arrays in host memory."""
    return "pinned_host" in {memory.kind for memory in device.addressable_memories()}
