"""Fused causal attention without stored T x T scores: cuDNN on NVIDIA GPUs, splash attention on TPUs.

Both kernels compute `attend` within a sequence, tile by tile with a running softmax (Dao et al. 2022). Calls with
the keys of a cache (`visible.key`), or with `edit`, fall back to `attend`.
"""

from __future__ import annotations

import math
from typing import Any

import jax
import jax.numpy as jnp

from jaxgpt.kernels.devices import per_device
from jaxgpt.kernels.remat import ATTENTION_RESULTS
from jaxgpt.ops import Array
from jaxgpt.ops.attention import Edit, Visible, attend

LANES = 128  # vector width of a TPU, a divisor of the tile sizes of splash attention
TILE = 1024  # maximum number of queries or keys in a tile


def cudnn_attention(
    q_BTNH: Array, k_BKSH: Array, v_BKHS: Array, visible: Visible, scale: float, edit: Edit | None = None
) -> Array:
    """Compute attention with cuDNN on each device's rows and heads (`jax.nn.dot_product_attention`).

    Calls with document ids, which cuDNN attention does not support, fall back to `attend`.
    """
    if edit is not None or visible.key is not None or visible.query.document_BT is not None:
        return attend(q_BTNH, k_BKSH, v_BKHS, visible, scale, edit)

    # The window of cuDNN does not count the query itself; `Visible.window` does.
    window = (visible.window - 1, 0) if visible.window else None

    def local(q_BTNH: Array, k_BKSH: Array, v_BKHS: Array, _: None) -> Array:
        k_BSKH = k_BKSH.transpose(0, 2, 1, 3)
        v_BSKH = v_BKHS.transpose(0, 3, 1, 2)
        return jax.nn.dot_product_attention(
            q_BTNH,
            k_BSKH,
            v_BSKH,
            scale=scale,
            is_causal=True,
            local_window_size=window,
            implementation="cudnn",
        )

    return per_device(local, q_BTNH, k_BKSH, v_BKHS, None)


def splash_attention(
    q_BTNH: Array, k_BKSH: Array, v_BKHS: Array, visible: Visible, scale: float, edit: Edit | None = None
) -> Array:
    """Compute attention with Pallas' splash kernel on each device's rows and heads."""
    from jax.experimental.pallas.ops.tpu import splash_attention as splash  # a slow import, 1 s

    if edit is not None or visible.key is not None:
        return attend(q_BTNH, k_BKSH, v_BKHS, visible, scale, edit)
    T = q_BTNH.shape[1]
    window = visible.window
    document_BT = visible.query.document_BT

    # Pad to whole tiles at the end, where the causal mask hides the padding.
    tile = min(TILE, LANES * math.ceil(T / LANES))
    no = (0, 0)
    fill = (0, -T % tile)
    scaled_q = q_BTNH * jnp.asarray(scale, q_BTNH.dtype)
    q_BTNH = jnp.pad(scaled_q, (no, fill, no, no))
    k_BKSH = jnp.pad(k_BKSH, (no, no, fill, no))
    v_BKHS = jnp.pad(v_BKHS, (no, no, no, fill))
    if document_BT is not None:
        document_BT = jnp.pad(document_BT, (no, fill))

    # All of the kernel's tiles, forward and backward, have the same size.
    tiles: Any = {f"block_{side}": tile for side in ("q", "kv", "kv_compute", "q_dkv", "kv_dkv", "kv_dkv_compute")}
    block_sizes = splash.BlockSizes(**tiles, use_fused_bwd_kernel=True)

    def local(q_BTNH: Array, k_BKSH: Array, v_BKHS: Array, document_BT: Array | None) -> Array:
        _, slots, heads, _ = q_BTNH.shape
        square = (slots, slots)
        mask = splash.LocalMask(square, (window - 1, 0), 0) if window else splash.CausalMask(square)
        kernel = splash.make_splash_mha_single_device(
            splash.MultiHeadMask([mask] * heads),
            block_sizes=block_sizes,
            residual_checkpoint_name=ATTENTION_RESULTS,
        )
        segments = None if document_BT is None else splash.SegmentIds(document_BT, document_BT)
        attend_rows = jax.vmap(kernel)
        out_BNTH = attend_rows(q_BTNH.swapaxes(1, 2), k_BKSH, v_BKHS.swapaxes(2, 3), segments)
        return out_BNTH.swapaxes(1, 2)

    padded_out = per_device(local, q_BTNH, k_BKSH, v_BKHS, document_BT)
    return padded_out[:, :T]
