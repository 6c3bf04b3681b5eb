"""Run functions on each device of a mesh separately, for what the compiler cannot partition or partitions slowly."""

from __future__ import annotations

from collections.abc import Callable
from typing import Any

import flax.linen as nn
import jax
import jax.numpy as jnp
from jax.flatten_util import ravel_pytree
from jax.sharding import PartitionSpec

SMALL = 1 << 18  # elements: arrays up to this size are added over devices as one array


def per_device(
    local: Callable[..., jax.Array],
    q_BTNH: jax.Array,
    k_BKSH: jax.Array,
    v_BKHS: jax.Array,
    document_BT: jax.Array | None,
) -> jax.Array:
    """Run `local(q, k, v, documents) -> out_BTNH` on each device's rows and heads.

    Each device gets whole sequences and whole heads, regardless of the sharding rules of "length" and "head_dim".
    """
    if jax.sharding.get_abstract_mesh().empty or not nn.get_logical_axis_rules():
        return local(q_BTNH, k_BKSH, v_BKHS, document_BT)
    rows, heads = nn.spmd.logical_to_mesh_axes(("batch", "heads")) or (None, None)
    _, kv_heads = nn.spmd.logical_to_mesh_axes(("batch", "kv_heads")) or (None, None)
    if heads != kv_heads:
        # The mesh divides the query heads but not the key heads: repeat the key heads to match.
        each = q_BTNH.shape[2] // k_BKSH.shape[1]
        k_BKSH, v_BKHS = (jnp.repeat(x, each, axis=1) for x in (k_BKSH, v_BKHS))
    by_head = PartitionSpec(rows, heads, None, None)
    # check_vma=False: the kernels do not annotate which mesh axes their results vary over.
    divided = jax.shard_map(
        local,
        in_specs=(PartitionSpec(rows, None, heads, None), by_head, by_head, PartitionSpec(rows)),
        out_specs=PartitionSpec(rows, None, heads, None),
        check_vma=False,
    )
    return divided(q_BTNH, k_BKSH, v_BKHS, document_BT)


def only_rows_are_divided() -> bool:
    """Return whether the mesh and the sharding rules of this context divide nothing but the rows of batches."""
    sizes = jax.sharding.get_abstract_mesh().shape
    split = {
        name for name, axes in nn.get_logical_axis_rules() for axis in jax.tree.leaves(axes) if sizes.get(axis, 1) > 1
    }
    return split <= {"batch", "lookup"}


def over_data(sums: Callable[..., Any]) -> Callable[..., Any]:
    """Compute `sums(params, rows)` on each device's rows and add the results over the mesh axis "data".

    Arrays of up to `SMALL` elements are added as one array: each array costs one synchronization of the devices. No other mesh
    axis may divide the parameters or the rows.
    """

    def on_device(params: Any, rows: Any) -> Any:
        with nn.logical_axis_rules(()):
            leaves, tree = jax.tree.flatten(sums(params, rows))
        together, split = ravel_pytree([leaf for leaf in leaves if leaf.size <= SMALL])
        together, large = jax.lax.psum((together, [leaf for leaf in leaves if leaf.size > SMALL]), "data")
        small = split(together)
        return jax.tree.unflatten(tree, [(small if leaf.size <= SMALL else large).pop(0) for leaf in leaves])

    specs = PartitionSpec(), PartitionSpec("data")
    # check_vma=False: each device computes the gradients of its own rows. Otherwise JAX would insert one all-reduce per array.
    return jax.shard_map(on_device, in_specs=specs, out_specs=PartitionSpec(), check_vma=False)
