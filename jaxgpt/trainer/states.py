"""States: shapes, shardings and initial values of the arrays of a run."""

from __future__ import annotations

from collections.abc import Callable
from dataclasses import dataclass
from typing import Any, NamedTuple, TypeVar

import flax.linen as nn
import jax
import optax
from jax.sharding import Mesh
from jax.tree_util import DictKey, keystr, tree_leaves_with_path, tree_map_with_path

from jaxgpt.config import Config
from jaxgpt.counts import bytes_of
from jaxgpt.model import GPT
from jaxgpt.model.init import boxed_params
from jaxgpt.model.lora import model_adapters
from jaxgpt.model.scan import STACKED, layer_name, stack_layers, unstack_layers
from jaxgpt.ops.random import named_key
from jaxgpt.parallel.arrays import put_array, stack_arrays
from jaxgpt.parallel.compile_options import quick_compile_options, random_bits_by_kernel
from jaxgpt.parallel.mesh import block_on_cpu_mesh
from jaxgpt.parallel.rules import Rules, shardings_like
from jaxgpt.train.optimizer import make_optimizer
from jaxgpt.train.step import TrainState, init_state

T = TypeVar("T")


class Fresh(NamedTuple):
    """Random weights, in linen's boxes with logical axes, and the initial state.

    Attributes:
        weights: weights of the model.
        trained: parameters to train: the weights, or adapters for the weights.
        state: initial state; only arrays of the optimizer may be in boxes.
    """

    weights: Any
    trained: Any
    state: TrainState


@dataclass(frozen=True, eq=False)
class Abstract:
    """Shapes, dtypes and shardings of the arrays of a run on a mesh, as trees of `jax.ShapeDtypeStruct`.

    Attributes:
        weights: weights of the model.
        frozen: arrays that the objective reads, but that are not trained; `()`: no such arrays.
        state: train state; with `train.scan_layers`, its layers are stacked (`model/scan.py`).
        checkpoint: train state in a checkpoint, with unstacked layers.
    """

    weights: Any
    frozen: Any
    state: TrainState
    checkpoint: TrainState


def first_state(
    config: Config, optimizer: optax.GradientTransformation | None, model: GPT | None, params: Any
) -> TrainState:
    """Return the initial state of a run from its parameters."""
    optim = config.optim
    optimizer = optimizer or make_optimizer(config, model=model)
    return init_state(params, optimizer, optim.ema_decay > 0, optim.skips_updates)


def fresh(
    seed: jax.typing.ArrayLike, *, config: Config, model: GPT | None, optimizer: optax.GradientTransformation | None
) -> Fresh:
    """Make random weights and the initial state from a seed; the layers are stacked with `train.scan_layers`."""
    weights = boxed_params(model or GPT(config.model), seed)
    trained = weights
    if config.lora.rank:
        trained = model_adapters(named_key(seed, "lora"), weights, config.lora)
    state = first_state(config, optimizer, model, nn.unbox(trained))
    return stacked(config, Fresh(weights, trained, state))


def abstract(config: Config, mesh: Mesh, rules: Rules, shapes: Fresh, frozen: Any) -> Abstract:
    """Return the shapes, dtypes and shardings of the arrays of a run.

    Args:
        config: settings of the run.
        mesh: the devices; for estimates, which compile nothing, an `AbstractMesh`.
        rules: the complete sharding table.
        shapes: shapes of the result of `fresh`, from `jax.eval_shape`.
        frozen: shapes of the frozen arrays, sharded as by `shardings_like`.
    """

    def place(tree: T, boxed: Any) -> T:
        shardings = shardings_like(tree, boxed, config.model, mesh, rules)
        arrays = nn.unbox(tree)
        return jax.tree.map(lambda x, each: jax.ShapeDtypeStruct(x.shape, x.dtype, sharding=each), arrays, shardings)

    checkpoint = shapes.state, shapes.trained
    if config.train.scan_layers:
        checkpoint = jax.eval_shape(lambda trees: unstack_layers(trees, config.model.n_layer), checkpoint)
    return Abstract(
        weights=place(nn.unbox(shapes.weights), shapes.weights),
        frozen=place(frozen, shapes.weights),
        state=place(shapes.state, shapes.trained),
        checkpoint=place(*checkpoint),
    )


