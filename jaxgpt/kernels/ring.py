"""A ring of devices: keys and values move from device to device, and so do their gradients (Liu et al. 2023).

Each device computes the attention of its queries to the keys of one device at a time. Memory holds the keys and values of this
device and of one other device (two during a move). Gradients of keys and values are float32 while they move.
"""

from __future__ import annotations

from dataclasses import dataclass
from typing import NamedTuple, TypeVar

import jax
import jax.numpy as jnp

from jaxgpt.kernels import online
from jaxgpt.kernels.division import AttentionInputs
from jaxgpt.kernels.online import BackwardInputs, Keys, Queries, Rule, Softmax
from jaxgpt.ops import Array
from jaxgpt.ops.attention import Positions

Tree = TypeVar("Tree")


@dataclass(frozen=True)
class Ring:
    """The devices that divide the positions of a row.

    Attributes:
        axes: names of the mesh axes that shard positions, at least one.
    """

    axes: tuple[str, ...]

    def size(self) -> int:
        """Return the number of devices."""
        return int(jax.lax.axis_size(self.axes))

    def index(self) -> Array:
        """Return the index of this device."""
        index: Array = jax.lax.axis_index(self.axes)
        return index

    def to_next(self, tree: Tree) -> Tree:
        """Send a tree of arrays to the next device, and receive the tree of the previous device."""
        size = self.size()
        pairs = [(device, (device + 1) % size) for device in range(size)]
        moved: Tree = jax.tree.map(lambda x: jax.lax.ppermute(x, self.axes, pairs), tree)
        return moved


class Moving(NamedTuple):
    """Keys and values that move, and the index of the device that computed them.

    Values have the axis of positions last: both products of attention contract the last axis of each operand.
    """

    k_BKSH: Array
    v_BKHS: Array
    owner: Array

    def with_positions(self, row_place: Positions) -> Keys:
        """Return the keys and values with their positions, given the positions of whole rows."""
        S = self.k_BKSH.shape[2]

        def of_owner(row_BT: Array) -> Array:
            return jax.lax.dynamic_slice_in_dim(row_BT, self.owner * S, S, axis=1)

        return Keys(self.k_BKSH, self.v_BKHS, jax.tree.map(of_owner, row_place))


class Gradients(NamedTuple):
    """Gradients of keys and values that move with them, float32."""

    dk_BKSH: Array
    dv_BKHS: Array


def ring_forward(ring: Ring, rule: Rule, queries: Queries, inputs: AttentionInputs, state: Softmax) -> Softmax:
    """Add the keys of each device to the softmax of the tiled `queries`, starting with this device."""

    def add(keys: Moving, state: Softmax) -> Softmax:
        return online.add_keys(queries, keys.with_positions(inputs.row_place), state, rule)

    def hop(carry: tuple[Moving, Softmax], _: None) -> tuple[tuple[Moving, Softmax], None]:
        keys, state = carry
        # The next keys move while this device computes.
        next_keys = ring.to_next(keys)
        return (next_keys, add(keys, state)), None

    own = Moving(inputs.k_BKSH, inputs.v_BKHS, ring.index())
    (last, state), _ = jax.lax.scan(hop, (own, state), length=ring.size() - 1)
    return add(last, state)


def ring_backward(
    ring: Ring,
    rule: Rule,
    queries: Queries,
    saved: BackwardInputs,
    inputs: AttentionInputs,
    dq_nBKGtH: Array,
) -> tuple[Array, Gradients]:
    """Return dq plus the terms of all keys, and the gradients of this device's keys and values."""
    Carry = tuple[Moving, Array, Gradients]

    def add(keys: Moving, dq_nBKGtH: Array, sums: Gradients) -> tuple[Array, Gradients]:
        placed_keys = keys.with_positions(inputs.row_place)
        dq_nBKGtH, dk_BKSH, dv_BKHS = online.gradients(queries, saved, placed_keys, dq_nBKGtH, rule)
        return dq_nBKGtH, Gradients(sums.dk_BKSH + dk_BKSH, sums.dv_BKHS + dv_BKHS)

    def hop(carry: Carry, _: None) -> tuple[Carry, None]:
        keys, dq_nBKGtH, sums = carry
        dq_nBKGtH, sums = add(keys, dq_nBKGtH, sums)
        return (ring.to_next(keys), dq_nBKGtH, ring.to_next(sums)), None

    own = Moving(inputs.k_BKSH, inputs.v_BKHS, ring.index())
    zeros = Gradients(jnp.zeros(inputs.k_BKSH.shape, jnp.float32), jnp.zeros(inputs.v_BKHS.shape, jnp.float32))
    (last, dq_nBKGtH, sums), _ = jax.lax.scan(hop, (own, dq_nBKGtH, zeros), length=ring.size() - 1)
    dq_nBKGtH, sums = add(last, dq_nBKGtH, sums)
    # The last move returns the gradients to the device of their keys.
    return dq_nBKGtH, ring.to_next(sums)
