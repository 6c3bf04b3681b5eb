"""Where a config becomes a program: mesh, model, optimizer, and the compiled functions over them. Built here only."""

from __future__ import annotations

import math
from collections.abc import Callable, Iterator
from concurrent.futures import ThreadPoolExecutor
from contextlib import AbstractContextManager, contextmanager
from dataclasses import dataclass, field
from functools import cache, cached_property, partial
from typing import Any

import flax.linen as nn
import jax
import jax.numpy as jnp
import numpy as np
import optax
from jax.sharding import AbstractMesh, Mesh

from jaxgpt.config import Config, UserError
from jaxgpt.model import GPT
from jaxgpt.model.params import boxed_params
from jaxgpt.model.scan import stack_layers, unstack_layers
from jaxgpt.parallel import (
    Microbatches,
    batch_sharding,
    everywhere,
    make_mesh,
    microbatches,
    on_mesh,
    quick_compile_options,
    resolve,
    settle,
    shardings_like,
)
from jaxgpt.parallel.mesh import RULES, Rules, change_rules
from jaxgpt.parallel.processes import count, tells_of_loss
from jaxgpt.train.loss import chunked_cross_entropy, cross_entropy
from jaxgpt.train.optimizer import ignored_settings, make_optimizer, schedule
from jaxgpt.train.step import LossFn, TrainState, eval_step, init_state, train_step, train_steps
from jaxgpt.trainer.attention_choice import choose_attention


