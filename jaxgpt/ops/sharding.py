"""Sharding constraints inside jitted functions, by the logical names of axes."""

from __future__ import annotations

from collections.abc import Callable
from typing import TypeVar

import flax.linen as nn
import jax
import jax.numpy as jnp
from jax.flatten_util import ravel_pytree
from jax.sharding import PartitionSpec

from jaxgpt.ops.attention import SegmentIds

S = TypeVar("S")
T = TypeVar("T")

SMALL = 1 << 18  # numbers: arrays up to this size are added over devices as one

constrain = nn.spmd.with_logical_constraint  # the identity, with the sharding that the table in parallel/mesh.py gives


def per_device(
    local: Callable[..., jax.Array], q_BTNH: jax.Array, k_BTKH: jax.Array, v_BTKH: jax.Array, segment_ids_BT: SegmentIds
) -> jax.Array:
    """Run `local(q, k, v, segment_ids)` on each device's rows and heads, for kernels and loops that XLA cannot partition.

    Each device gets whole sequences and whole heads, whatever the table says of "length" and "head_dim".
    """
    axes = (("batch", None, name, None) for name in ("heads", "kv_heads"))
    if jax.sharding.get_abstract_mesh().empty or not nn.get_logical_axis_rules():
        return local(q_BTNH, k_BTKH, v_BTKH, segment_ids_BT)
    heads, kv_heads = map(nn.spmd.logical_to_mesh_axes, axes)
    if heads != kv_heads:
        # The mesh axis divides the query heads but not the key heads: repeat these to match.
        each = q_BTNH.shape[2] // k_BTKH.shape[2]
        k_BTKH, v_BTKH = (jnp.repeat(x, each, axis=2) for x in (k_BTKH, v_BTKH))
    # check_vma=False: the kernels do not annotate which mesh axes their results vary over.
    in_specs = heads, heads, heads, PartitionSpec(*(heads or ())[:2])
    divided = jax.shard_map(local, in_specs=in_specs, out_specs=heads, check_vma=False)
    return divided(q_BTNH, k_BTKH, v_BTKH, segment_ids_BT)


def weights_are_whole() -> bool:
    """Return whether each device holds all weights: only the batch is divided over the mesh."""
    return all(size == 1 for axis, size in jax.sharding.get_abstract_mesh().shape.items() if axis != "data")


def add_over_devices(local: Callable[[T, jax.Array], S], axis: str, weights: T, rows_B: jax.Array) -> S:
    """Compute `local(weights, rows)` on each device, with its share of the rows, and add the results over the devices.

    Arrays of up to `SMALL` numbers are added as one: devices of a CPU meet once for each array, which can take longer than
    adding it (docs/log.md).

    Args:
        local: a function that returns a tree of sums over rows. It is traced without a table of logical axes.
        axis: the mesh axis that divides the rows; nothing else is divided.
        weights: any tree, of which each device has a copy.
        rows_B: an array whose first axis the number of devices divides.
    """

    def on_device(weights: T, rows_B: jax.Array) -> S:
        with nn.logical_axis_rules(()):
            leaves, tree = jax.tree.flatten(local(weights, rows_B))
        together, split = ravel_pytree([leaf for leaf in leaves if leaf.size <= SMALL])
        together, large = jax.lax.psum((together, [leaf for leaf in leaves if leaf.size > SMALL]), axis)
        small = split(together)
        summed = [(small if leaf.size <= SMALL else large).pop(0) for leaf in leaves]
        return jax.tree.unflatten(tree, summed)  # type: ignore[no-any-return]

    whole, divided = PartitionSpec(), PartitionSpec(axis)
    # check_vma=False: gradients are those of a device's rows. Otherwise JAX would add each array over the devices by itself.
    added: S = jax.shard_map(on_device, in_specs=(whole, divided), out_specs=whole, check_vma=False)(weights, rows_B)
    return added