def random_state(mesh: Mesh, make: Callable[[jax.typing.ArrayLike], Fresh], seed: int, like: TrainState) -> TrainState:
    """Compute the initial state with random parameters; `make` is `fresh` of a config, a function of the seed."""
    return compute(mesh, lambda seed: nn.unbox(make(seed).state), seed, like)


def state_with_params(
    config: Config,
    mesh: Mesh,
    optimizer: optax.GradientTransformation | None,
    model: GPT | None,
    params: Any,
    like: TrainState,
) -> TrainState:
    """Return the initial state with given parameters on the devices, in the layout of `like.params`, without a copy of them."""

    # The function does not return the parameters, because XLA would copy an argument that is returned.
    def without_params(params: Any) -> TrainState:
        if config.train.scan_layers:
            params = unstack_layers(params, config.model.n_layer)
        state = first_state(config, optimizer, model, params)
        state = nn.unbox(stacked(config, state))
        return state._replace(params=())

    state = compute(mesh, without_params, params, like._replace(params=()))
    return state._replace(params=params)


def copy_params(mesh: Mesh, params: T, like: T) -> T:
    """Copy parameters on the devices."""
    return compute(mesh, lambda params: params, params, like)


def stacked(config: Config, tree: T) -> T:
    """Stack the layers of weights or of a state with `train.scan_layers`; otherwise, return the tree unchanged."""
    return stack_layers(tree) if config.train.scan_layers else tree


def put_stacked(config: Config, tree: Any, like: T, donate: bool = False) -> T:
    """Put a tree with unstacked layers on the devices in the layout of `like`, one array at a time.

    Args:
        config: settings of the run; with `train.scan_layers`, the layers are stacked.
        tree: arrays with unstacked layers.
        like: shapes and shardings of the result.
        donate: delete arrays of `tree` as soon as they are stacked.
    """
    arrays = {keystr(path): leaf for path, leaf in tree_leaves_with_path(tree)}

    def put(path: tuple[Any, ...], leaf: Any) -> jax.Array:
        if keystr(path) in arrays:
            return put_array(arrays[keystr(path)], leaf.sharding)
        layers = [arrays[keystr(_in_layer(path, layer))] for layer in range(leaf.shape[0])]
        stack = stack_arrays(layers, leaf.sharding)
        for array in layers:
            if donate and isinstance(array, jax.Array):
                array.delete()
        return stack

    if not config.train.scan_layers:
        return jax.tree.map(lambda array, leaf: put_array(array, leaf.sharding), tree, like)
    return tree_map_with_path(put, like)


def _in_layer(path: tuple[Any, ...], layer: int) -> tuple[Any, ...]:
    """Return the path of an unstacked leaf from the path of the stacked leaf."""
    return tuple(DictKey(layer_name(layer)) if key == DictKey(STACKED) else key for key in path)


def compute(mesh: Mesh, function: Callable[[Any], Any], argument: Any, like: T) -> T:
    """Call a function once, compiled, with the shardings of `like` for its results."""
    options = quick_compile_options(mesh)
    compiled: Callable[[Any], T] = jax.jit(function, out_shardings=shardings_of(like), compiler_options=options)
    with random_bits_by_kernel(mesh):
        return block_on_cpu_mesh(mesh, compiled(argument))


def shardings_of(tree: Any) -> Any:
    """Return the sharding of every leaf."""
    return jax.tree.map(lambda leaf: leaf.sharding, tree)


def replicated_note(opt_state: Any, mesh: Mesh) -> str:
    """Return a note if more than a tenth of the bytes of the optimizer state is replicated on every device, or "".

    Without sharding over fsdp or tensor, the result is "".
    """
    ways = [mesh.shape[axis] for axis in ("fsdp", "tensor") if mesh.shape[axis] > 1]
    if not ways:
        return ""
    arrays = [leaf for leaf in jax.tree.leaves(opt_state) if leaf.sharding.is_fully_replicated]
    if bytes_of(arrays) <= 0.1 * bytes_of(opt_state):
        return ""
    share = f"{bytes_of(arrays) / bytes_of(opt_state):.0%} of the optimizer state is replicated on every device"
    lengths = {length for array in arrays for length in array.shape}
    can_be_sharded = any(length % each == 0 for length in lengths for each in ways)
    if not can_be_sharded:
        return f"{share}: neither fsdp nor tensor divides a dimension of these arrays"
    return f"{share}: to shard it, return its arrays from init in nn.Partitioned, with logical axes"
