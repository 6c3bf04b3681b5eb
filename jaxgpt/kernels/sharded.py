"""Attention over rows with positions sharded over devices: gathered attention, ring attention, and halo attention.

Each device has the queries, keys and values of some positions of a row. The functions differ in how a device receives the
keys and values of other devices:

- gathered: an all-gather, and a reduce-scatter of their gradients (`kernels/gather.py`). Memory holds the keys and values of
  whole rows, of one layer at a time.
- ring: keys and values move from device to device, and so do their gradients (`kernels/ring.py`).
- halo: with a sliding window, a device receives the keys and values before its tokens, and sends their gradients back
  (`kernels/halo.py`).

All receive the keys and values again in the backward pass. Gradients of keys and values are sent in float32 in a ring, and
otherwise in the dtype of the keys.
"""

from __future__ import annotations

import functools
from dataclasses import dataclass
from typing import Any, NamedTuple

import jax
import jax.numpy as jnp
from jax.ad_checkpoint import checkpoint_name

from jaxgpt.kernels import online
from jaxgpt.kernels.devices import on_mesh, with_heads_of_queries
from jaxgpt.kernels.division import AttentionInputs, division_of
from jaxgpt.kernels.gather import Gathered
from jaxgpt.kernels.halo import Halo, halo_size, join_chunks, split_inputs
from jaxgpt.kernels.online import Rule
from jaxgpt.kernels.remat import ATTENTION_RESULTS
from jaxgpt.kernels.ring import Ring, ring_backward, ring_forward
from jaxgpt.ops import Array, AttendFn
from jaxgpt.ops.attention import Edit, Visible, attend

# The exchanges of keys: a device receives all keys that it needs at once (`receive`, `send_back`) or, in a ring, the keys of
# one device at a time.
Exchange = Gathered | Halo | Ring


class Residuals(NamedTuple):
    """Values of the forward pass that the backward pass needs, on one device.

    Attributes:
        inputs: the arguments.
        out_BTNH: the output.
        lse_nBKGt: log-sum-exp of the scores, in tiles.
    """

    inputs: AttentionInputs
    out_BTNH: Array
    lse_nBKGt: Array


def gathered_attention(
    q_BTNH: Array, k_BKSH: Array, v_BKHS: Array, visible: Visible, scale: float, edit: Edit | None = None
) -> Array:
    """Compute attention to gathered keys. Calls with the keys of a cache, or with `edit`, use `attend`."""
    if _needs_definition(visible, edit):
        return attend(q_BTNH, k_BKSH, v_BKHS, visible, scale, edit)
    exchange = Gathered(_position_axes(q_BTNH, visible))
    return _attention(exchange, q_BTNH, k_BKSH, v_BKHS, visible, scale)


def ring_attention(
    q_BTNH: Array, k_BKSH: Array, v_BKHS: Array, visible: Visible, scale: float, edit: Edit | None = None
) -> Array:
    """Compute attention to keys that move in a ring. Calls with the keys of a cache, or with `edit`, use `attend`."""
    if _needs_definition(visible, edit):
        return attend(q_BTNH, k_BKSH, v_BKHS, visible, scale, edit)
    axes = _position_axes(q_BTNH, visible)
    exchange = Ring(axes) if axes else Gathered(())
    return _attention(exchange, q_BTNH, k_BKSH, v_BKHS, visible, scale)


def halo_attention(
    q_BTNH: Array, k_BKSH: Array, v_BKHS: Array, visible: Visible, scale: float, edit: Edit | None = None
) -> Array:
    """Compute attention within a sliding window, to keys of the same and of the previous device.

    Each device must have consecutive tokens of the row, in order. Calls without a window, with a window of 1, or with a window
    that reaches tokens before the previous device's tokens, gather all keys. Calls with the keys of a cache, or with `edit`,
    use `attend`.
    """
    if _needs_definition(visible, edit):
        return attend(q_BTNH, k_BKSH, v_BKHS, visible, scale, edit)
    exchange = _chunk_halo(q_BTNH, visible, chunks=1) or Gathered(_position_axes(q_BTNH, visible))
    return _attention(exchange, q_BTNH, k_BKSH, v_BKHS, visible, scale)


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
        halo = self._halo(q_BTNH, visible)
        if halo is None or _needs_definition(visible, edit):
            return self.full(q_BTNH, k_BKSH, v_BKHS, visible, scale, edit)
        return _attention(halo, q_BTNH, k_BKSH, v_BKHS, visible, scale)

    def _halo(self, q_BTNH: Array, visible: Visible) -> Halo | None:
        """Return the halo of both chunks of a device; None: the window does not allow it, or the order is for other devices."""
        # A device has whole chunks of the order if the order is for the number of devices that divide a row.
        is_ordered = on_mesh() and division_of(q_BTNH, visible.query).devices == self.balanced
        return _chunk_halo(q_BTNH, visible, chunks=2) if is_ordered else None


def _needs_definition(visible: Visible, edit: Edit | None) -> bool:
    """Return whether a call has the keys of a cache, or an edit, which only `attend` supports."""
    has_cache = visible.key is not None
    return edit is not None or has_cache


def _position_axes(q_BTNH: Array, visible: Visible) -> tuple[str, ...]:
    """Return the mesh axes that shard positions; (): no mesh, or rules that do not divide positions."""
    return division_of(q_BTNH, visible.query).axes if on_mesh() else ()


