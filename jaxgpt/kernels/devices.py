"""Kernels on a mesh: each device computes its own rows and heads."""

from __future__ import annotations

from collections.abc import Callable
from typing import Any

import flax.linen as nn
import jax
import jax.numpy as jnp
from jax.sharding import PartitionSpec

from jaxgpt.ops import Array


def per_device(
    local: Callable[..., Array], q_BTNH: Array, k_BKSH: Array, v_BKHS: Array, document_BT: Array | None
) -> Array:
    """Run `local(q, k, v, documents) -> out_BTNH` on each device's rows and heads, over whole sequences."""
    if document_BT is not None:
        document_BT = jnp.broadcast_to(document_BT, q_BTNH.shape[:2])

    rules: dict[str, Any] = dict(nn.get_logical_axis_rules())
    if jax.sharding.get_abstract_mesh().empty or not rules:
        return local(q_BTNH, k_BKSH, v_BKHS, document_BT)
    if rules.get("heads") != rules.get("kv_heads"):
        # The mesh shards the query heads but not the key/value heads: repeat the key/value heads to match.
        each = q_BTNH.shape[2] // k_BKSH.shape[1]
        k_BKSH = jnp.repeat(k_BKSH, each, axis=1)
        v_BKHS = jnp.repeat(v_BKHS, each, axis=1)

    # Complete sequences: the axis of positions has no name, so its shards are gathered.
    queries = logical_spec("batch", None, "heads")
    keys = logical_spec("batch", "heads")
    specs = queries, keys, keys, logical_spec("batch")
    # check_vma=False: the kernels do not annotate which mesh axes their results vary over.
    divided = jax.shard_map(local, in_specs=specs, out_specs=queries, check_vma=False)
    return divided(q_BTNH, k_BKSH, v_BKHS, document_BT)


def logical_spec(*names: str | None) -> PartitionSpec:
    """Map the logical axes of an array to mesh axes by the current rules; None: not sharded."""
    rules: dict[str, Any] = dict(nn.get_logical_axis_rules())
    return PartitionSpec(*[rules.get(name) if name else None for name in names])


def only_rows_are_divided() -> bool:
    """Return whether the current mesh and sharding rules shard only the rows of batches."""
    sizes = jax.sharding.get_abstract_mesh().shape
    for name, axes in nn.get_logical_axis_rules():
        if name in ("batch", "lookup", "matrices"):
            continue
        if any(sizes.get(axis, 1) != 1 for axis in jax.tree.leaves(axes)):
            return False
    return True
