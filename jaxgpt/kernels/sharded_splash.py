"""Splash attention over rows with positions sharded over devices: a TPU kernel for the queries of each device.

A device gathers the keys and values of whole rows or, with a sliding window, receives the keys and values before its tokens
(`kernels/halo.py`), forward and backward. Then one call of the kernel computes its queries. A ring would call the kernel for
each pair of devices, but the kernel's public functions have no derivative for a softmax that is a part of a larger softmax.
"""

from __future__ import annotations

import functools
import math
from collections.abc import Callable
from dataclasses import dataclass
from typing import Any

import jax
import jax.numpy as jnp
from jax.sharding import NamedSharding, PartitionSpec

from jaxgpt.kernels.devices import on_mesh, with_heads_of_queries
from jaxgpt.kernels.division import AttentionInputs, Division, division_of
from jaxgpt.kernels.flash import LANES
from jaxgpt.kernels.gather import gather_keys
from jaxgpt.kernels.halo import (
    Halo,
    halo_places,
    halo_size,
    join_chunks,
    split_inputs,
    with_halo,
)
from jaxgpt.kernels.remat import ATTENTION_RESULTS
from jaxgpt.kernels.sharded import gathered_attention
from jaxgpt.ops import Array
from jaxgpt.ops.attention import NO_TOKEN, Edit, Positions, Visible, attend

TILE = 512  # maximum number of queries or keys in a tile: masks of larger tiles do not fit the memory of a kernel


