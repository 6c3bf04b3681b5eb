"""The one table that maps logical axes of arrays to mesh axes, and the shardings that follow from it."""

from __future__ import annotations

import math
from collections.abc import Iterator, Mapping
from contextlib import contextmanager
from dataclasses import fields
from typing import Any

import flax.linen as nn
import jax
import numpy as np
from jax.sharding import Mesh, NamedSharding, PartitionSpec

from jaxgpt.config import MeshConfig, ModelConfig
from jaxgpt.errors import UserError, short_repr
from jaxgpt.suggestions import did_you_mean

AXES = tuple(axis.name for axis in fields(MeshConfig))  # names of the mesh axes, in the order of the settings
SMALL = 1 << 16  # arrays without logical axes are replicated if they have fewer elements

# Logical axis -> mesh axes.
# Weights: an axis of width D, except in norms, is sharded over fsdp; heads, MLP and vocabulary over tensor.
# Activations: rows (of the residual stream and the MLP: residual) are sharded over data, fsdp and expert, and positions over
# context. In the embedding lookup, fsdp shards the width instead of the rows.
Rules = Mapping[str, tuple[str, ...]]
RULES: Rules = {
    "batch": ("data", "fsdp", "expert"),
    "lookup": ("data", "expert"),
    "residual": ("data", "fsdp", "expert"),
    "length": ("context",),
    "width": (),
    "embed": ("fsdp",),
    "vocab": ("tensor",),
    "heads": ("tensor",),
    "kv_heads": ("tensor",),
    "head_dim": (),
    "mlp": ("tensor",),
    "router": (),  # logits of the experts
    "expert": ("expert",),  # stack axis of weights, such as the matrices of experts
    "position": (),
    "norm": (),
    "rank": (),  # rank axis of adapters; the other axis is sharded as in the weight
    "layers": (),
    "matrix_shards": ("fsdp",),  # Muon: stack of matrices, in an intermediate step of resharding
    "matrices": ("fsdp", "data", "expert", "context", "tensor"),  # Muon: stack of complete matrices, over all devices
}

# The table of generation: weights stay where they are, and devices exchange the activations of the few tokens of a step. As in
# the embedding lookup, fsdp shards the width of the residual stream instead of the rows, so each device multiplies its part of
# the width for all tokens. With `RULES`, every device would gather all weights before a loop of steps.
STATIONARY: Rules = {**RULES, "residual": ("data", "expert"), "width": ("fsdp",)}


def change_rules(changes: Rules) -> Rules:
    """Return the sharding table with some rules replaced.

    Raises:
        UserError: if a rule is for an unknown axis, changes the rule of `batch`, or is not a tuple of distinct mesh axes.
    """
    for name, axes in changes.items():
        # Data loading and loss sums rely on the rule of `batch`.
        if name == "batch" and axes != RULES[name]:
            raise UserError(
                f"the rule of batch must be {RULES[name]}, not {short_repr(axes)}: to shard over data only, use --mesh.fsdp 1"
            )
        if name not in RULES:
            near = did_you_mean(name, RULES)
            raise UserError(f"no logical axis {short_repr(name)}{near}: use one of {', '.join(RULES)}")
        is_known = isinstance(axes, tuple) and set(axes) <= set(AXES)
        if not is_known or len(set(axes)) < len(axes):
            raise UserError(f"the rule of {name} must be a tuple of the mesh axes {AXES}, not {short_repr(axes)}")
    return {**RULES, **changes}


def rules_for(
    model: ModelConfig, mesh: Mesh, rules: Rules = RULES, rows: int = 0, length: int = 0
) -> dict[str, tuple[str, ...]]:
    """Return the table for one model: an axis is not sharded if the mesh does not divide its length.

    For example, mesh.tensor 2 does not shard a vocabulary of 65 characters.

    Args:
        model: the architecture.
        mesh: the devices.
        rules: the complete sharding table.
        rows: number of rows of a batch; 0: any number that the mesh divides.
        length: number of positions of a row; 0: `model.block_size`.
    """
    sizes = {
        "batch": rows,
        "lookup": rows,
        "residual": rows,
        "length": length or model.block_size,
        "width": model.n_embd,
        "embed": model.n_embd,
        "vocab": model.vocab_size,
        "heads": model.n_head,
        "kv_heads": model.kv_heads,
        "head_dim": model.head_width,
        "mlp": model.mlp_width,
        "expert": model.n_experts,
        "position": model.block_size,
        "norm": model.n_embd,
        "layers": model.n_layer,
    }
    table = dict(rules)
    for name, size in sizes.items():
        ways = math.prod(mesh.shape[axis] for axis in rules[name])
        if size % ways:  # a size of 0 stays sharded
            table[name] = ()
    return table


@contextmanager
def use_mesh(mesh: Mesh, model: ModelConfig, rules: Rules = RULES, rows: int = 0, length: int = 0) -> Iterator[None]:
    """Set JAX's mesh and Flax's logical axis rules in this context; arguments as in `rules_for`."""
    table = [(name, axes or None) for name, axes in rules_for(model, mesh, rules, rows, length).items()]
    with jax.set_mesh(mesh), nn.logical_axis_rules(table):
        yield


