"""The arrays of attention among the tokens of rows, and their division over the devices of a mesh."""

from __future__ import annotations

import math
from typing import Any, NamedTuple

import jax
from jax.sharding import PartitionSpec

from jaxgpt.kernels.devices import logical_spec, mesh_axes
from jaxgpt.ops import Array
from jaxgpt.ops.attention import Positions


class AttentionInputs(NamedTuple):
    """The arrays of attention without a cache, of all devices or of one device.

    Attributes:
        q_BTNH: queries.
        k_BKSH: keys of the same tokens.
        v_BKHS: values of the same tokens.
        place: positions of the same tokens.
        row_place: positions of all tokens of the rows: they are small, so each device has all.
    """

    q_BTNH: Array
    k_BKSH: Array
    v_BKHS: Array
    place: Positions
    row_place: Positions


class Division(NamedTuple):
    """The sharding of each of the `AttentionInputs` over the devices, by field; the output is sharded like the queries."""

    queries: PartitionSpec
    k: PartitionSpec
    v: PartitionSpec
    place: PartitionSpec
    row_place: PartitionSpec

    @property
    def inputs(self) -> Any:
        """The sharding of `AttentionInputs`, as `jax.shard_map` reads it."""
        specs: Any = tuple(self)
        return AttentionInputs(*specs)

    @property
    def axes(self) -> tuple[str, ...]:
        """Names of the mesh axes that shard positions."""
        return mesh_axes(self.queries, 1)

    @property
    def devices(self) -> int:
        """Number of devices that divide the positions of a row."""
        sizes = jax.sharding.get_abstract_mesh().shape
        return math.prod(sizes[axis] for axis in self.axes)


def division_of(q_BTNH: Array, place: Positions) -> Division:
    """Return how the current mesh and rules divide the arrays of attention."""
    queries = logical_spec("batch", "length", "heads", None)
    # Positions `[1, T]` are equal in all rows, so they are not sharded by rows.
    has_positions_per_row = len(place.position_BT) == len(q_BTNH)
    rows = queries[0] if has_positions_per_row else None
    return Division(
        queries=queries,
        k=logical_spec("batch", "heads", "length", None),
        v=logical_spec("batch", "heads", None, "length"),
        place=PartitionSpec(rows, queries[1]),
        row_place=PartitionSpec(rows, None),
    )
