"""Attention over rows with positions sharded over devices: gathered attention, and ring attention.

Each device has the queries, keys and values of some positions of a row. The functions differ in how a device receives the
keys and values of other devices:

- gathered: an all-gather, and a reduce-scatter of their gradients (Grattafiori et al. 2024, section 3.3.2). Memory holds the
  keys and values of whole rows, of one layer at a time.
- ring: keys and values move from device to device, and so do their gradients (Liu et al. 2023). Memory holds the keys and
  values of one device.

Both receive the keys and values again in the backward pass. The gradients of keys and values are summed over devices in the
dtype of the keys if they are gathered, and in float32 in a ring.
"""

from __future__ import annotations

import functools
from collections.abc import Callable
from typing import Any, NamedTuple

import jax
import jax.numpy as jnp
import numpy as np
from jax.ad_checkpoint import checkpoint_name
from jax.sharding import PartitionSpec

from jaxgpt.kernels import online
from jaxgpt.kernels.devices import logical_spec, mesh_axes, on_mesh, with_heads_of_queries
from jaxgpt.kernels.online import BackwardInputs, Keys, Queries, Rule, Softmax
from jaxgpt.ops import Array
from jaxgpt.ops.attention import Edit, Positions, Visible, attend


class Layout(NamedTuple):
    """Static arguments of the attention of one device.

    Attributes:
        axes: names of the mesh axes that shard positions; (): none.
        rule: the mask, the scale and the tiles.
        ring: whether keys move in a ring; otherwise they are gathered.
    """

    axes: tuple[str, ...]
    rule: Rule
    ring: bool


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
    return _attention(q_BTNH, k_BKSH, v_BKHS, visible, scale, edit, ring=False)


def ring_attention(
    q_BTNH: Array, k_BKSH: Array, v_BKHS: Array, visible: Visible, scale: float, edit: Edit | None = None
) -> Array:
    """Compute attention to keys that move in a ring. Calls with the keys of a cache, or with `edit`, use `attend`."""
    return _attention(q_BTNH, k_BKSH, v_BKHS, visible, scale, edit, ring=True)


def balanced_order(tokens: int, devices: int) -> np.ndarray:
    """Return a permutation of the tokens of a row, int64 `[T]`, that divides causal attention equally over devices.

    A row has `2 * devices` chunks. Device i has the chunks i and `2 * devices - 1 - i`: a chunk with few keys, and one with
    many. Source: the zigzag order of https://github.com/zhuzilin/ring-flash-attention.
    """
    chunks = np.arange(tokens).reshape(2 * devices, -1)
    order = [chunks[chunk] for device in range(devices) for chunk in (device, 2 * devices - 1 - device)]
    return np.concatenate(order)


def _attention(
    q_BTNH: Array, k_BKSH: Array, v_BKHS: Array, visible: Visible, scale: float, edit: Edit | None, ring: bool
) -> Array:
    """Divide the arrays over the devices, and compute attention on each."""
    has_cache = visible.key is not None
    if edit is not None or has_cache:
        return attend(q_BTNH, k_BKSH, v_BKHS, visible, scale, edit)
    place = visible.query
    if not on_mesh():
        local = _make_local((), visible.window, scale, ring)
        return local(q_BTNH, k_BKSH, v_BKHS, place, place)
    k_BKSH, v_BKHS = with_heads_of_queries(q_BTNH, k_BKSH, v_BKHS)

    of_queries = logical_spec("batch", "length", "heads", None)
    of_k = logical_spec("batch", "heads", "length", None)
    of_v = logical_spec("batch", "heads", None, "length")
    # Positions without rows are equal in all rows.
    has_positions_per_row = len(place.position_BT) == len(q_BTNH)
    rows = of_queries[0] if has_positions_per_row else None
    of_place = PartitionSpec(rows, of_queries[1])
    # The positions of keys are small: each device has those of whole rows.
    of_row_place = PartitionSpec(rows, None)
    specs = of_queries, of_k, of_v, of_place, of_row_place
    local = _make_local(mesh_axes(of_queries, 1), visible.window, scale, ring)
    # check_vma=False: the derivative is defined on each device.
    divided = jax.shard_map(local, in_specs=specs, out_specs=of_queries, check_vma=False)
    # The positions are passed twice: of the queries of a device, and of whole rows.
    return divided(q_BTNH, k_BKSH, v_BKHS, place, place)