@dataclass(frozen=True)
class Program:
    """A config on a mesh, ready to run.

    With `train.scan_layers` the state is stacked (`model/scan.py`) from its first moment on: stacking within the step would
    copy the weights and the gradients every time, and the optimizer would be compiled for each layer. It is per layer
    outside: where weights come in (`start_from`, `place`), and in checkpoints (`to_checkpoint`, `from_checkpoint`).

    Attributes:
        config: the run; the vocabulary is known.
        mesh: the devices.
        note: what should be said about mesh, kernels and settings, if anything.
        transformation: an optimizer instead of the one that `config.optim` names; None: that one.
        rules: the sharding table.
    """

    config: Config
    mesh: Mesh
    note: str = ""
    transformation: optax.GradientTransformation | None = None
    rules: Rules = field(default_factory=lambda: RULES, hash=False)

    @property
    def model(self) -> GPT:
        train = self.config.train
        # A mesh without devices is one that is only counted with.
        device = None if isinstance(self.mesh, AbstractMesh) else self.mesh.devices.flat[0]
        kernel, _ = choose_attention(self.config, device)
        return GPT(self.config.model, jnp.dtype(train.compute_dtype), train.remat, kernel)

    @property
    def ways(self) -> int:
        """Parts into which the rows of a batch are split over the devices."""
        ways: int = self.mesh.shape["data"] * self.mesh.shape["fsdp"]
        return ways

    @property
    def microbatches(self) -> Microbatches:
        """The microbatches of a step on this mesh."""
        return microbatches(self.config.train, self.ways)

    @cached_property
    def optimizer(self) -> optax.GradientTransformation:
        return make_optimizer(self.config, self.transformation)

    @cached_property
    def _fresh(self) -> Any:
        return jax.jit(lambda seed: self._layout(self._init(seed)))  # traced once for shapes and numbers

    @cached_property
    def _fresh_shapes(self) -> tuple[Any, TrainState]:
        shapes: tuple[Any, TrainState] = jax.eval_shape(self._fresh, 0)
        return shapes

    @cached_property
    def state_shardings(self) -> TrainState:
        """The placement of every leaf of the state."""
        return self._shardings(*self._fresh_shapes)

    @property
    def abstract_state(self) -> TrainState:
        """Shapes, types and placements of the state."""
        return _abstract(self._fresh_shapes[1], self.state_shardings)

    @cached_property
    def abstract_checkpoint(self) -> TrainState:
        """Shapes, types and placements of a checkpoint's state, for restoring into."""
        if not self.config.train.scan_layers:
            return self.abstract_state
        boxed, state = jax.eval_shape(self._init, 0)
        return _abstract(state, self._shardings(boxed, state))

    def _shardings(self, boxed: Any, state: TrainState) -> TrainState:
        placed: TrainState = shardings_like(state, boxed, self.config.model, self.mesh, self.rules)
        return placed

    def _layout(self, tree: Any) -> Any:
        return stack_layers(tree) if self.config.train.scan_layers else tree

    def _init(self, seed: jax.typing.ArrayLike) -> tuple[Any, TrainState]:
        """Fresh weights with their logical axes, and the state that begins with them."""
        boxed = boxed_params(GPT(self.config.model), seed)
        return boxed, init_state(nn.unbox(boxed), self.optimizer, self.config.optim.ema_decay > 0)

    def init(self) -> TrainState:
        """The state before the first update, made where it belongs."""
        init = jax.jit(
            lambda seed: self._fresh(seed)[1],
            out_shardings=self.state_shardings,
            compiler_options=quick_compile_options(self.mesh),
        )
        return init(self.config.train.seed)

    def _on_mesh(self) -> AbstractContextManager[None]:
        return on_mesh(self.mesh, self.config.model, self.rules)

    @contextmanager
    def compiling(self) -> Iterator[None]:
        """The update is compiled meanwhile, in a thread of its own. `step` finds it, for jax keeps what it has compiled.

        The end of this waits for the compiler, after an error as well, and raises what the compiler raises.
        """
        state = self.abstract_state  # traced here: cached properties are not made for two threads
        shape = self._call_shape
        windows = jax.ShapeDtypeStruct(shape, jnp.int32, sharding=batch_sharding(self.mesh, len(shape) == 3))
        with ThreadPoolExecutor(1) as pool:
            compiled = pool.submit(lambda: self.compile(self.lower(state, windows)))
            yield
            compiled.result()

    def start_from(self, params: Any) -> TrainState:
        """The state before the first update, with weights that exist already."""
        init = jax.jit(
            lambda params: self._layout(init_state(params, self.optimizer, self.config.optim.ema_decay > 0)),
            out_shardings=self.state_shardings,
            compiler_options=quick_compile_options(self.mesh),
        )
        return init(params)

    def place(self, params: Any) -> Any:
        """Weights per layer as `eval` takes them."""
        return settle(self.mesh, jax.device_put(self._layout(params), self.state_shardings.params))

    def to_checkpoint(self, state: TrainState) -> TrainState:
        """The state per layer: a copy, for which the devices need room while it is written."""
        if not self.config.train.scan_layers:
            return state
        unstack = partial(unstack_layers, n_layer=self.config.model.n_layer)
        return self._convert(unstack, state, jax.tree.map(lambda leaf: leaf.sharding, self.abstract_checkpoint))

    def from_checkpoint(self, state: TrainState) -> TrainState:
        """The inverse of `to_checkpoint`."""
        return self._convert(self._layout, state, self.state_shardings) if self.config.train.scan_layers else state

    def _convert(self, layout: Any, tree: Any, places: Any) -> Any:
        return settle(self.mesh, jax.jit(layout, out_shardings=places)(tree))

    @property
    def _update(self) -> Any:
        train, model = self.config.train, self.config.model
        loss_fn = make_loss_fn(self.model, train.loss_chunk)
        return partial(
            train_step,
            loss_fn=ignore_padding(loss_fn) if self._step_rows > train.batch_size else loss_fn,
            optimizer=self.optimizer,
            learning_rate=schedule(self.config) if self.transformation is None else None,
            seed=train.seed,
            accumulation=self.microbatches.accumulation,
            dropout=model.dropout > 0,
            ema_decay=self.config.optim.ema_decay,
        )

    @cached_property
    def _step(self) -> Any:
        return jax.jit(
            self._update,
            in_shardings=(self.state_shardings, batch_sharding(self.mesh)),
            out_shardings=(self.state_shardings, everywhere(self.mesh)),
            donate_argnums=0,
        )

    @cached_property
    def _steps(self) -> Any:
        return jax.jit(
            partial(train_steps, step=self._update),
            in_shardings=(self.state_shardings, batch_sharding(self.mesh, several=True), everywhere(self.mesh)),
            out_shardings=(self.state_shardings, everywhere(self.mesh)),
            donate_argnums=0,
        )

    @property
    def _call_shape(self) -> tuple[int, ...]:
        """Shape of the ids of a call: one batch, `[B, T + 1]`, or several, `[K, B, T + 1]`, B with padding."""
        train = self.config.train
        shape = self._step_rows, self.config.model.block_size + 1
        return (train.steps_per_call, *shape) if train.steps_per_call > 1 else shape

    @property
    def _step_rows(self) -> int:
        """Windows of a step, padding included."""
        count, rows = self.microbatches
        return count * rows

    @cached_property
    def _eval(self) -> Any:
        return jax.jit(
            partial(eval_step, loss_fn=make_loss_fn(self.model, self.config.train.loss_chunk)),
            in_shardings=(self.state_shardings.params, batch_sharding(self.mesh)),
            out_shardings=everywhere(self.mesh),
        )

    def put(self, windows_BT1: np.ndarray) -> jax.Array:
        """Put a batch on its devices, padded: that of a step as `step` takes it, another one as `eval` takes it."""
        n, width = windows_BT1.shape
        rows = self._step_rows if n == self.config.train.batch_size else math.ceil(n / self.ways) * self.ways
        return self.read((rows, width), partial(_padded, n, width, windows_BT1.__getitem__))

    def read(self, shape: tuple[int, ...], rows: Callable[[slice], np.ndarray]) -> jax.Array:
        """A batch or several of a shape, on their devices. Asked for are only rows of this process's devices, each once."""
        part = cache(lambda first, last: rows(slice(first, last)))

        def shard(index: Any) -> np.ndarray:
            return part(*index[-2].indices(shape[-2])[:2])

        return jax.make_array_from_callback(shape, batch_sharding(self.mesh, len(shape) == 3), shard)

    def batches(self, n: int, rows: Callable[[int, slice], np.ndarray]) -> jax.Array:
        """Put the batches of the next n steps on their devices, for `advance`.

        Args:
            n: steps, `train.steps_per_call` at most.
            rows: gives some of the rows of the first, second, ... batch.
        """
        shape = self._call_shape

        def one(i: int, some: slice) -> np.ndarray:
            return _padded(self.config.train.batch_size, shape[-1], partial(rows, i), some)

        if len(shape) == 2:
            return self.read(shape, partial(one, 0))

        def several(some: slice) -> np.ndarray:
            made = np.stack([one(i, some) for i in range(n)])
            return np.pad(made, ((0, shape[0] - n), (0, 0), (0, 0)))

        return self.read(shape, several)

    def advance(
        self, state: TrainState, batches: jax.Array, n: int
    ) -> tuple[TrainState, Callable[[], list[dict[str, Any]]]]:
        """The next n updates, `train.steps_per_call` at most; the state that goes in is used up.

        Returns:
            The state after, and what waits for the figures of each update and gives them.
        """
        if batches.ndim == 2:
            state, figures = self.step(state, batches)
            return state, lambda: [jax.device_get(figures)]
        with self._on_mesh():
            state, figures = settle(self.mesh, self._steps(state, batches, n))

        def read() -> list[dict[str, Any]]:
            host = jax.device_get(figures)
            return [{name: value[i] for name, value in host.items()} for i in range(n)]

        return state, read

    def step(self, state: TrainState, windows_BT1: jax.Array) -> tuple[TrainState, dict[str, jax.Array]]:
        """One update; the state that goes in is used up."""
        with self._on_mesh():
            return settle(self.mesh, self._step(state, windows_BT1))

    def lower(self, state: TrainState, windows: Any) -> jax.stages.Lowered:
        """The program for such a state and a batch, or several, ready to be compiled: to be looked into, or for devices that
        are not here."""
        with self._on_mesh():
            several = windows.ndim == 3
            lowered: jax.stages.Lowered = (
                self._steps.lower(state, windows, 1) if several else self._step.lower(state, windows)
            )
            return lowered

    def compile(self, lowered: jax.stages.Lowered) -> jax.stages.Compiled:
        """Compile what `lower` gives.

        Raises:
            UserError: the compiler fails, with what to change.
        """
        try:
            return lowered.compile()
        except jax.errors.JaxRuntimeError as e:
            if tells_of_loss(e):
                raise
            raise UserError(explain_failure(e, self.mesh, self.config.train.microbatch)) from None

    def eval(self, params: Any, windows_BT1: jax.Array) -> tuple[jax.Array, jax.Array]:
        """Summed loss and number of tokens of each window."""
        with self._on_mesh():
            return settle(self.mesh, self._eval(params, windows_BT1))


