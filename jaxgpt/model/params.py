"""The table of weights: shape and logical axes of every parameter, as its module declares them."""

from __future__ import annotations

import functools
import math
from collections.abc import Callable, Mapping
from dataclasses import dataclass, replace
from itertools import groupby, takewhile
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

STACKS = ("expert",)  # logical names of the leading axes that stack weights


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
        """Number of stack axes: the leading axes named in `STACKS`, and at least all axes before the last two."""
        named = takewhile(lambda name: name in STACKS, self.axes)
        return max(len(list(named)), len(self.axes) - 2)

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


@jax.tree_util.register_static
@dataclass(frozen=True)
class _NamedWeight:
    """A weight at a path: a pytree without leaves, which a traced function can return."""

    path: str
    weight: Weight


@functools.lru_cache(maxsize=64)
def _table(one_block: GPT, n_layer: int) -> Mapping[str, Weight]:
    """Return the table of a model with one block, repeated for `n_layer` blocks: all blocks have the same shapes."""

    def declare() -> list[_NamedWeight]:
        # A list keeps the order of first use: `eval_shape` would sort the names of a dictionary.
        boxes = flatten_dict(boxed_params(one_block, 0), sep="/")
        return [_NamedWeight(path, Weight(box.value.shape, box.names)) for path, box in boxes.items()]

    # Repeat the weights of the block, which are consecutive.
    first_block = f"{layer_name(0)}/"
    table = dict[str, Weight]()
    for is_block, group in groupby(jax.eval_shape(declare), lambda named: named.path.startswith(first_block)):
        declared = list(group)
        for layer in range(n_layer if is_block else 1):
            for named in declared:
                own_path = named.path.replace(first_block, f"{layer_name(layer)}/", 1)
                table[own_path] = named.weight
    return MappingProxyType(table)  # read-only, because the callers share it


def weight_at(path: tuple[Any, ...], model: Model) -> Weight | None:
    """Return the `Weight` at a path of `jax.tree_util`, or None for other leaves, such as adapters."""
    name = "/".join(key.key for key in path if isinstance(key, jax.tree_util.DictKey))
    if isinstance(model, ModelConfig) and not model.vocab_size:
        model = replace(model, vocab_size=1)  # the kinds of weights do not depend on the vocabulary size
    if name.startswith(f"{STACKED}/"):  # all blocks have weights of the same shapes and axes
        name = f"{layer_name(0)}/{name.removeprefix(f'{STACKED}/')}"
    return weights(model).get(name)


def is_weight(node: Any) -> bool:
    """Return whether a node of a parameter tree is a weight: an array, or a stored weight, which has arrays as leaves."""
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