def _make_local(axes: tuple[str, ...], window: int, scale: float, ring: bool) -> Callable[..., Array]:
    """Return the attention of one device, `(q, k, v, positions of its tokens, positions of whole rows) -> out_BTNH`."""

    def local(q_BTNH: Array, k_BKSH: Array, v_BKHS: Array, place: Positions, row_place: Positions) -> Array:
        B, T, N, _ = q_BTNH.shape
        rule = Rule(window, scale, online.tile_size(T, B, N))
        layout = Layout(axes, rule, ring and bool(axes))
        out_BTNH: Array = _on_device(layout, q_BTNH, k_BKSH, v_BKHS, place, row_place)
        return out_BTNH

    return local


@functools.partial(jax.custom_vjp, nondiff_argnums=(0,))
def _on_device(
    layout: Layout, q_BTNH: Array, k_BKSH: Array, v_BKHS: Array, place: Positions, row_place: Positions
) -> Array:
    """Compute the attention from the queries of this device to the keys of all devices."""
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
    # Positions: see `_forward`.
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
        dk_BKSH, dv_BKHS = _scattered(layout, dk_BKSH.astype(k_BKSH.dtype), dv_BKHS.astype(v_BKHS.dtype))

    dq_BTNH = online.joined(dq_nBKGtH, saved.q_BTNH)
    return dq_BTNH, dk_BKSH.astype(k_BKSH.dtype), dv_BKHS.astype(v_BKHS.dtype), None, None


_on_device.defvjp(_forward, _backward)


# Gathered keys.


def _gathered(layout: Layout, k_BKSH: Array, v_BKHS: Array, row_place: Positions) -> Keys:
    """Gather the keys and values of whole rows."""
    if layout.axes:
        gather = functools.partial(jax.lax.all_gather, axis_name=layout.axes, tiled=True)
        k_BKSH = gather(k_BKSH, axis=2)
        v_BKHS = gather(v_BKHS, axis=3)
    return Keys(k_BKSH, v_BKHS, row_place)


def _scattered(layout: Layout, dk_BKSH: Array, dv_BKHS: Array) -> tuple[Array, Array]:
    """Add the gradients of whole rows over the devices, and return those of the keys and values of this device."""
    if not layout.axes:
        return dk_BKSH, dv_BKHS
    # One collective: the TPU compiler would replace the second of two with an all-reduce, which sends twice as much.
    both = jnp.stack([dk_BKSH, dv_BKHS.swapaxes(2, 3)])
    dk_BKSH, dv_BKSH = jax.lax.psum_scatter(both, layout.axes, scatter_dimension=3, tiled=True)
    return dk_BKSH, dv_BKSH.swapaxes(2, 3)


# Keys that move in a ring.


def _ring_forward(
    layout: Layout, queries: Queries, k: Array, v: Array, row_place: Positions, state: Softmax
) -> Softmax:
    """Add the keys of each device to the softmax, first those of this device."""

    def add(keys: Moving, state: Softmax) -> Softmax:
        return online.add_keys(queries, _at(layout, keys, row_place), state, layout.rule)

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
    """Return dq, and the gradients of the keys and values of this device, which move with them in float32."""

    def add(keys: Moving, dq: Array, dk: Array, dv: Array) -> tuple[Array, Array, Array]:
        dq, more_dk, more_dv = online.gradients(queries, saved, _at(layout, keys, row_place), dq, layout.rule)
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


def _at(layout: Layout, keys: Moving, row_place: Positions) -> Keys:
    """Return keys with their positions."""
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
