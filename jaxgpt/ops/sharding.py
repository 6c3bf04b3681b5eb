"""Sharding constraints inside jitted functions, by the logical names of axes."""

from __future__ import annotations

import flax.linen as nn

# (x, axis names) -> x: the identity, with the sharding that the table in parallel/mesh.py assigns.
constrain = nn.spmd.with_logical_constraint