def partition_spec(names: tuple[str | None, ...], rules: Rules) -> PartitionSpec:
    """Map the logical axes of an array to mesh axes.

    Raises:
        UserError: if an axis has no rule, or two axes of the array would be sharded over the same mesh axis.
    """
    for name in names:
        if name and name not in rules:
            near = did_you_mean(name, rules)
            raise UserError(
                f"no rule for the logical axis {short_repr(name)}{near}: use a logical axis, such as embed, not an axis of the "
                f"mesh, or None for an unsharded axis"
            )

    # Look up the mesh axes of each array axis; () becomes None in the PartitionSpec.
    mesh_axes = [rules[name] if name else () for name in names]
    used = [axis for axes in mesh_axes for axis in axes]
    if len(used) != len(set(used)):
        split = [f"{name} by {', '.join(axes)}" for name, axes in zip(names, mesh_axes, strict=True) if axes]
        raise UserError(
            f"the rules shard several axes of an array over the same mesh axis: {' and '.join(split)}; set one rule to ()"
        )
    return PartitionSpec(*[axes or None for axes in mesh_axes])


def shardings(boxed: Any, model: ModelConfig, mesh: Mesh, rules: Rules = RULES) -> Any:
    """Return the sharding of every boxed parameter; parameters without logical axes are replicated."""
    rules = rules_for(model, mesh, rules)

    def place(path: tuple[Any, ...], leaf: Any) -> NamedSharding:
        if not _is_box(leaf):
            return replicated(mesh)
        return _sharding_of_box(path, leaf, mesh, rules)

    return jax.tree_util.tree_map_with_path(place, boxed, is_leaf=_is_box)


def _sharding_of_box(path: tuple[Any, ...], box: nn.Partitioned[Any], mesh: Mesh, rules: Rules) -> NamedSharding:
    """Return the sharding of an array with logical axes.

    Raises:
        UserError: as in `partition_spec`, if a dimension has no logical axis, or if the mesh does not divide a dimension.
    """
    array = jax.tree_util.keystr(path, simple=True, separator="/")
    shape = np.shape(box.value)
    if len(box.names) != len(shape):
        raise UserError(
            f"{array} has {len(shape)} dimensions and the logical axes {box.names}: use one name or None for each dimension"
        )
    spec = partition_spec(box.names, rules)
    for size, name in zip(shape, box.names, strict=True):
        axes = rules[name] if name else ()
        ways = math.prod(mesh.shape[axis] for axis in axes)
        if size % ways:
            raise UserError(
                f"{array} has a dimension {name} of {size}, which {' x '.join(axes)} = {ways} does not divide: change the size "
                f"or the mesh, or use None as its logical axis"
            )
    return NamedSharding(mesh, spec)


def shardings_like(tree: Any, boxed: Any, model: ModelConfig, mesh: Mesh, rules: Rules = RULES) -> Any:
    """Return the sharding of every leaf of a tree, such as a train state or the weights of a reference model.

    - A leaf in a box (`nn.Partitioned`) is sharded by the logical axes of the box.
    - A leaf with the shape of a parameter and a path that ends with its path in `boxed` is sharded like the parameter.
    - Any other leaf with at least `SMALL` elements is sharded along an axis that the mesh divides, if any (`spec_of_shape`).
    - All other leaves, such as counters and small vectors, are replicated.
    """
    table = rules_for(model, mesh, rules)

    # Map the path and shape of each parameter to its sharding.
    shapes = map(np.shape, jax.tree.leaves(nn.unbox(boxed)))
    places = jax.tree_util.tree_leaves_with_path(shardings(boxed, model, mesh, rules))
    of_parameters = {}
    for (path, sharding), shape in zip(places, shapes, strict=True):
        of_parameters[_keys(path), shape] = sharding

    def place(path: tuple[Any, ...], leaf: Any) -> NamedSharding:
        if _is_box(leaf):
            return _sharding_of_box(path, leaf, mesh, table)

        # For the path mu/h_0/mlp/kernel, try the parameters mu/h_0/mlp/kernel, h_0/mlp/kernel, mlp/kernel and kernel.
        keys = _keys(path)
        shape = np.shape(leaf)
        for start in range(len(keys)):
            like = of_parameters.get((keys[start:], shape))
            if like is not None:
                return like
        return NamedSharding(mesh, spec_of_shape(shape, mesh))

    return jax.tree_util.tree_map_with_path(place, tree, is_leaf=_is_box)


def spec_of_shape(shape: tuple[int, ...], mesh: Mesh) -> PartitionSpec:
    """Shard an array without logical axes over the most devices, along fsdp, tensor or both, in its largest divisible axis.

    An array with fewer than `SMALL` elements, or without such an axis, is replicated.
    """
    if math.prod(shape) < SMALL:
        return PartitionSpec()

    def shards(axes: tuple[str, ...]) -> int:
        return math.prod(mesh.shape[axis] for axis in axes)

    # Try the largest number of shards first.
    candidates = [("fsdp", "tensor"), ("fsdp",), ("tensor",)]
    for axes in sorted(candidates, key=shards, reverse=True):
        count = shards(axes)
        divisible = [size if size % count == 0 else 0 for size in shape]
        if count > 1 and any(divisible):
            spec: list[Any] = [None] * len(shape)
            spec[divisible.index(max(divisible))] = axes
            return PartitionSpec(*spec)
    return PartitionSpec()


def replicated(mesh: Mesh) -> NamedSharding:
    """Return the sharding of a replicated array."""
    return NamedSharding(mesh, PartitionSpec())


def _is_box(leaf: Any) -> bool:
    """Return whether a leaf is an array with its logical axes."""
    return isinstance(leaf, nn.Partitioned)


def _keys(path: tuple[Any, ...]) -> tuple[str, ...]:
    """Return the dictionary keys of a path, without the fields of tuples, such as optimizer states."""
    return tuple(key.key for key in path if isinstance(key, jax.tree_util.DictKey))
