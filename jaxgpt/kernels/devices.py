"""Kernels on a mesh: each device computes its own rows and heads."""

from __future__ import annotations

from collections.abc import Callable
from typing import Any

import flax.linen as nn
import jax
import jax.numpy as jnp
from jax.sharding import PartitionSpec

from jaxgpt.ops import Array

# Logical axes that `only_rows_are_divided` lets a mesh shard: rows of batches, and Muon's stack of matrices, which no operation
# of the model reads.
ROWS = ("batch", "lookup", "residual")
STACKS = ("matrices",)


def per_device(
    local: Callable[..., Array], q_BTNH: Array, k_BKSH: Array, v_BKHS: Array, document_BT: Array | None
) -> Array:
    """Run `local(q, k, v, documents) -> out_BTNH` on each device's rows and heads, over whole sequences.

    `local` must support K key heads that divide the N query heads: if the rules shard both alike, and without a mesh, the keys
    are not repeated.
    """
    if document_BT is not None:
        document_BT = jnp.broadcast_to(document_BT, q_BTNH.shape[:2])

    if not on_mesh():
        return local(q_BTNH, k_BKSH, v_BKHS, document_BT)
    k_BKSH, v_BKHS = with_heads_of_queries(q_BTNH, k_BKSH, v_BKHS)

    # Complete sequences: the axis of positions has no name, so its shards are gathered.
    queries = logical_spec("batch", None, "heads")
    keys = logical_spec("batch", "heads")
    specs = queries, keys, keys, logical_spec("batch")
    # check_vma=False: the kernels do not annotate which mesh axes their results vary over.
    divided = jax.shard_map(local, in_specs=specs, out_specs=queries, check_vma=False)
    return divided(q_BTNH, k_BKSH, v_BKHS, document_BT)


def on_mesh() -> bool:
    """Return whether a mesh and sharding rules are set."""
    return bool(nn.get_logical_axis_rules()) and not jax.sharding.get_abstract_mesh().empty


def logical_spec(*names: str | None) -> PartitionSpec:
    """Map the logical axes of an array to mesh axes by the current rules; None: not sharded.

    If two axes of the array have rules for the same mesh axis, the first in the table of rules is sharded, as in
    `ops.sharding.constrain`. So a kernel must read the mesh axes from the spec (`mesh_axes`), not from the rules.
    """
    spec: Any = nn.spmd.logical_to_mesh_axes(names)
    return PartitionSpec(*spec)


def mesh_axes(spec: PartitionSpec, axis: int) -> tuple[str, ...]:
    """Return the names of the mesh axes that shard an axis of an array."""
    return tuple(jax.tree.leaves(spec[axis]))


def with_heads_of_queries(q_BTNH: Array, k_BKSH: Array, v_BKHS: Array) -> tuple[Array, Array]:
    """Return keys and values that can be sharded like the query heads.

    Their heads are repeated if the rules shard the heads of queries and keys differently, and unchanged otherwise.
    """
    rules: dict[str, Any] = dict(nn.get_logical_axis_rules())
    if rules.get("heads") == rules.get("kv_heads"):
        return k_BKSH, v_BKHS
    G = q_BTNH.shape[2] // k_BKSH.shape[1]
    return jnp.repeat(k_BKSH, G, axis=1), jnp.repeat(v_BKHS, G, axis=1)


def only_rows_are_divided() -> bool:
    """Return whether the current mesh and sharding rules shard no operand of the model's operations, except by rows."""
    sizes = jax.sharding.get_abstract_mesh().shape
    for name, axes in nn.get_logical_axis_rules():
        is_divided = any(sizes.get(axis, 1) != 1 for axis in jax.tree.leaves(axes))
        if is_divided and name not in (*ROWS, *STACKS):
            return False
    return True