@dataclass(frozen=True)
class ShardedSplash:
    """The attention function of meshes that divide positions, on TPUs; it compares by value.

    Calls with the keys of a cache, or with an edit, use `attend`; numbers of tokens without a tile (`tile_size`), and calls
    without a mesh, use `gathered_attention`.

    Attributes:
        balanced: number of devices that the order of the tokens balances (`halo.balanced_order`); 1: consecutive tokens.
    """

    balanced: int = 1

    def __call__(
        self, q_BTNH: Array, k_BKSH: Array, v_BKHS: Array, visible: Visible, scale: float, edit: Edit | None = None
    ) -> Array:
        """Compute `ops.attention.attend` among the tokens of a row, which are in the order of `balanced`."""
        if edit is not None or visible.key is not None:
            return attend(q_BTNH, k_BKSH, v_BKHS, visible, scale, edit)
        if not on_mesh():
            return gathered_attention(q_BTNH, k_BKSH, v_BKHS, visible, scale)
        division = division_of(q_BTNH, visible.query)
        T = q_BTNH.shape[1]
        tile = tile_size(T, division.devices, self.balanced)
        if not tile:
            return gathered_attention(q_BTNH, k_BKSH, v_BKHS, visible, scale)

        k_BKSH, v_BKHS = with_heads_of_queries(q_BTNH, k_BKSH, v_BKHS)
        inputs = AttentionInputs(
            q_BTNH=q_BTNH * jnp.asarray(scale, q_BTNH.dtype),
            k_BKSH=k_BKSH,
            v_BKHS=v_BKHS,
            place=visible.query,  # divided over the devices, like the queries
            row_place=visible.query,  # whole rows on each device
        )
        halo = self._halo(division, visible.window, T)
        if halo is not None:
            return _attend_within_halo(halo, visible.window, tile, division, inputs)
        return _attend_over_rows(self.balanced, visible.window, tile, division, inputs)

    def _halo(self, division: Division, window: int, T: int) -> Halo | None:
        """Return the halo of a device; None: it needs the keys of whole rows."""
        # A device has whole chunks of the order if the order is for the number of devices that divide a row.
        if self.balanced not in (1, division.devices):
            return None
        chunks = 1 if self.balanced == 1 else 2
        size = halo_size(window, T // division.devices // chunks)
        return Halo(division.axes, size, chunks) if size else None


def tile_size(T: int, devices: int, balanced: int = 1) -> int:
    """Return the largest tile, in tokens, that divides the tokens of a device and the chunks of the order; 0: no such tile.

    Args:
        T: number of tokens of a row.
        devices: number of devices that divide a row.
        balanced: number of devices in `halo.balanced_order`; 1: consecutive tokens.
    """
    chunks = math.lcm(devices, 2 * balanced if balanced > 1 else 1)
    for tile in range(TILE, 0, -LANES):
        if T % (chunks * tile) == 0:
            return tile
    return 0


def _attend_over_rows(balanced: int, window: int, tile: int, division: Division, inputs: AttentionInputs) -> Array:
    """Compute attention to the keys of whole rows."""
    from jaxgpt.kernels.splash_mask import RowMask  # a slow import, 1 s

    splash = _splash()
    _, T, heads, _ = inputs.q_BTNH.shape
    mask = splash.MultiHeadMask([RowMask(T, balanced, window)] * heads)
    kernel = splash.make_splash_mha(mask, head_shards=1, q_seq_shards=division.devices, **_options(tile))
    # The kernel of a device holds its rows of the mask, which are sharded like the queries.
    rows = NamedSharding(jax.sharding.get_abstract_mesh(), PartitionSpec(None, division.axes or None))
    kernel_spec = kernel.manual_sharding_spec(rows)

    def local(kernel: Any, inputs: AttentionInputs) -> Array:
        keys_values = inputs.k_BKSH, inputs.v_BKHS
        if division.axes:
            keys_values = gather_keys(division.axes, *keys_values)
        return _attend(kernel, inputs.q_BTNH, *keys_values, inputs.place.document_BT, inputs.row_place.document_BT)

    return _on_devices(local, (kernel, inputs), (kernel_spec, division.inputs), division)


def _attend_within_halo(halo: Halo, window: int, tile: int, division: Division, inputs: AttentionInputs) -> Array:
    """Compute attention within a window, to the keys of the halo and of each device."""
    local = functools.partial(_within_halo, halo, window, tile)
    return _on_devices(local, (inputs,), (division.inputs,), division)


def _on_devices(
    local: Callable[..., Array], arguments: tuple[Any, ...], specs: tuple[Any, ...], division: Division
) -> Array:
    """Compute `local(*arguments)` on each device, with arguments that are sharded like `specs`.

    To save memory, the backward pass receives the keys again; only the results of the kernel are saved.
    """
    saves_results = jax.checkpoint_policies.save_only_these_names(ATTENTION_RESULTS)
    local = jax.checkpoint(local, policy=saves_results)
    # check_vma=False: the kernel does not annotate which mesh axes its results vary over.
    divided = jax.shard_map(local, in_specs=specs, out_specs=division.queries, check_vma=False)
    out_BTNH: Array = divided(*arguments)
    return out_BTNH


def _within_halo(halo: Halo, window: int, tile: int, inputs: AttentionInputs) -> Array:
    """Compute attention within a window on one device, to the keys of the halo and of this device."""
    rows = len(inputs.q_BTNH)
    # The document id `NO_TOKEN` hides the keys before the first token of a row, so rows of one document need ids, too.
    if inputs.row_place.document_BT is None:
        inputs = inputs._replace(place=_one_document(inputs.place), row_place=_one_document(inputs.row_place))

    inputs = split_inputs(inputs, halo.chunks)
    q_BTNH = inputs.q_BTNH
    tokens = q_BTNH.shape[1]
    k_BKSH, v_BKHS = with_halo(halo, inputs.k_BKSH, inputs.v_BKHS)
    document_BS = jnp.asarray(halo_places(halo, rows, tokens, inputs.row_place).document_BT)

    # Pad the keys in front to whole tiles; the mask hides the padding, which is before the window of each query.
    no = (0, 0)
    fill = (-halo.size % tile, 0)
    k_BKSH = jnp.pad(k_BKSH, (no, no, fill, no))
    v_BKHS = jnp.pad(v_BKHS, (no, no, no, fill))
    document_BS = jnp.pad(document_BS, (no, fill), constant_values=NO_TOKEN)

    splash = _splash()
    before = fill[0] + halo.size
    mask = splash.LocalMask((tokens, before + tokens), (window - 1, 0), offset=before)
    heads = q_BTNH.shape[2]
    kernel = splash.make_splash_mha_single_device(splash.MultiHeadMask([mask] * heads), **_options(tile))
    out_BTNH = _attend(kernel, q_BTNH, k_BKSH, v_BKHS, inputs.place.document_BT, document_BS)
    return join_chunks(out_BTNH, 1, halo.chunks)


def _one_document(place: Positions) -> Positions:
    """Return the positions of rows of one document, with the document id 0."""
    return place._replace(document_BT=jnp.zeros_like(place.position_BT))


def _attend(
    kernel: Any, q_BTNH: Array, k_BKSH: Array, v_BKHS: Array, document_BT: Array | None, document_BS: Array | None
) -> Array:
    """Apply the kernel to each row."""
    segments = None
    if document_BT is not None and document_BS is not None:
        rows = len(q_BTNH)
        of_queries = jnp.broadcast_to(document_BT, (rows, *document_BT.shape[1:]))
        of_keys = jnp.broadcast_to(document_BS, (rows, *document_BS.shape[1:]))
        segments = _splash().SegmentIds(of_queries, of_keys)
    attend_rows = jax.vmap(kernel)
    out_BNTH: Array = attend_rows(q_BTNH.swapaxes(1, 2), k_BKSH, v_BKHS.swapaxes(2, 3), segments)
    return out_BNTH.swapaxes(1, 2)


def _options(tile: int) -> dict[str, Any]:
    """Return the options of the kernel.

    The backward pass is two kernels: they compute the scores twice, but store no partial gradient of the queries for each tile
    of keys.
    """
    sides = ("q", "kv", "kv_compute", "q_dq", "kv_dq", "q_dkv", "kv_dkv", "kv_dkv_compute")
    tiles: Any = {f"block_{side}": tile for side in sides}
    return {"block_sizes": _splash().BlockSizes(**tiles), "residual_checkpoint_name": ATTENTION_RESULTS}


def _splash() -> Any:
    """Return the module of the kernel."""
    from jax.experimental.pallas.ops.tpu import splash_attention  # a slow import, 1 s

    return splash_attention
