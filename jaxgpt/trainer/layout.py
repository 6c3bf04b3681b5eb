"""A config on a mesh, without arrays: the shapes, types and placements of states and batches."""

from __future__ import annotations

import math
from contextlib import AbstractContextManager
from dataclasses import dataclass, field
from functools import cached_property, partial
from typing import Any, TypeVar

import flax.linen as nn
import jax
import jax.numpy as jnp
import optax
from jax.sharding import Mesh

from jaxgpt.config import Config
from jaxgpt.model import GPT
from jaxgpt.model.lora import model_adapters
from jaxgpt.model.params import boxed_params
from jaxgpt.model.scan import stack_layers, unstack_layers
from jaxgpt.ops.random import named_key
from jaxgpt.parallel import Microbatches, batch_sharding, microbatches, shardings_like, use_mesh
from jaxgpt.parallel.mesh import RULES, Rules, batch_ways
from jaxgpt.train.optimizer import make_optimizer, schedule
from jaxgpt.train.step import TrainState, init_state

T = TypeVar("T")


@dataclass(frozen=True)
class Layout:
    """The config, mesh and optimizer of a run, with the shapes and shardings of its arrays.

    With `train.scan_layers` the layers of a state are stacked (`model/scan.py`) from the start: stacking within the step would
    copy weights and gradients each time, and the optimizer would be compiled for each layer. Checkpoints are per layer.

    Attributes:
        config: the run; its vocabulary is known.
        mesh: the devices; for estimates, which compile nothing, an `AbstractMesh`.
        optimizer: of the run.
        learning_rate: its schedule, for the metrics; None: unknown.
        rules: the sharding table.
    """

    config: Config
    mesh: Mesh
    optimizer: optax.GradientTransformation
    learning_rate: optax.Schedule | None = None
    rules: Rules = field(default_factory=lambda: RULES, hash=False)

    @property
    def microbatches(self) -> Microbatches:
        """The microbatches of a step."""
        return microbatches(self.config.train, batch_ways(self.mesh))

    def batch(self, steps: int = 1) -> jax.ShapeDtypeStruct:
        """Describe a batch with its padding, or those of several steps: `[rows, T + 1]`, `[K, rows, T + 1]`.

        With segment ids, windows are `[T, 3]` (see `train.loss.split_windows`).
        """
        T = self.config.model.block_size
        one = math.prod(self.microbatches), *((T, 3) if self.config.data.segmented else (T + 1,))
        shape = one if steps == 1 else (steps, *one)
        return jax.ShapeDtypeStruct(shape, jnp.int32, sharding=batch_sharding(self.mesh, steps > 1))

    @cached_property
    def fresh(self) -> Any:
        """Map a seed to fresh weights and trainable parameters, with their logical axes, and the first state. Traced once."""
        return jax.jit(lambda seed: stacked(self, _fresh_per_layer(self, seed)))

    @cached_property
    def state(self) -> TrainState:
        """The abstract state: shapes, types and placements."""
        return _placed(self, *jax.eval_shape(self.fresh, 0)[1:])

    @cached_property
    def frozen(self) -> Any:
        """The abstract frozen weights; `()` if all weights are trained."""
        if not self.config.lora.rank:
            return ()
        boxed = jax.eval_shape(self.fresh, 0)[0]
        return _placed(self, boxed, nn.unbox(boxed))

    @property
    def weights(self) -> Any:
        """The abstract weights of the model."""
        return self.frozen or self.state.params

    @cached_property
    def checkpoint(self) -> TrainState:
        """The abstract state of a checkpoint, for restoring into."""
        if not self.config.train.scan_layers:
            return self.state
        return _placed(self, *jax.eval_shape(lambda: _fresh_per_layer(self, 0))[1:])

    @cached_property
    def unstack(self) -> Any:
        """The compiled function from a state with stacked layers to one with a tree per layer, as in a checkpoint."""
        unstack = partial(unstack_layers, n_layer=self.config.model.n_layer)
        return jax.jit(unstack, out_shardings=placements(self.checkpoint))

    def use_mesh(self) -> AbstractContextManager[None]:
        """Within this, map the logical axes that layers name to the axes of the mesh."""
        return use_mesh(self.mesh, self.config.model, self.rules)


def make_layout(
    config: Config,
    mesh: Mesh,
    optimizer: optax.GradientTransformation | None = None,
    rules: Rules = RULES,
) -> Layout:
    """Make the layout of a config on a mesh, with the optimizer that the config describes or with another one."""
    learning_rate = schedule(config) if optimizer is None else None
    return Layout(config, mesh, make_optimizer(config, optimizer), learning_rate, rules)


def stacked(layout: Layout, tree: Any) -> Any:
    """Give a tree per layer (weights, a state) the layout that training uses."""
    return stack_layers(tree) if layout.config.train.scan_layers else tree


def placements(tree: Any) -> Any:
    """Return the sharding of every leaf."""
    return jax.tree.map(lambda leaf: leaf.sharding, tree)


def _fresh_per_layer(layout: Layout, seed: jax.typing.ArrayLike) -> tuple[Any, Any, TrainState]:
    lora = layout.config.lora
    weights = trained = boxed_params(GPT(layout.config.model), seed)
    if lora.rank:
        trained = model_adapters(named_key(seed, "lora"), weights, lora)
    return weights, trained, init_state(nn.unbox(trained), layout.optimizer, layout.config.optim.ema_decay > 0)


def _placed(layout: Layout, boxed: Any, tree: T) -> T:
    places = shardings_like(tree, boxed, layout.config.model, layout.mesh, layout.rules)
    return jax.tree.map(lambda x, place: jax.ShapeDtypeStruct(x.shape, x.dtype, sharding=place), tree, places)