def build(config: Config, optimizer: optax.GradientTransformation | None = None, rules: Rules | None = None) -> Program:
    """Build the program of a config on the devices there are.

    Args:
        config: the run; the vocabulary is known.
        optimizer: instead of the one that `config.optim` names, whose settings then count for nothing (but for `ema_decay`
            and those of skipped updates); the metrics have no `lr`. None: that one. With `train.scan_layers` it sees the
            weights of all layers as one array.
        rules: changes to the sharding table (`jaxgpt.parallel.mesh.RULES`), logical axis to mesh axes: `{"length":
            ("tensor",)}` splits the activations between blocks along the sequence. The numbers stay those of one device.

    Raises:
        UserError: a rule names an unknown axis; the mesh does not fit the devices, the batch or the model; or the devices lack
            what the config asks for.
    """
    sizes, note = resolve(config, jax.device_count(), count(), jax.default_backend() == "tpu")
    mesh = make_mesh(sizes)
    device = mesh.devices.flat[0]
    if config.train.remat == "offload" and not has_host_memory(device):
        raise UserError(f"train.remat offload needs memory of the host that {device.platform} devices reach: use dots")
    _, kernel_note = choose_attention(config, device)
    optim_note = ignored_settings(config.optim) if optimizer is None else ""
    return Program(
        config, mesh, "; ".join(filter(None, [note, kernel_note, optim_note])), optimizer, change_rules(rules or {})
    )


