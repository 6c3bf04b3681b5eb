"""A config on a mesh, without arrays: the shapes, dtypes and shardings of states and batches."""

from __future__ import annotations

import math
from contextlib import AbstractContextManager
from dataclasses import dataclass, field
from functools import cached_property
from typing import Any, TypeVar

import flax.linen as nn
import jax
import jax.numpy as jnp
import numpy as np
import optax
from jax.sharding import Mesh

from jaxgpt.config import Config
from jaxgpt.kernels import best
from jaxgpt.model import GPT
from jaxgpt.model.init import boxed_params
from jaxgpt.model.lora import model_adapters
from jaxgpt.model.scan import stack_layers
from jaxgpt.ops import Ops
from jaxgpt.ops.random import named_key
from jaxgpt.parallel.host import quick_compile_options
from jaxgpt.parallel.mesh import (
    RULES,
    Microbatches,
    Rules,
    batch_sharding,
    batch_ways,
    microbatches,
    shardings_like,
    use_mesh,
)
from jaxgpt.train.loss import Objective
from jaxgpt.train.optimizer import Numbers, make_optimizer, numbers_of
from jaxgpt.train.step import TrainState, init_state

T = TypeVar("T")


@dataclass(frozen=True)
class Layout:
    """The config, mesh and optimizer of a run, with the shapes and shardings of its arrays.

    With `train.scan_layers` the layers of a state are stacked (`model/scan.py`) from the start: stacking within the step would
    copy weights and gradients each time, and the optimizer would be compiled for each layer. Checkpoints are per layer.

    Attributes:
        config: settings of the run; the vocabulary is known.
        mesh: the devices; for estimates, which compile nothing, an `AbstractMesh`.
        own_optimizer: replaces the optimizer of the config; None: `config.optim`.
        rules: the sharding table.
        ops: operations of the decoder; None: `jaxgpt.kernels.best(config, mesh)`.
        model: module to train; None: `GPT(config.model, ops)`.
        objective: objective of training and evaluation; None: `next_token_loss`.
    """

    config: Config
    mesh: Mesh
    own_optimizer: optax.GradientTransformation | None = None
    rules: Rules = field(default_factory=lambda: RULES, hash=False)
    ops: Ops | None = None
    model: GPT | None = None
    objective: Objective | None = None

    @cached_property
    def optimizer(self) -> optax.GradientTransformation:
        """The optimizer, with the numbers of the config as constants."""
        return make_optimizer(self.config, self.own_optimizer)

    @cached_property
    def decoder_ops(self) -> Ops:
        """The operations of the decoder."""
        return self.ops or best(self.config, self.mesh)

    @property
    def numbers(self) -> Numbers:
        """The numbers of the optimizer, which are arguments of the train step."""
        return jax.tree.map(np.float32, numbers_of(self.config.optim))

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
        return jax.jit(lambda seed: self.stacked(_fresh_per_layer(self, seed)))

    @cached_property
    def abstract_state(self) -> TrainState:
        """Shapes, dtypes and shardings of the state."""
        return _abstract(self, *jax.eval_shape(self.fresh, 0)[1:])

    @cached_property
    def abstract_base(self) -> Any:
        """Shapes, dtypes and shardings of the frozen weights; `()` if all weights are trained."""
        if not self.config.lora.rank:
            return ()
        boxed = jax.eval_shape(self.fresh, 0)[0]
        return _abstract(self, boxed, nn.unbox(boxed))

    @property
    def abstract_weights(self) -> Any:
        """Shapes, dtypes and shardings of the model's weights."""
        return self.abstract_base or self.abstract_state.params

    @cached_property
    def abstract_checkpoint(self) -> TrainState:
        """Shapes, dtypes and shardings of the state in a checkpoint, which has a tree per layer."""
        if not self.config.train.scan_layers:
            return self.abstract_state
        return _abstract(self, *jax.eval_shape(lambda: _fresh_per_layer(self, 0))[1:])

    def stacked(self, tree: Any) -> Any:
        """Stack the layers of a tree (weights, a state), if training uses them stacked."""
        return stack_layers(tree) if self.config.train.scan_layers else tree

    def use_mesh(self) -> AbstractContextManager[None]:
        """Map the logical axes of layers to the axes of the mesh within the context."""
        return use_mesh(self.mesh, self.config.model, self.rules)


def shardings_of(tree: Any) -> Any:
    """Return the sharding of every leaf."""
    return jax.tree.map(lambda leaf: leaf.sharding, tree)


def compute_sharded(layout: Layout, function: Any, argument: Any, like: T) -> T:
    """Call a function once, compiled, with its results on their own devices as in `like`."""
    options = quick_compile_options(layout.mesh)
    result: T = jax.jit(function, out_shardings=shardings_of(like), compiler_options=options)(argument)
    return result


def _fresh_per_layer(layout: Layout, seed: jax.typing.ArrayLike) -> tuple[Any, Any, TrainState]:
    lora = layout.config.lora
    weights = trained = boxed_params(layout.model or GPT(layout.config.model), seed)
    if lora.rank:
        trained = model_adapters(named_key(seed, "lora"), weights, lora)
    return weights, trained, init_state(nn.unbox(trained), layout.optimizer, layout.config.optim.ema_decay > 0)


def _abstract(layout: Layout, boxed: Any, tree: T) -> T:
    shardings = shardings_like(tree, boxed, layout.config.model, layout.mesh, layout.rules)
    return jax.tree.map(lambda x, each: jax.ShapeDtypeStruct(x.shape, x.dtype, sharding=each), tree, shardings)