def _chunk_halo(q_BTNH: Array, visible: Visible, chunks: int) -> Halo | None:
    """Return the halo of each of the chunks of a device; None: positions are not sharded, or the window does not allow it."""
    axes = _position_axes(q_BTNH, visible)
    if not axes:
        return None
    devices = division_of(q_BTNH, visible.query).devices
    size = halo_size(visible.window, q_BTNH.shape[1] // (devices * chunks))
    return Halo(axes, size, chunks) if size else None


def _attention(
    exchange: Exchange, q_BTNH: Array, k_BKSH: Array, v_BKHS: Array, visible: Visible, scale: float
) -> Array:
    """Divide the arrays over the devices, and compute attention on each."""
    local = functools.partial(_local, exchange, visible.window, scale)
    # The positions are passed twice: sharded like the queries, and for whole rows.
    place = visible.query
    if not on_mesh():
        return local(AttentionInputs(q_BTNH, k_BKSH, v_BKHS, place, row_place=place))

    k_BKSH, v_BKHS = with_heads_of_queries(q_BTNH, k_BKSH, v_BKHS)
    division = division_of(q_BTNH, place)
    # check_vma=False: the branches of `online.add_keys` do not annotate which mesh axes their results vary over.
    divided = jax.shard_map(local, in_specs=(division.inputs,), out_specs=division.queries, check_vma=False)
    return divided(AttentionInputs(q_BTNH, k_BKSH, v_BKHS, place, row_place=place))


def _local(exchange: Exchange, window: int, scale: float, inputs: AttentionInputs) -> Array:
    """Compute attention on one device; with a halo, each chunk of its tokens is a row."""
    chunks = exchange.chunks if isinstance(exchange, Halo) else 1
    if chunks > 1:
        inputs = split_inputs(inputs, chunks)
    B, T, N, _ = inputs.q_BTNH.shape
    rule = Rule(window, scale, online.tile_size(T, B, N))
    out_BTNH: Array = _on_device(exchange, rule, inputs)
    return join_chunks(out_BTNH, 1, chunks) if chunks > 1 else out_BTNH


@functools.partial(jax.custom_vjp, nondiff_argnums=(0, 1))
def _on_device(exchange: Exchange, rule: Rule, inputs: AttentionInputs) -> Array:
    """Compute the attention from the queries of this device to the keys of all devices, or of this device and its halo."""
    out_BTNH, _ = _forward(exchange, rule, inputs)
    return out_BTNH


def _forward(exchange: Exchange, rule: Rule, inputs: AttentionInputs) -> tuple[Array, Residuals]:
    # In a scan over layers, JAX would compute the masks of all tiles once, and store them, because they depend on positions
    # only. With the barrier, positions depend on the layer.
    q_BTNH, place, row_place = jax.lax.optimization_barrier((inputs.q_BTNH, inputs.place, inputs.row_place))
    inputs = inputs._replace(q_BTNH=q_BTNH, place=place, row_place=row_place)
    K = inputs.k_BKSH.shape[1]
    queries = online.queries_of(q_BTNH, K, place, rule)
    state = online.empty_softmax(queries)
    if isinstance(exchange, Ring):
        state = ring_forward(exchange, rule, queries, inputs, state)
    else:
        state = online.add_keys(queries, exchange.receive(inputs), state, rule)

    # The backward pass needs these two arrays: rematerialization with `dots` and `offload` keeps them (`kernels/remat.py`).
    out_and_lse = online.finish(state, q_BTNH)
    out_BTNH, lse_nBKGt = checkpoint_name(out_and_lse, ATTENTION_RESULTS)
    return out_BTNH, Residuals(inputs, out_BTNH, lse_nBKGt)


def _backward(exchange: Exchange, rule: Rule, saved: Residuals, dout_BTNH: Array) -> tuple[AttentionInputs]:
    # Keys are gathered again: without the barrier, XLA would keep the gathered keys of all layers since the forward pass.
    # The barrier also holds the positions, for the reason in `_forward`.
    inputs = saved.inputs
    k_BKSH, v_BKHS, dout_BTNH, place, row_place = jax.lax.optimization_barrier(
        (inputs.k_BKSH, inputs.v_BKHS, dout_BTNH, inputs.place, inputs.row_place)
    )
    inputs = AttentionInputs(inputs.q_BTNH, k_BKSH, v_BKHS, place, row_place)
    K = k_BKSH.shape[1]
    queries = online.queries_of(inputs.q_BTNH, K, place, rule)
    of_queries = online.backward_inputs(saved.out_BTNH, saved.lse_nBKGt, dout_BTNH, K, rule)
    dq_nBKGtH = jnp.zeros(queries.q.shape, jnp.float32)
    if isinstance(exchange, Ring):
        dq_nBKGtH, sums = ring_backward(exchange, rule, queries, of_queries, inputs, dq_nBKGtH)
        dk_BKSH = sums.dk_BKSH.astype(k_BKSH.dtype)
        dv_BKHS = sums.dv_BKHS.astype(v_BKHS.dtype)
    else:
        keys = exchange.receive(inputs)
        dq_nBKGtH, dk_BKSH, dv_BKHS = online.gradients(queries, of_queries, keys, dq_nBKGtH, rule)
        dk_BKSH, dv_BKHS = exchange.send_back(dk_BKSH.astype(k_BKSH.dtype), dv_BKHS.astype(v_BKHS.dtype))

    dq_BTNH = online.joined(dq_nBKGtH, inputs.q_BTNH)
    no_gradient: Any = None  # positions are integers
    return (AttentionInputs(dq_BTNH, dk_BKSH, dv_BKHS, place=no_gradient, row_place=no_gradient),)


_on_device.defvjp(_forward, _backward)
