"""Sharding constraints inside jitted functions, by the logical names of axes."""

from __future__ import annotations

import flax.linen as nn

# `constrain(x, axis_names)` returns x with the sharding that the table in parallel/rules.py assigns.
constrain = nn.spmd.with_logical_constraint