def _padded(n: int, width: int, rows: Callable[[slice], np.ndarray], some: slice) -> np.ndarray:
    """Rows `some` of a batch of n windows and, beyond them, windows of -1, which have no targets."""
    if some.stop <= n:
        return rows(some)
    out = np.full((some.stop - some.start, width), -1, np.int32)
    if some.start < n:
        out[: n - some.start] = rows(slice(some.start, n))
    return out


def explain_failure(error: jax.errors.JaxRuntimeError, mesh: Mesh, microbatch: int) -> str:
    """Say in one line what XLA could not do and which settings may help."""
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


def ignore_padding(loss_fn: LossFn) -> LossFn:
    """The same loss for batches with windows of -1: they have no targets, and any id does as their input."""

    def padded_loss_fn(params: Any, tokens_BT: jax.Array, targets_BT: jax.Array, key: jax.Array | None) -> jax.Array:
        return loss_fn(params, jnp.maximum(tokens_BT, 0), targets_BT, key)

    return padded_loss_fn


def has_host_memory(device: jax.Device) -> bool:
    """Whether programs on a device can keep arrays in the host's memory."""
    return "pinned_host" in {memory.kind for memory in device.addressable_memories()}


def _abstract(state: TrainState, places: TrainState) -> TrainState:
    return jax.tree.map(lambda leaf, place: jax.ShapeDtypeStruct(leaf.shape, leaf.dtype, sharding=place), state, places)


def make_loss_fn(model: GPT, chunk: int = 0) -> LossFn:
    """Make the loss function that `train_step` takes: cross-entropy of the model's logits, `-log softmax(logits)[target]`.

    Args:
        model: the architecture.
        chunk: positions of a window whose logits are held at once, at the price of computing them twice; 0: all.

    Returns:
        `loss_fn(params, tokens_BT, targets_BT, key) -> losses_BT`, float32 in nats; 0 where the target is negative. `key` is
        that of the dropout masks, or None.
    """

    def loss_fn(params: Any, tokens_BT: jax.Array, targets_BT: jax.Array, key: jax.Array | None) -> jax.Array:
        call: Any = partial(model.apply, {"params": params})
        if not chunk:
            return cross_entropy(call(tokens_BT, key), targets_BT)
        return chunked_cross_entropy(
            partial(call, method="head"), call(tokens_BT, key, method="hidden"), targets_BT, chunk
        )

    return loss_fn
