"""Halos: the keys and values before the tokens of a device, which attention with a sliding window needs.

Devices have consecutive tokens of a row, or two chunks of consecutive tokens (`balanced_order`), which are put in separate rows
(`split_chunks`).
"""

from __future__ import annotations

import functools
import math
from typing import NamedTuple

import jax
import jax.numpy as jnp
import numpy as np

from jaxgpt.kernels.division import AttentionInputs
from jaxgpt.kernels.flash import LANES
from jaxgpt.kernels.online import Keys
from jaxgpt.ops import Array
from jaxgpt.ops.attention import NO_TOKEN, Positions


class Halo(NamedTuple):
    """The keys before the chunks of a device, which other devices have.

    One exception: in `balanced_order`, both chunks of the last device are consecutive, so the device itself has
    the keys before the second chunk.

    Attributes:
        axes: names of the mesh axes that shard positions.
        size: number of keys before each chunk of the device (`halo_size`).
        chunks: number of chunks of consecutive tokens of a device; 2: in the order of `balanced_order`.
    """

    axes: tuple[str, ...]
    size: int
    chunks: int

    def receive(self, inputs: AttentionInputs) -> Keys:
        """Return the keys and values of the halo and of this device, given the results of `split_inputs`."""
        rows = len(inputs.k_BKSH) // self.chunks
        tokens = inputs.k_BKSH.shape[2]
        place = halo_places(self, rows, tokens, inputs.row_place)
        return Keys(*with_halo(self, inputs.k_BKSH, inputs.v_BKHS), place)

    def send_back(self, dk_BKSH: Array, dv_BKHS: Array) -> tuple[Array, Array]:
        """Return the gradients of this device's keys and values, from the gradients of the results of `receive`."""
        return without_halo(self, dk_BKSH, dv_BKHS)


def balanced_order(tokens: int, devices: int) -> np.ndarray:
    """Return a permutation of the tokens of a row, int64 `[T]`, that divides causal attention equally over devices.

    The work is equal for rows of one document and attention without a sliding window.

    A row has `2 * devices` chunks. Device i has the chunks i and `2 * devices - 1 - i`: a chunk with few keys, and one with
    many. Source: the zigzag order of https://github.com/zhuzilin/ring-flash-attention.
    """
    chunks = np.arange(tokens).reshape(2 * devices, -1)
    order = [chunks[chunk] for device in range(devices) for chunk in (device, 2 * devices - 1 - device)]
    return np.concatenate(order)


def halo_size(window: int, tokens: int) -> int:
    """Return the number of tokens before a chunk that its queries attend to.

    The number is rounded up to a multiple of `LANES`, but not above `tokens`.

    Args:
        window: sliding window in tokens; 0: no limit.
        tokens: number of tokens of a chunk, which are consecutive and on one device.

    Returns:
        The number of tokens; 0: the window is 0 or 1, or also reaches tokens before the previous chunk.
    """
    if not 1 < window <= tokens + 1:
        return 0
    return min(LANES * math.ceil((window - 1) / LANES), tokens)


def split_chunks(x: Array, axis: int, chunks: int) -> Array:
    """Put the chunks of a device in separate rows: first all rows of the first chunk, then all of the second."""
    return jnp.concatenate(jnp.split(x, chunks, axis), 0)


def join_chunks(x: Array, axis: int, chunks: int) -> Array:
    """Invert `split_chunks`."""
    return jnp.concatenate(jnp.split(x, chunks, 0), axis)


def split_inputs(inputs: AttentionInputs, chunks: int) -> AttentionInputs:
    """Put the chunks of a device in separate rows; `row_place` is unchanged."""
    place = _split_place(inputs.place, chunks, rows=len(inputs.q_BTNH))
    return AttentionInputs(
        q_BTNH=split_chunks(inputs.q_BTNH, 1, chunks),
        k_BKSH=split_chunks(inputs.k_BKSH, 2, chunks),
        v_BKHS=split_chunks(inputs.v_BKHS, 3, chunks),
        place=place,
        row_place=inputs.row_place,
    )


