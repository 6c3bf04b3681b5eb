"""States: the weights and train states of a run on a mesh, with shapes, shardings and initial values."""

from __future__ import annotations

from collections.abc import Callable
from dataclasses import dataclass, field
from functools import cached_property
from pathlib import Path
from typing import Any, NamedTuple, TypeVar

import flax.linen as nn
import jax
import optax
from jax.sharding import Mesh

from jaxgpt.checkpoint import store
from jaxgpt.config import Config
from jaxgpt.lm.model import FrozenBase
from jaxgpt.model import GPT
from jaxgpt.model.init import boxed_params
from jaxgpt.model.lora import merge, model_adapters
from jaxgpt.model.scan import stack_layers, unstack_layers
from jaxgpt.ops.random import named_key
from jaxgpt.parallel.host import quick_compile_options, random_bits_by_kernel
from jaxgpt.parallel.mesh import RULES, Rules, block_on_cpu_mesh, shardings_like
from jaxgpt.train.optimizer import make_optimizer
from jaxgpt.train.step import TrainState, init_state

T = TypeVar("T")


class Fresh(NamedTuple):
    """Random weights, in linen's boxes with logical axes, and the initial state.

    Attributes:
        frozen: base weights of the adapters; `()` if all weights are trained.
        trained: parameters to train: weights or adapters.
        state: initial state, without boxes.
    """

    frozen: Any
    trained: Any
    state: TrainState


