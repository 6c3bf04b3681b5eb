"""Fused causal attention that never stores the T x T scores: cuDNN on NVIDIA GPUs, Pallas' splash attention on TPUs.

Both compute `attend` with `causal_mask` for whole sequences that start at slot 0, tile by tile with a running softmax (Dao et
al. 2022). They neither return attention weights nor apply dropout to them, so capture, dropout and the cache need `attend`.
`ops/tiled.py` is the equivalent for CPUs.
"""

from __future__ import annotations

import functools
import math
from typing import Any, Literal

import jax
import jax.numpy as jnp

from jaxgpt.ops.attention import SegmentIds
from jaxgpt.ops.sharding import per_device

LANES = 128  # a TPU's vector width: tiles are multiples of it
TILE = 1024  # largest tile of queries or keys


def cudnn_attention(
    q_BTNH: jax.Array,
    k_BTKH: jax.Array,
    v_BTKH: jax.Array,
    scale: float,
    window: int,
    segment_ids_BT: SegmentIds = None,
    implementation: Literal["cudnn", "xla"] = "cudnn",
) -> jax.Array:
    """Compute attention with cuDNN, through `jax.nn.dot_product_attention`, on each device's rows and heads.

    An `AttentionKernel` without segment ids.

    Args:
        implementation: "xla": the same function without cuDNN.
    """
    if segment_ids_BT is not None:
        raise ValueError("cuDNN attention does not support segment ids: use attend or another kernel")

    def local(q_BTNH: jax.Array, k_BTKH: jax.Array, v_BTKH: jax.Array, _: SegmentIds) -> jax.Array:
        return jax.nn.dot_product_attention(
            q_BTNH,
            k_BTKH,
            v_BTKH,
            scale=scale,
            is_causal=True,
            # cuDNN's window does not count the query itself; ours does.
            local_window_size=(window - 1, 0) if window else None,
            implementation=implementation,
        )

    return per_device(local, q_BTNH, k_BTKH, v_BTKH, None)


def splash_attention(
    q_BTNH: jax.Array,
    k_BTKH: jax.Array,
    v_BTKH: jax.Array,
    scale: float,
    window: int,
    segment_ids_BT: SegmentIds = None,
    interpret: bool = False,
) -> jax.Array:
    """Compute attention with Pallas' splash kernel, on each device's rows and heads. An `AttentionKernel`.

    Sequences are padded at the end to whole tiles; the causal mask hides the padding.

    Args:
        interpret: run the kernel in Pallas' interpreter, which works on a CPU.
    """
    T = q_BTNH.shape[1]
    tile = min(TILE, LANES * math.ceil(T / LANES))
    padded = ((0, 0), (0, -T % tile), (0, 0), (0, 0))
    q_BTNH, k_BTKH, v_BTKH = (jnp.pad(x, padded) for x in (q_BTNH * jnp.asarray(scale, q_BTNH.dtype), k_BTKH, v_BTKH))
    if segment_ids_BT is not None:
        segment_ids_BT = jnp.pad(segment_ids_BT, padded[:2])
    local = functools.partial(_splash_local, window=window, tile=tile, interpret=interpret)
    return per_device(local, q_BTNH, k_BTKH, v_BTKH, segment_ids_BT)[:, :T]


def _splash_local(
    q_BTNH: jax.Array,
    k_BTKH: jax.Array,
    v_BTKH: jax.Array,
    segment_ids_BT: SegmentIds,
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
    by_head = (jnp.swapaxes(x, 1, 2) for x in (q_BTNH, k_BTKH, v_BTKH))
    segments = None if segment_ids_BT is None else splash.SegmentIds(segment_ids_BT, segment_ids_BT)
    return jnp.swapaxes(jax.vmap(kernel)(*by_head, segments), 1, 2)
