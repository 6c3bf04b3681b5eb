"""Attention over rows with positions sharded over devices: gathered attention, ring attention, and halo attention.

Each device has the queries, keys and values of some positions of a row. The functions differ in how a device receives the
keys and values of other devices:

- gathered: an all-gather, and a reduce-scatter of their gradients (Grattafiori et al. 2024, section 3.3.2). Memory holds the
  keys and values of whole rows, of one layer at a time.
- ring: keys and values move from device to device, and so do their gradients (Liu et al. 2023). Memory holds the keys
  and values of this device and of one other device (two during a move).
- halo: with a sliding window, a device receives the keys and values before its tokens, and sends their gradients back
  (`kernels/halo.py`).

All receive the keys and values again in the backward pass. Gradients of keys and values are sent in float32 in a ring, and
otherwise in the dtype of the keys.
"""

from __future__ import annotations

import functools
import math
from dataclasses import dataclass
from typing import Any, NamedTuple

import jax
import jax.numpy as jnp
from jax.ad_checkpoint import checkpoint_name
from jax.sharding import PartitionSpec

from jaxgpt.kernels import online
from jaxgpt.kernels.devices import logical_spec, mesh_axes, on_mesh, with_heads_of_queries
from jaxgpt.kernels.halo import (
    Halo,
    halo_places,
    halo_size,
    join_chunks,
    split_chunks,
    split_place,
    with_halo,
    without_halo,
)
from jaxgpt.kernels.online import BackwardInputs, Keys, Queries, Rule, Softmax
from jaxgpt.ops import Array, AttendFn
from jaxgpt.ops.attention import Edit, Positions, Visible, attend


class Exchange(NamedTuple):
    """The exchange of keys between the devices that have the positions of a row.

    Attributes:
        ring: whether all keys move in a ring; otherwise they are gathered.
        chunks: number of chunks of consecutive tokens of a device, each with a halo if the window allows it (`halo_size`);
            0: tokens in any order, without a halo.
    """

    ring: bool = False
    chunks: int = 0


GATHERED = Exchange()
RING = Exchange(ring=True)
HALO = Exchange(chunks=1)
TWO_HALOS = Exchange(chunks=2)  # tokens in balanced order


class Layout(NamedTuple):
    """Static arguments of the attention of one device.

    Attributes:
        axes: names of the mesh axes that shard positions; (): none.
        rule: the mask, the scale and the tiles.
        ring: whether keys move in a ring; otherwise they are gathered, or are in `halo`.
        halo: the keys that a device receives; None: the keys of all devices.
    """

    axes: tuple[str, ...]
    rule: Rule
    ring: bool = False
    halo: Halo | None = None


class Division(NamedTuple):
    """The sharding of each array of attention over the devices."""

    queries: PartitionSpec
    k: PartitionSpec
    v: PartitionSpec
    place: PartitionSpec  # positions of the tokens of a device
    row_place: PartitionSpec  # positions of whole rows: they are small, so each device has all

    @property
    def axes(self) -> tuple[str, ...]:
        """Names of the mesh axes that shard positions."""
        return mesh_axes(self.queries, 1)

    @property
    def devices(self) -> int:
        """Number of devices that have the positions of a row."""
        sizes = jax.sharding.get_abstract_mesh().shape
        return math.prod(sizes[axis] for axis in self.axes)


class Moving(NamedTuple):
    """Keys and values in a ring, and the index of the device that computed them.

    Values have the axis of positions last: both products of attention contract the last axis of each operand.
    """

    k_BKSH: Array
    v_BKHS: Array
    owner: Array


class Residuals(NamedTuple):
    """Values of the forward pass that the backward pass needs: the arguments and results of one device.

    Attributes:
        place: positions of the tokens of the device.
        row_place: positions of whole rows.
        lse_nBKGt: log-sum-exp of the scores, in tiles.
    """

    q_BTNH: Array
    k_BKSH: Array
    v_BKHS: Array
    place: Positions
    row_place: Positions
    out_BTNH: Array
    lse_nBKGt: Array


def gathered_attention(
    q_BTNH: Array, k_BKSH: Array, v_BKHS: Array, visible: Visible, scale: float, edit: Edit | None = None
) -> Array:
    """Compute attention to gathered keys. Calls with the keys of a cache, or with `edit`, use `attend`."""
    return _attention(GATHERED, q_BTNH, k_BKSH, v_BKHS, visible, scale, edit)


def ring_attention(
    q_BTNH: Array, k_BKSH: Array, v_BKHS: Array, visible: Visible, scale: float, edit: Edit | None = None
) -> Array:
    """Compute attention to keys that move in a ring. Calls with the keys of a cache, or with `edit`, use `attend`."""
    return _attention(RING, q_BTNH, k_BKSH, v_BKHS, visible, scale, edit)


