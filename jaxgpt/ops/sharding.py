"""Sharding constraints inside jitted functions, by the logical names of axes."""

from __future__ import annotations

from collections.abc import Callable

import flax.linen as nn
import jax
import jax.numpy as jnp
from jax.sharding import PartitionSpec

from jaxgpt.ops.attention import SegmentIds

constrain = nn.spmd.with_logical_constraint  # the identity, with the sharding that the table in parallel/mesh.py gives


def per_device(
    local: Callable[..., jax.Array], q_BTNH: jax.Array, k_BTKH: jax.Array, v_BTKH: jax.Array, segment_ids_BT: SegmentIds
) -> jax.Array:
    """Run `local(q, k, v, segment_ids)` on each device's rows and heads, for kernels and loops that XLA cannot partition.

    Each device gets whole sequences and whole heads, whatever the table says of "length" and "head_dim".
    """
    axes = (("batch", None, name, None) for name in ("heads", "kv_heads"))
    if jax.sharding.get_abstract_mesh().empty:
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
