"""Causal attention by kernels that never hold the T x T scores: cuDNN's on NVIDIA GPUs, Pallas' splash attention on TPUs.

Each computes `attend` under `causal_mask` for whole sequences that begin at slot 0, tile by tile with a running softmax
(Dao et al. 2022). None gives out weights, and none drops any: looking inside, dropout and the cache need `attend`. For CPUs
tiled.py keeps the same contract without a kernel.
"""

from __future__ import annotations

import functools
import math
from collections.abc import Callable
from typing import Any, Literal

import flax.linen as nn
import jax
import jax.numpy as jnp

# (q_BTNH, k_BTKH, v_BTKH, scale, window) -> out_BTNH; K divides N; a window of 0 has no limit
Flash = Callable[[jax.Array, jax.Array, jax.Array, float, int], jax.Array]

LANES = 128  # a TPU's vector width: tiles are multiples of it
TILE = 1024  # largest tile of queries or keys


def cudnn_attention(
    q_BTNH: jax.Array,
    k_BTKH: jax.Array,
    v_BTKH: jax.Array,
    scale: float,
    window: int,
    implementation: Literal["cudnn", "xla"] = "cudnn",
) -> jax.Array:
    """cuDNN's fused attention, through `jax.nn.dot_product_attention`, whose window counts the tokens before a query."""
    return jax.nn.dot_product_attention(
        q_BTNH,
        k_BTKH,
        v_BTKH,
        scale=scale,
        is_causal=True,
        local_window_size=(window - 1, 0) if window else None,
        implementation=implementation,
    )


def splash_attention(
    q_BTNH: jax.Array, k_BTKH: jax.Array, v_BTKH: jax.Array, scale: float, window: int, interpret: bool = False
) -> jax.Array:
    """Pallas' splash attention on every device's own rows and heads.

    Sequences are filled up to whole tiles at their ends, which no query before sees.

    Args:
        interpret: run the kernel operation by operation, which a CPU can.
    """
    T = q_BTNH.shape[1]
    tile = min(TILE, LANES * math.ceil(T / LANES))
    padded = ((0, 0), (0, -T % tile), (0, 0), (0, 0))
    q_BTNH, k_BTKH, v_BTKH = (jnp.pad(x, padded) for x in (q_BTNH * jnp.asarray(scale, q_BTNH.dtype), k_BTKH, v_BTKH))
    local = functools.partial(_splash_local, window=window, tile=tile, interpret=interpret)
    return on_each_device(local, q_BTNH, k_BTKH, v_BTKH)[:, :T]


def on_each_device(
    local: Callable[[jax.Array, jax.Array, jax.Array], jax.Array],
    q_BTNH: jax.Array,
    k_BTKH: jax.Array,
    v_BTKH: jax.Array,
) -> jax.Array:
    """`local(q, k, v)` of every device's own rows and heads, for what the partitioner cannot divide: kernels and loops."""
    axes = (("batch", "length", name, "head_dim") for name in ("heads", "kv_heads"))
    if jax.sharding.get_abstract_mesh().empty:
        return local(q_BTNH, k_BTKH, v_BTKH)
    heads, kv_heads = map(nn.spmd.logical_to_mesh_axes, axes)
    if heads != kv_heads:
        # Fewer key heads than ways to split the query heads: every query head brings its own.
        each = q_BTNH.shape[2] // k_BTKH.shape[2]
        k_BTKH, v_BTKH = (jnp.repeat(x, each, axis=2) for x in (k_BTKH, v_BTKH))
    # Kernels know nothing of axes that vary over the mesh.
    divided = jax.shard_map(local, in_specs=(heads, heads, heads), out_specs=heads, check_vma=False)
    return divided(q_BTNH, k_BTKH, v_BTKH)


def _splash_local(
    q_BTNH: jax.Array, k_BTKH: jax.Array, v_BTKH: jax.Array, window: int, tile: int, interpret: bool
) -> jax.Array:
    from jax.experimental.pallas.ops.tpu import splash_attention as splash  # a second to import, for TPUs alone

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
    return jnp.swapaxes(jax.vmap(kernel)(*by_head), 1, 2)