def halo_attention(
    q_BTNH: Array, k_BKSH: Array, v_BKHS: Array, visible: Visible, scale: float, edit: Edit | None = None
) -> Array:
    """Compute attention within a sliding window, to keys of the same and of the previous device.

    Each device must have consecutive tokens of the row, in order. Calls without a window, with a window of 1, or with a window
    that reaches tokens before those of the previous device, gather all keys. Calls with the keys of a cache, or with `edit`,
    use `attend`.
    """
    return _attention(HALO, q_BTNH, k_BKSH, v_BKHS, visible, scale, edit)


@dataclass(frozen=True)
class MixedAttention:
    """The attention of layers with and without a sliding window, over tokens in balanced order; it compares by value.

    With a window that reaches at most the previous chunk (`halo_size`), a device receives a halo before each of its two chunks.
    Other calls use `full`.

    Attributes:
        full: `gathered_attention` or `ring_attention`.
        balanced: number of devices that the order of the tokens balances (`halo.balanced_order`).
    """

    full: AttendFn
    balanced: int

    def __call__(
        self, q_BTNH: Array, k_BKSH: Array, v_BKHS: Array, visible: Visible, scale: float, edit: Edit | None = None
    ) -> Array:
        """Compute `ops.attention.attend` among the tokens of a row, which are in `balanced_order`."""
        if not on_mesh() or not self._has_halo(q_BTNH, visible):
            return self.full(q_BTNH, k_BKSH, v_BKHS, visible, scale, edit)
        return _attention(TWO_HALOS, q_BTNH, k_BKSH, v_BKHS, visible, scale, edit)

    def _has_halo(self, q_BTNH: Array, visible: Visible) -> bool:
        # A device has whole chunks of the order if the order is for the number of devices that divide a row.
        is_ordered = division_of(q_BTNH, visible.query).devices == self.balanced
        return is_ordered and halo_size(visible.window, q_BTNH.shape[1] // (2 * self.balanced)) > 0


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


def _attention(
    exchange: Exchange,
    q_BTNH: Array,
    k_BKSH: Array,
    v_BKHS: Array,
    visible: Visible,
    scale: float,
    edit: Edit | None,
) -> Array:
    """Divide the arrays over the devices, and compute attention on each."""
    has_cache = visible.key is not None
    if edit is not None or has_cache:
        return attend(q_BTNH, k_BKSH, v_BKHS, visible, scale, edit)
    place = visible.query
    if not on_mesh():
        return _local(GATHERED, (), visible.window, scale, q_BTNH, k_BKSH, v_BKHS, place, place)
    k_BKSH, v_BKHS = with_heads_of_queries(q_BTNH, k_BKSH, v_BKHS)

    division = division_of(q_BTNH, place)
    # Rules may leave the positions whole: then each device has all keys.
    exchange = exchange if division.axes else GATHERED
    local = functools.partial(_local, exchange, division.axes, visible.window, scale)
    # check_vma=False: the derivative is defined on each device.
    divided = jax.shard_map(local, in_specs=tuple(division), out_specs=division.queries, check_vma=False)
    # The positions are passed twice: sharded like the queries, and for whole rows.
    return divided(q_BTNH, k_BKSH, v_BKHS, place, place)


def _local(
    exchange: Exchange,
    axes: tuple[str, ...],
    window: int,
    scale: float,
    q_BTNH: Array,
    k_BKSH: Array,
    v_BKHS: Array,
    place: Positions,
    row_place: Positions,
) -> Array:
    """Compute attention on one device: with a halo before each of its chunks, if possible, or to the keys of all devices."""
    B, T, N, _ = q_BTNH.shape
    chunks = exchange.chunks
    size = halo_size(window, T // chunks) if chunks else 0
    if not size:
        rule = Rule(window, scale, online.tile_size(T, B, N))
        layout = Layout(axes, rule, ring=exchange.ring)
        out_BTNH: Array = _on_device(layout, q_BTNH, k_BKSH, v_BKHS, place, row_place)
        return out_BTNH

    place = split_place(place, chunks, B)
    q_BTNH = split_chunks(q_BTNH, 1, chunks)
    k_BKSH = split_chunks(k_BKSH, 2, chunks)
    v_BKHS = split_chunks(v_BKHS, 3, chunks)
    rule = Rule(window, scale, online.tile_size(T // chunks, chunks * B, N))
    layout = Layout(axes, rule, halo=Halo(axes, size, chunks))
    out_BTNH = _on_device(layout, q_BTNH, k_BKSH, v_BKHS, place, row_place)
    return join_chunks(out_BTNH, 1, chunks)


@functools.partial(jax.custom_vjp, nondiff_argnums=(0,))
def _on_device(
    layout: Layout, q_BTNH: Array, k_BKSH: Array, v_BKHS: Array, place: Positions, row_place: Positions
) -> Array:
    """Compute the attention from the queries of this device to the keys of all devices, or of this device and its halo."""
    out_BTNH, _ = _forward(layout, q_BTNH, k_BKSH, v_BKHS, place, row_place)
    return out_BTNH


def _forward(
    layout: Layout, q_BTNH: Array, k_BKSH: Array, v_BKHS: Array, place: Positions, row_place: Positions
) -> tuple[Array, Residuals]:
    # In a scan over layers, JAX would compute the masks of all tiles once, and store them, because they depend on positions
    # only. With the barrier, positions depend on the layer.
    q_BTNH, place, row_place = jax.lax.optimization_barrier((q_BTNH, place, row_place))
    K = k_BKSH.shape[1]
    queries = online.queries_of(q_BTNH, K, place, layout.rule)
    state = online.empty_softmax(queries)
    if layout.ring:
        state = _ring_forward(layout, queries, k_BKSH, v_BKHS, row_place, state)
    else:
        keys = _gathered(layout, k_BKSH, v_BKHS, row_place)
        state = online.add_keys(queries, keys, state, layout.rule)

    # The backward pass needs these two arrays: rematerialization with `dots` and `offload` keeps them (`kernels/remat.py`).
    out_and_lse = online.finish(state, q_BTNH)
    out_BTNH, lse_nBKGt = checkpoint_name(out_and_lse, "attention")
    return out_BTNH, Residuals(q_BTNH, k_BKSH, v_BKHS, place, row_place, out_BTNH, lse_nBKGt)


def _backward(layout: Layout, saved: Residuals, dout_BTNH: Array) -> tuple[Any, ...]:
    # Keys are gathered again: without the barrier, XLA would keep the gathered keys of all layers since the forward pass.
    # The barrier also holds the positions, for the reason in `_forward`.
    k_BKSH, v_BKHS, dout_BTNH, place, row_place = jax.lax.optimization_barrier(
        (saved.k_BKSH, saved.v_BKHS, dout_BTNH, saved.place, saved.row_place)
    )
    K = k_BKSH.shape[1]
    queries = online.queries_of(saved.q_BTNH, K, place, layout.rule)
    of_queries = online.backward_inputs(saved.out_BTNH, saved.lse_nBKGt, dout_BTNH, K, layout.rule)
    dq_nBKGtH = jnp.zeros(queries.q.shape, jnp.float32)
    if layout.ring:
        dq_nBKGtH, dk_BKSH, dv_BKHS = _ring_backward(layout, queries, of_queries, k_BKSH, v_BKHS, row_place, dq_nBKGtH)
    else:
        keys = _gathered(layout, k_BKSH, v_BKHS, row_place)
        dq_nBKGtH, dk_BKSH, dv_BKHS = online.gradients(queries, of_queries, keys, dq_nBKGtH, layout.rule)
        dk_BKSH, dv_BKHS = _returned(layout, dk_BKSH.astype(k_BKSH.dtype), dv_BKHS.astype(v_BKHS.dtype))

    dq_BTNH = online.joined(dq_nBKGtH, saved.q_BTNH)
    return dq_BTNH, dk_BKSH.astype(k_BKSH.dtype), dv_BKHS.astype(v_BKHS.dtype), None, None


_on_device.defvjp(_forward, _backward)


# Gathered keys.


def _gathered(layout: Layout, k_BKSH: Array, v_BKHS: Array, row_place: Positions) -> Keys:
    """Gather the keys and values of whole rows, or of the halo and this device."""
    if layout.halo is not None:
        rows = len(k_BKSH) // layout.halo.chunks
        tokens = k_BKSH.shape[2]
        place = halo_places(layout.halo, rows, tokens, row_place)
        return Keys(*with_halo(layout.halo, k_BKSH, v_BKHS), place)
    if layout.axes:
        k_BKSH, v_BKHS = gather_keys(layout.axes, k_BKSH, v_BKHS)
    return Keys(k_BKSH, v_BKHS, row_place)


def _returned(layout: Layout, dk_BKSH: Array, dv_BKHS: Array) -> tuple[Array, Array]:
    """Return the gradients of this device's keys and values, from the gradients of the results of `_gathered`."""
    if layout.halo is not None:
        return without_halo(layout.halo, dk_BKSH, dv_BKHS)
    if layout.axes:
        return _scatter(layout.axes, dk_BKSH, dv_BKHS)
    return dk_BKSH, dv_BKHS


@functools.partial(jax.custom_vjp, nondiff_argnums=(0,))
def gather_keys(axes: tuple[str, ...], k_BKSH: Array, v_BKHS: Array) -> tuple[Array, Array]:
    """Gather the keys and values of whole rows over mesh axes; the derivative adds the gradients of all devices."""
    gather = functools.partial(jax.lax.all_gather, axis_name=axes, tiled=True)
    return gather(k_BKSH, axis=2), gather(v_BKHS, axis=3)


def _scatter(axes: tuple[str, ...], dk_BKSH: Array, dv_BKHS: Array) -> tuple[Array, Array]:
    """Reduce-scatter the gradients of whole rows: return the gradients of this device's keys and values."""
    # Use one collective: the TPU compiler would replace the second of two with an all-reduce, which sends twice as much.
    both = jnp.stack([dk_BKSH, dv_BKHS.swapaxes(2, 3)])
    dk_BKSH, dv_BKSH = jax.lax.psum_scatter(both, axes, scatter_dimension=3, tiled=True)
    return dk_BKSH, dv_BKSH.swapaxes(2, 3)


gather_keys.defvjp(
    lambda axes, k_BKSH, v_BKHS: (gather_keys(axes, k_BKSH, v_BKHS), None),
    lambda axes, _, gradients: _scatter(axes, *gradients),
)


# Keys that move in a ring.


def _ring_forward(
    layout: Layout, queries: Queries, k: Array, v: Array, row_place: Positions, state: Softmax
) -> Softmax:
    """Add the keys of each device to the softmax, starting with this device."""

    def add(keys: Moving, state: Softmax) -> Softmax:
        return online.add_keys(queries, _with_positions(keys, row_place), state, layout.rule)

    def hop(carry: tuple[Moving, Softmax], _: None) -> tuple[tuple[Moving, Softmax], None]:
        keys, state = carry
        # The next keys move while this device computes.
        return (_to_next(layout, keys), add(keys, state)), None

    own = Moving(k, v, _ring_index(layout))
    (last, state), _ = jax.lax.scan(hop, (own, state), length=_devices(layout) - 1)
    return add(last, state)


def _ring_backward(
    layout: Layout, queries: Queries, saved: BackwardInputs, k: Array, v: Array, row_place: Positions, dq: Array
) -> tuple[Array, Array, Array]:
    """Return dq, and the gradients of this device's keys and values; they move together with the keys, in float32."""

    def add(keys: Moving, dq: Array, dk: Array, dv: Array) -> tuple[Array, Array, Array]:
        dq, more_dk, more_dv = online.gradients(queries, saved, _with_positions(keys, row_place), dq, layout.rule)
        return dq, dk + more_dk, dv + more_dv

    def hop(carry: Any, _: None) -> tuple[Any, None]:
        keys, dq, dk, dv = carry
        dq, dk, dv = add(keys, dq, dk, dv)
        return (_to_next(layout, keys), dq, *_to_next(layout, (dk, dv))), None

    own = Moving(k, v, _ring_index(layout))
    zeros = jnp.zeros(k.shape, jnp.float32), jnp.zeros(v.shape, jnp.float32)
    (last, dq, dk, dv), _ = jax.lax.scan(hop, (own, dq, *zeros), length=_devices(layout) - 1)
    # The last move returns the gradients to the device of their keys.
    dq, dk, dv = add(last, dq, dk, dv)
    dk, dv = _to_next(layout, (dk, dv))
    return dq, dk, dv


def _with_positions(keys: Moving, row_place: Positions) -> Keys:
    """Return the keys of a device with their positions, given the positions of whole rows."""
    S = keys.k_BKSH.shape[2]

    def of_owner(row_BT: Array) -> Array:
        return jax.lax.dynamic_slice_in_dim(row_BT, keys.owner * S, S, axis=1)

    return Keys(keys.k_BKSH, keys.v_BKHS, jax.tree.map(of_owner, row_place))


def _to_next(layout: Layout, tree: Any) -> Any:
    """Send a tree of arrays to the next device of the ring."""
    devices = _devices(layout)
    pairs = [(device, (device + 1) % devices) for device in range(devices)]
    return jax.tree.map(lambda x: jax.lax.ppermute(x, layout.axes, pairs), tree)


def _ring_index(layout: Layout) -> Array:
    """Return the index of this device in the ring."""
    index: Array = jax.lax.axis_index(layout.axes)
    return index


def _devices(layout: Layout) -> int:
    """Return the number of devices of the ring."""
    return int(jax.lax.axis_size(layout.axes))
