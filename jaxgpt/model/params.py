"""The table of weights: shape and logical axes of every parameter, as its module declares them.

The other functions look up the weights of a parameter tree in the table, or make such a tree from it.
"""

from __future__ import annotations

import functools
import math
from collections.abc import Callable, Mapping
from dataclasses import replace
from types import MappingProxyType
from typing import Any, NamedTuple

import jax
import jax.numpy as jnp
from flax.traverse_util import flatten_dict, unflatten_dict

from jaxgpt.config import ModelConfig
from jaxgpt.model.gpt import GPT
from jaxgpt.model.init import boxed_params
from jaxgpt.model.scan import STACKED, layer_name
from jaxgpt.ops import Ops
from jaxgpt.ops.linear import StoredWeight


class Weight(NamedTuple):
    """Shape and logical axes of a weight, as its module declares them.

    A matrix is `[*stack, in, out]`, and a vector `[*stack, out]`: a stack `[E, in, out]` holds E matrices in one array.

    Attributes:
        shape: shape without the layer axis of stacked layers.
        axes: logical name of each axis, for the sharding table; None: not sharded.
    """

    shape: tuple[int, ...]
    axes: tuple[str | None, ...]

    @property
    def stack(self) -> int:
        """Number of stack axes: the axes before the last two or, for vectors, a leading axis `expert`."""
        if len(self.axes) > 2:
            return len(self.axes) - 2
        return 1 if self.axes[:1] == ("expert",) else 0

    @property
    def kind(self) -> str:
        """Kind of the weight, or of each weight of a stack.

        `matrix` `[in, out]`, `table` (tokens) `[V, D]`, `positions` `[context, D]`, or `vector`.
        """
        axes = self.axes[self.stack :]
        if len(axes) < 2:
            return "vector"
        kinds: dict[str | None, str] = {"vocab": "table", "position": "positions"}
        return kinds.get(axes[0], "matrix")

    @property
    def in_block(self) -> bool:
        """Whether this is a matrix of a block, not a table and not the output head."""
        return self.kind == "matrix" and "vocab" not in self.axes


# A config determines the weights of GPT. For a subclass with different weights, pass the model itself.
Model = ModelConfig | GPT


def config_of(model: Model) -> ModelConfig:
    """Return the architecture of a model."""
    return model if isinstance(model, ModelConfig) else model.config


def weights(model: Model) -> Mapping[str, Weight]:
    """Map each weight's path, such as "h_0/attn/q_proj/kernel", to its `Weight`, in order of first use."""
    gpt = GPT(model) if isinstance(model, ModelConfig) else model
    one_block = gpt.clone(config=replace(gpt.config, n_layer=1), ops=Ops(), remat=None)
    return _table(one_block, gpt.config.n_layer)


@functools.lru_cache(maxsize=64)
def _table(one_block: GPT, n_layer: int) -> Mapping[str, Weight]:
    """Return the table of a model with one block, repeated for `n_layer` blocks: all blocks have the same shapes."""
    declared: dict[str, dict[str, Weight]] = {}  # weights of each module of the model, keyed by path

    def declare() -> None:
        for name, module in boxed_params(one_block, 0).items():
            boxes = flatten_dict({name: module}, sep="/")
            declared[name] = {path: Weight(box.value.shape, box.names) for path, box in boxes.items()}

    # Run `declare` without computing weights. Results of `eval_shape` would have their names sorted, not in order of use.
    jax.eval_shape(declare)

    first_block = layer_name(0)
    table = dict[str, Weight]()
    for name, module in declared.items():
        copies = [layer_name(layer) for layer in range(n_layer)] if name == first_block else [name]
        for copy in copies:
            table |= {f"{copy}{path.removeprefix(name)}": weight for path, weight in module.items()}
    return MappingProxyType(table)  # read-only, because the callers share it


def weight_at(path: tuple[Any, ...], model: Model) -> Weight | None:
    """Return the `Weight` at a path of `jax.tree_util`, or None for other leaves, such as adapters.

    If a config has no vocabulary size yet (0), shapes are for a vocabulary of 1.
    """
    name = "/".join(key.key for key in path if isinstance(key, jax.tree_util.DictKey))
    if isinstance(model, ModelConfig) and not model.vocab_size:
        model = replace(model, vocab_size=1)  # GPT needs a size
    if name.startswith(f"{STACKED}/"):  # all blocks have weights of the same shapes and axes
        name = f"{layer_name(0)}/{name.removeprefix(f'{STACKED}/')}"
    return weights(model).get(name)


def is_weight(node: Any) -> bool:
    """Return whether a node of a parameter tree has the methods of a `StoredWeight`, as arrays do and dicts do not."""
    return isinstance(node, StoredWeight)


def map_weights(function: Callable[[Weight | None, Any], Any], params: Any, model: Model) -> Any:
    """Apply `function(weight, leaf)` to every leaf; `weight` is the result of `weight_at`.

    A stored weight, which may consist of several arrays, is one leaf.
    """

    def apply(path: tuple[Any, ...], leaf: Any) -> Any:
        return function(weight_at(path, model), leaf)

    return jax.tree_util.tree_map_with_path(apply, params, is_leaf=is_weight)


def map_matrices(function: Callable[[Any], Any], params: Any, model: Model) -> Any:
    """Apply a function to matrices and to the tables of tokens and positions; vectors and other leaves are unchanged."""

    def change(weight: Weight | None, w: Any) -> Any:
        if weight is None or weight.kind == "vector":
            return w
        return function(w)

    return map_weights(change, params, model)


def count_parameters(model: Model) -> int:
    """Count the parameters of a model, from the shapes of its weights."""
    return sum(math.prod(weight.shape) for weight in weights(model).values())


def flatten_params(params: Any) -> dict[str, Any]:
    """Map the path of every leaf, such as "h_0/attn/q_proj/kernel", to the leaf."""
    leaves = jax.tree.leaves_with_path(params)
    return {jax.tree_util.keystr(path, simple=True, separator="/"): leaf for path, leaf in leaves}


def abstract_params(model: Model) -> Any:
    """Return the shapes and dtypes of a model's parameters, without computing them."""
    table = sorted(weights(model).items())  # in the order of JAX's tree functions
    shapes = {path: jax.ShapeDtypeStruct(weight.shape, jnp.float32) for path, weight in table}
    return unflatten_dict(shapes, sep="/")
