"""Fused causal attention that never stores the T x T scores: cuDNN on NVIDIA GPUs, Pallas' splash attention on TPUs.

Both compute `attend` among the tokens of a sequence, tile by tile with a running softmax (Dao et al. 2022). They neither
return attention weights nor apply dropout to them. `kernels/tiled.py` is the equivalent for CPUs.
"""

from __future__ import annotations

import functools
import math
from typing import Any, Literal

import jax
import jax.numpy as jnp

from jaxgpt.kernels.devices import per_device
from jaxgpt.ops.attention import Visible

LANES = 128  # a TPU's vector width: tiles are multiples of it
TILE = 1024  # largest tile of queries or keys


def cudnn_attention(
    q_BTNH: jax.Array,
    k_BKSH: jax.Array,
    v_BKHS: jax.Array,
    visible: Visible,
    scale: float,
    implementation: Literal["cudnn", "xla"] = "cudnn",
) -> jax.Array:
    """Compute attention with cuDNN, through `jax.nn.dot_product_attention`, on each device's rows and heads.

    One document per row: cuDNN attention does not support document ids.

    Args:
        implementation: "xla": the same function without cuDNN.
    """
    assert visible.key is None
    assert visible.query.document_BT is None

    def local(q_BTNH: jax.Array, k_BKSH: jax.Array, v_BKHS: jax.Array, _: None) -> jax.Array:
        return jax.nn.dot_product_attention(
            q_BTNH,
            k_BKSH.transpose(0, 2, 1, 3),
            v_BKHS.transpose(0, 3, 1, 2),
            scale=scale,
            is_causal=True,
            # The window of cuDNN does not count the query itself; `Visible.window` does.
            local_window_size=(visible.window - 1, 0) if visible.window else None,
            implementation=implementation,
        )

    return per_device(local, q_BTNH, k_BKSH, v_BKHS, None)


def splash_attention(
    q_BTNH: jax.Array,
    k_BKSH: jax.Array,
    v_BKHS: jax.Array,
    visible: Visible,
    scale: float,
    interpret: bool = False,
) -> jax.Array:
    """Compute attention with Pallas' splash kernel, on each device's rows and heads.

    Sequences are padded at the end to whole tiles; the causal mask hides the padding.

    Args:
        interpret: run the kernel in Pallas' interpreter, which works on a CPU.
    """
    assert visible.key is None
    T, document_BT = q_BTNH.shape[1], visible.query.document_BT
    tile = min(TILE, LANES * math.ceil(T / LANES))
    fill = (0, -T % tile)
    q_BTNH = jnp.pad(q_BTNH * jnp.asarray(scale, q_BTNH.dtype), ((0, 0), fill, (0, 0), (0, 0)))
    k_BKSH, v_BKHS = jnp.pad(k_BKSH, ((0, 0), (0, 0), fill, (0, 0))), jnp.pad(v_BKHS, ((0, 0), (0, 0), (0, 0), fill))
    if document_BT is not None:
        document_BT = jnp.pad(jnp.broadcast_to(document_BT, (len(q_BTNH), T)), ((0, 0), fill))
    local = functools.partial(_splash_local, window=visible.window, tile=tile, interpret=interpret)
    return per_device(local, q_BTNH, k_BKSH, v_BKHS, document_BT)[:, :T]


def _splash_local(
    q_BTNH: jax.Array,
    k_BKSH: jax.Array,
    v_BKHS: jax.Array,
    document_BT: jax.Array | None,
    window: int,
    tile: int,
    interpret: bool,
) -> jax.Array:
    from jax.experimental.pallas.ops.tpu import splash_attention as splash  # takes a second to import

    T, N = q_BTNH.shape[1:3]
    mask = splash.LocalMask((T, T), (window - 1, 0), 0) if window else splash.CausalMask((T, T))
    tiles: Any = dict.fromkeys(
        ("block_q", "block_kv", "block_kv_compute", "block_q_dkv", "block_kv_dkv", "block_kv_dkv_compute"), tile
    )
    kernel = splash.make_splash_mha(
        splash.MultiHeadMask([mask] * N),
        block_sizes=splash.BlockSizes(**tiles, use_fused_bwd_kernel=True),
        head_shards=1,
        q_seq_shards=1,
        residual_checkpoint_name="attention",
        interpret=interpret,
    )
    segments = None if document_BT is None else splash.SegmentIds(document_BT, document_BT)
    out_BNTH = jax.vmap(kernel)(q_BTNH.swapaxes(1, 2), k_BKSH, v_BKHS.swapaxes(2, 3), segments)
    return out_BNTH.swapaxes(1, 2)
