"""Sharding constraints inside jitted functions, by the logical names of axes."""

from __future__ import annotations

import math

import flax.linen as nn
import jax

# `constrain(x, axis_names)` returns x with the sharding that the table in parallel/rules.py assigns.
constrain = nn.spmd.with_logical_constraint


def shards(name: str) -> int:
    """Return the number of shards of a logical axis on the current mesh; 1 without a mesh."""
    sizes = jax.sharding.get_abstract_mesh().shape
    axes = jax.tree.leaves(dict(nn.get_logical_axis_rules()).get(name))
    return math.prod(sizes.get(axis, 1) for axis in axes)
