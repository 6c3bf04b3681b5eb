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
from jaxgpt.ops import Array
from jaxgpt.ops.attention import Edit, Visible, attend

LANES = 128  # vector width of a TPU, a divisor of all tile sizes
TILE = 1024  # maximum number of queries or keys in a tile


def cudnn_attention(
    q_BTNH: Array, k_BKSH: Array, v_BKHS: Array, visible: Visible, scale: float, edit: Edit | None = None
) -> Array:
    """Compute attention with cuDNN on each device's rows and heads (`jax.nn.dot_product_attention`).

    Calls with document ids, which cuDNN attention does not support, fall back to `attend`.
    """
    if edit or visible.key or visible.query.document_BT is not None:
        return attend(q_BTNH, k_BKSH, v_BKHS, visible, scale, edit)

    def local(q_BTNH: Array, k_BKSH: Array, v_BKHS: Array, _: None) -> Array:
        return jax.nn.dot_product_attention(
            q_BTNH,
            k_BKSH.transpose(0, 2, 1, 3),
            v_BKHS.transpose(0, 3, 1, 2),
            scale=scale,
            is_causal=True,
            # The window of cuDNN does not count the query itself; `Visible.window` does.
            local_window_size=(visible.window - 1, 0) if visible.window else None,
            implementation="cudnn",
        )

    return per_device(local, q_BTNH, k_BKSH, v_BKHS, None)


def splash_attention(
    q_BTNH: Array, k_BKSH: Array, v_BKHS: Array, visible: Visible, scale: float, edit: Edit | None = None
) -> Array:
    """Compute attention with Pallas' splash kernel on each device's rows and heads."""
    from jax.experimental.pallas.ops.tpu import splash_attention as splash  # a slow import, 1 s

    if edit or visible.key:
        return attend(q_BTNH, k_BKSH, v_BKHS, visible, scale, edit)
    T, window, document_BT = q_BTNH.shape[1], visible.window, visible.query.document_BT
    tile = min(TILE, LANES * math.ceil(T / LANES))
    fill = (0, -T % tile)  # padding at the end, hidden by the causal mask
    q_BTNH = jnp.pad(q_BTNH * jnp.asarray(scale, q_BTNH.dtype), ((0, 0), fill, (0, 0), (0, 0)))
    k_BKSH, v_BKHS = jnp.pad(k_BKSH, ((0, 0), (0, 0), fill, (0, 0))), jnp.pad(v_BKHS, ((0, 0), (0, 0), (0, 0), fill))
    if document_BT is not None:
        document_BT = jnp.pad(document_BT, ((0, 0), fill))
    tiles: Any = {f"block_{side}": tile for side in ("q", "kv", "kv_compute", "q_dkv", "kv_dkv", "kv_dkv_compute")}

    def local(q_BTNH: Array, k_BKSH: Array, v_BKHS: Array, document_BT: Array | None) -> Array:
        square = (q_BTNH.shape[1],) * 2
        mask = splash.LocalMask(square, (window - 1, 0), 0) if window else splash.CausalMask(square)
        kernel = splash.make_splash_mha_single_device(
            splash.MultiHeadMask([mask] * q_BTNH.shape[2]),
            block_sizes=splash.BlockSizes(**tiles, use_fused_bwd_kernel=True),
            residual_checkpoint_name="attention",
        )
        segments = None if document_BT is None else splash.SegmentIds(document_BT, document_BT)
        out_BNTH = jax.vmap(kernel)(q_BTNH.swapaxes(1, 2), k_BKSH, v_BKHS.swapaxes(2, 3), segments)
        return out_BNTH.swapaxes(1, 2)

    return per_device(local, q_BTNH, k_BKSH, v_BKHS, document_BT)[:, :T]