def _split_place(place: Positions, chunks: int, rows: int) -> Positions:
    """Put the positions of the chunks of a device in separate rows, for arrays with this number of rows."""

    def split(x_BT: Array) -> Array:
        if chunks > 1:
            x_BT = jnp.broadcast_to(x_BT, (rows, x_BT.shape[1]))
        return split_chunks(x_BT, 1, chunks)

    return jax.tree.map(split, place)


def with_halo(halo: Halo, k_BKSH: Array, v_BKHS: Array) -> tuple[Array, Array]:
    """Prepend the keys and values of the tokens before each chunk, in rows of `split_chunks`; zeros before the first token."""
    received_k = _of_previous_chunk(halo, k_BKSH[:, :, -halo.size :])
    received_v = _of_previous_chunk(halo, v_BKHS[..., -halo.size :])
    return jnp.concatenate([received_k, k_BKSH], 2), jnp.concatenate([received_v, v_BKHS], 3)


def _of_previous_chunk(halo: Halo, x: Array) -> Array:
    """Exchange values of chunks, in rows of `split_chunks`: receive the values of the chunk before, or zeros."""
    axes = halo.axes
    if halo.chunks == 1:
        return _shift(axes, 1, x)
    # Device i has the chunks i and 2 * devices - 1 - i. The chunk before its second chunk is on the next device; on the
    # last device, it is the device's first chunk.
    early, late = jnp.split(x, 2)
    is_last = jax.lax.axis_index(axes) == jax.lax.axis_size(axes) - 1
    before_late = jnp.where(is_last, early, _shift(axes, -1, late))
    return jnp.concatenate([_shift(axes, 1, early), before_late])


def halo_places(halo: Halo, rows: int, tokens: int, row_place: Positions) -> Positions:
    """Return the positions of the keys of `with_halo`, given the positions of whole rows; `NO_TOKEN` before the first token.

    Args:
        halo: the halo.
        rows: number of rows of a device, before `split_chunks`.
        tokens: number of tokens of a chunk.
        row_place: positions of whole rows, in the order of the tokens.
    """
    devices = int(jax.lax.axis_size(halo.axes))
    index = jax.lax.axis_index(halo.axes)
    firsts = [index * tokens]
    if halo.chunks == 2:
        firsts.append((2 * devices - 1 - index) * tokens)

    def of_device(row_BT: Array) -> Array:
        if halo.chunks == 2:
            row_BT = jnp.broadcast_to(row_BT, (rows, row_BT.shape[1]))
            text_order = np.argsort(balanced_order(row_BT.shape[1], devices))
            row_BT = row_BT[:, text_order]
        padded = jnp.pad(row_BT, ((0, 0), (halo.size, 0)), constant_values=NO_TOKEN)
        of_chunks = [jax.lax.dynamic_slice_in_dim(padded, first, halo.size + tokens, axis=1) for first in firsts]
        return jnp.concatenate(of_chunks)

    return jax.tree.map(of_device, row_place)


def without_halo(halo: Halo, dk_BKSH: Array, dv_BKHS: Array) -> tuple[Array, Array]:
    """Send the gradients of the halo back, and add the received gradients: the transpose of `with_halo`."""
    extend = functools.partial(with_halo, halo)
    k_BKSH = dk_BKSH[:, :, halo.size :]
    v_BKHS = dv_BKHS[..., halo.size :]
    transposed = jax.linear_transpose(extend, k_BKSH, v_BKHS)
    dk_BKSH, dv_BKHS = transposed((dk_BKSH, dv_BKHS))
    return dk_BKSH, dv_BKHS


def _shift(axes: tuple[str, ...], by: int, x: Array) -> Array:
    """Send an array to the next device (`by` 1) or the previous (-1); the device without a sender receives zeros."""
    devices = int(jax.lax.axis_size(axes))
    pairs = [(device, device + by) for device in range(devices) if 0 <= device + by < devices]
    return jax.lax.ppermute(x, axes, pairs)
