"""Where a config becomes a program: mesh, model, optimizer, and the compiled functions over them. Built here only."""

from __future__ import annotations

from dataclasses import dataclass
from functools import cached_property, partial
from typing import Any

import flax.linen as nn
import jax
import jax.numpy as jnp
import numpy as np
import optax
from jax.sharding import Mesh

from jaxgpt.config import Config, ModelConfig
from jaxgpt.model import GPT
from jaxgpt.parallel import batch_sharding, make_mesh, on_mesh, resolve, settle, shardings
from jaxgpt.train.optimizer import make_optimizer, schedule
from jaxgpt.train.step import ApplyFn, TrainState, eval_step, init_state, stream, train_step


@dataclass(frozen=True)
class Program:
    """A config on a mesh, ready to run.

    Attributes:
        config: the run; the vocabulary is known.
        mesh: the devices.
        note: what should be said about the mesh, if anything.
    """

    config: Config
    mesh: Mesh
    note: str = ""

    @property
    def model(self) -> GPT:
        train = self.config.train
        return GPT(self.config.model, dtype=jnp.dtype(train.compute_dtype), remat=train.remat)

    @cached_property
    def optimizer(self) -> optax.GradientTransformation:
        return make_optimizer(self.config)

    @cached_property
    def _boxed_state(self) -> TrainState:
        return jax.eval_shape(self._init, 0)

    @cached_property
    def state_shardings(self) -> TrainState:
        """The placement of every leaf of the state."""
        return shardings(self._boxed_state, self.config.model, self.mesh)

    @property
    def abstract_state(self) -> TrainState:
        """Shapes, types and placements of the state, for restoring into."""
        return jax.tree.map(
            lambda leaf, place: jax.ShapeDtypeStruct(leaf.shape, leaf.dtype, sharding=place),
            nn.unbox(self._boxed_state),
            self.state_shardings,
        )

    def _init(self, seed: jax.typing.ArrayLike) -> TrainState:
        optim = self.config.optim
        return init_state(init_params(self.model, seed), self.optimizer, optim.ema_decay > 0, optim.guarded)

    def init(self) -> TrainState:
        """The state before the first update, made where it belongs."""
        init = jax.jit(lambda seed: nn.unbox(self._init(seed)), out_shardings=self.state_shardings)
        return init(self.config.train.seed)

    def start_from(self, params: Any) -> TrainState:
        """The state before the first update, with weights that exist already."""
        optim = self.config.optim
        init = partial(init_state, optimizer=self.optimizer, ema=optim.ema_decay > 0, guard=optim.guarded)
        return jax.jit(init, out_shardings=self.state_shardings)(params)

    @cached_property
    def _step(self) -> Any:
        train, model = self.config.train, self.config.model
        step = partial(
            train_step,
            apply_fn=make_apply_fn(self.model),
            optimizer=self.optimizer,
            learning_rate=schedule(self.config),
            seed=train.seed,
            accumulation=train.accumulation,
            dropout=model.dropout > 0,
            ema_decay=self.config.optim.ema_decay,
            spike_factor=self.config.optim.spike_factor,
        )
        return jax.jit(
            step,
            in_shardings=(self.state_shardings, batch_sharding(self.mesh)),
            out_shardings=(self.state_shardings, None),
            donate_argnums=0,
        )

    @cached_property
    def _eval(self) -> Any:
        return jax.jit(
            partial(eval_step, apply_fn=make_apply_fn(self.model)),
            in_shardings=(self.state_shardings.params, batch_sharding(self.mesh)),
        )

    def put(self, windows_BT1: np.ndarray) -> jax.Array:
        """A batch on its devices."""
        return jax.device_put(windows_BT1, batch_sharding(self.mesh))

    def step(self, state: TrainState, windows_BT1: jax.Array) -> tuple[TrainState, dict[str, jax.Array]]:
        """One update; the state that goes in is used up."""
        with on_mesh(self.mesh, self.config.model):
            return settle(self.mesh, self._step(state, windows_BT1))

    def eval(self, params: Any, windows_BT1: jax.Array) -> tuple[jax.Array, jax.Array]:
        """Summed loss and number of tokens of each window."""
        with on_mesh(self.mesh, self.config.model):
            return settle(self.mesh, self._eval(params, windows_BT1))


def build(config: Config) -> Program:
    """The program of a config, on the devices there are.

    Raises:
        UserError: the mesh does not fit the devices, the batch or the model.
    """
    mesh, note = resolve(config, jax.device_count())
    return Program(config, make_mesh(mesh), note)


def init_params(model: GPT, seed: jax.typing.ArrayLike) -> Any:
    """Fresh weights, in linen's boxes that carry their logical axes."""
    return model.init(stream(seed, "init"), jnp.zeros((1, 1), jnp.int32))["params"]


def abstract_params(config: ModelConfig) -> Any:
    """Shapes and types of a model's weights; nothing is computed."""
    return nn.unbox(jax.eval_shape(partial(init_params, GPT(config)), 0))


def make_apply_fn(model: GPT) -> ApplyFn:
    """The model as a function of weights, ids and, for dropout, a key."""

    def apply_fn(params: Any, tokens_BT: jax.Array, key: jax.Array | None) -> jax.Array:
        rngs = {} if key is None else {"dropout": key}
        logits_BTV: Any = model.apply({"params": params}, tokens_BT, deterministic=key is None, rngs=rngs)
        return logits_BTV

    return apply_fn