@dataclass(eq=False)
class States:
    """The weights and train states of a config on a mesh. Shapes and shardings need no devices.

    The weights of the model are a function of two trees, the `frozen` weights and the `params` of a state (see `merged`).
    Without adapters, `frozen` is `()`.

    With `train.scan_layers`, the layers of both trees are stacked (`model/scan.py`); in checkpoints, they are separate.

    Attributes:
        config: settings of the run, with `model.vocab_size` set.
        mesh: the devices; for estimates, which compile nothing, an `AbstractMesh`.
        optimizer: as in `build`; None: from the config.
        model: as in `build`; None: from the config.
        rules: the complete sharding table.
        base: the frozen base weights of the adapters, on their devices; None: random weights, or no adapters.
    """

    config: Config
    mesh: Mesh
    optimizer: optax.GradientTransformation | None = None
    model: GPT | None = None
    rules: Rules = field(default_factory=lambda: RULES)
    base: FrozenBase | None = field(default=None, repr=False)

    @cached_property
    def fresh(self) -> Callable[[jax.typing.ArrayLike], Fresh]:
        """Function from a seed to random weights and the initial state, traced once."""

        def make(seed: jax.typing.ArrayLike) -> Fresh:
            frozen, trained = (), boxed_params(self.model or GPT(self.config.model), seed)
            if self.config.lora.rank:
                frozen, trained = trained, model_adapters(named_key(seed, "lora"), trained, self.config.lora)
            return self._stacked(Fresh(frozen, trained, self._first_state(nn.unbox(trained))))

        return jax.jit(make)

    @cached_property
    def _shapes(self) -> Fresh:
        return jax.eval_shape(self.fresh, 0)

    @cached_property
    def abstract_state(self) -> TrainState:
        """Shapes, dtypes and shardings of the state."""
        return self._abstract(self._shapes.state, self._shapes.trained)

    @cached_property
    def abstract_frozen(self) -> Any:
        """Shapes, dtypes and shardings of the frozen weights."""
        return self._abstract(nn.unbox(self._shapes.frozen), self._shapes.frozen)

    @property
    def abstract_weights(self) -> Any:
        """Shapes, dtypes and shardings of the model's weights."""
        return self.abstract_frozen or self.abstract_state.params

    @cached_property
    def abstract_checkpoint(self) -> TrainState:
        """Shapes, dtypes and shardings of the state in a checkpoint, with unstacked layers."""
        return self._abstract(*jax.eval_shape(self._unstacked, (self._shapes.state, self._shapes.trained)))

    @cached_property
    def frozen(self) -> Any:
        """The frozen weights, on their devices; random until `put_base`."""
        if not self.abstract_frozen:
            return ()
        seed = self.config.train.seed
        return self._compute(lambda seed: nn.unbox(self.fresh(seed).frozen), seed, self.abstract_frozen)

    def merged(self, frozen: Any, params: Any) -> Any:
        """Return the weights of the model: `params`, or the frozen weights merged with the adapters `params`."""
        return merge(frozen, params, self.config.lora.alpha) if self.config.lora.rank else params

    def weights(self, params: Any) -> Any:
        """Return the weights of the model from the `params` or the EMA of a state, on their devices."""
        if not self.abstract_frozen:
            return params
        return self._compute(lambda trees: self.merged(*trees), (self.frozen, params), self.abstract_frozen)

    def init(self, params: Any = None) -> TrainState:
        """Make the initial state from parameters with unstacked layers; None: from random parameters."""
        if params is None:
            return self._compute(lambda seed: self.fresh(seed).state, self.config.train.seed, self.abstract_state)
        return self._compute(lambda params: self._stacked(self._first_state(params)), params, self.abstract_state)

    def restore(self, directory: Path, step: int) -> TrainState:
        """Restore a checkpoint's state; raise `UserError` if it cannot be read or does not match the config."""
        state = store.restore(directory, step, self.abstract_checkpoint)
        return self._compute(stack_layers, state, self.abstract_state) if self.config.train.scan_layers else state

    def to_checkpoint(self, state: TrainState) -> TrainState:
        """Return a state with unstacked layers: a copy with `train.scan_layers`, otherwise the state itself."""
        return block_on_cpu_mesh(self.mesh, self._to_checkpoint(state)) if self.config.train.scan_layers else state

    def put_params(self, params: Any) -> Any:
        """Put weights with unstacked layers on their devices, for `eval`."""
        shardings = shardings_of(self.abstract_state.params)
        return block_on_cpu_mesh(self.mesh, jax.device_put(self._stacked(params), shardings))

    def put_base(self, base: FrozenBase) -> None:
        """Put frozen weights with unstacked layers on their devices, instead of random weights."""
        self.frozen = self._compute(self._stacked, base.params, self.abstract_frozen)
        self.base = base._replace(params=self.frozen)

    def _first_state(self, params: Any) -> TrainState:
        optim, optimizer = self.config.optim, self.optimizer or make_optimizer(self.config)
        return init_state(params, optimizer, optim.ema_decay > 0, optim.skips_updates)

    def _stacked(self, tree: T) -> T:
        """Stack the layers of weights or of a state, if training uses them stacked."""
        return stack_layers(tree) if self.config.train.scan_layers else tree

    def _unstacked(self, tree: T) -> T:
        return unstack_layers(tree, self.config.model.n_layer)

    @cached_property
    def _to_checkpoint(self) -> Any:
        return jax.jit(self._unstacked, out_shardings=shardings_of(self.abstract_checkpoint))

    def _abstract(self, tree: T, boxed: Any) -> T:
        shardings = shardings_like(tree, boxed, self.config.model, self.mesh, self.rules)
        return jax.tree.map(lambda x, each: jax.ShapeDtypeStruct(x.shape, x.dtype, sharding=each), tree, shardings)

    def _compute(self, function: Callable[[Any], Any], argument: Any, like: T) -> T:
        """Call a function once, compiled, with the shardings of `like` for its results."""
        options = quick_compile_options(self.mesh)
        compiled: Callable[[Any], T] = jax.jit(function, out_shardings=shardings_of(like), compiler_options=options)
        with random_bits_by_kernel(self.mesh):
            return block_on_cpu_mesh(self.mesh, compiled(argument))


def shardings_of(tree: Any) -> Any:
    """Return the sharding of every leaf."""
    return jax.tree.map(lambda leaf: leaf.sharding, tree)
