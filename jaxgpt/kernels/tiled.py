"""Tiled causal attention in plain XLA operations, without stored T x T scores: default on CPUs.

The forward pass computes one tile of queries at a time, with the keys it attends to, and saves each query's log-sum-exp,
`lse = log(sum(exp(scores)))`. The backward pass computes one tile of keys at a time, with the queries that attend to it. It
recomputes the weights as `exp(scores - lse)` (Dao 2023, section 3.1). Only the scores of one tile of a few heads are in memory.
"""

from __future__ import annotations

import functools
import math
from collections.abc import Callable
from typing import Any

import jax
import jax.numpy as jnp
import numpy as np
from jax.ad_checkpoint import checkpoint_name

from jaxgpt.kernels.devices import per_device
from jaxgpt.ops import Array
from jaxgpt.ops.attention import Visible

SHORTEST = 128  # minimum sequence length in tokens for a speedup from tiles (measured in float32)
TILE = 256  # tokens per tile, within the limits of `TILES`
TILES = 2, 8  # smallest and largest number of tiles; every tile adds code to compile
SCORES = 2**15  # maximum scores per group of several heads (128 KiB); groups amortize the overhead of each operation

_product = functools.partial(jnp.einsum, preferred_element_type=jnp.float32)


def tiled_attention(q_BTNH: Array, k_BKSH: Array, v_BKHS: Array, visible: Visible, scale: float) -> Array:
    """Compute `attend` among the tokens of a sequence, a group of heads at a time."""
    scaled, local = q_BTNH * jnp.asarray(scale, q_BTNH.dtype), functools.partial(_local, window=visible.window)
    return per_device(local, scaled, k_BKSH, v_BKHS, visible.query.document_BT)


@functools.partial(jax.jit, static_argnames="window")  # traced once per shape and window
def _local(q_BTNH: Array, k_BKSH: Array, v_BKHS: Array, document_BT: Array | None, window: int) -> Array:
    B, T, N, H = q_BTNH.shape
    q, k, v = (x.reshape(-1, T, H) for x in (q_BTNH.swapaxes(1, 2), k_BKSH, v_BKHS.swapaxes(2, 3)))
    document_NT = None if document_BT is None else jnp.repeat(document_BT, N, axis=0)
    return _attention(window, q, k, v, document_NT).reshape(B, N, T, H).swapaxes(1, 2)


def tile_size(T: int) -> int:
    return math.ceil(T / min(max(T // TILE, TILES[0]), TILES[1]))


def tiles(T: int, window: int) -> list[tuple[int, int, int, int]]:
    """Return each tile's start, end, first key, and the end of the queries that attend to it, in tokens."""
    size = tile_size(T)
    reach = math.ceil((window or T) / size) * size  # whole tiles
    return [(a, min(a + size, T), max(a - reach, 0), min(a + size + reach, T)) for a in range(0, T, size)]


@functools.partial(jax.custom_vjp, nondiff_argnums=(0,))
def _attention(window: int, q: Array, k: Array, v: Array, document_NT: Array | None) -> Array:
    """Compute attention for `[N, T, H]`, N: the heads of all rows; keys and values may have fewer heads."""
    return _forward(window, q, k, v, document_NT)[0]


def _forward(window: int, q: Any, k: Any, v: Any, document_NT: Any) -> tuple[Array, tuple[Any, ...]]:
    out, lse = _over_heads(functools.partial(_forward_heads, window), (q, *_for_each_query(q, k, v), document_NT))
    out, lse = checkpoint_name((out, lse), "attention")
    return out, (q, k, v, document_NT, out, lse)


def _backward(window: int, residuals: tuple[Any, ...], dout: Array) -> tuple[Array | None, ...]:
    q, k, v, document_NT, out, lse = residuals
    each_k, each_v = _for_each_query(q, k, v)
    # Transpose the keys outside the loop: inside, XLA would fuse the transposition with the product.
    arrays = (q, each_k, each_v, out, lse, dout, each_k.swapaxes(1, 2), document_NT)
    dq, dk, dv = _over_heads(functools.partial(_backward_heads, window), arrays)
    dk, dv = (x.reshape(len(k), -1, *x.shape[1:]).sum(1).astype(k.dtype) for x in (dk, dv))
    return dq, dk, dv, None


_attention.defvjp(_forward, _backward)


def _for_each_query(q: Array, *keys: Array) -> list[Array]:
    """Repeat the heads of keys or values to match the query heads."""
    return [jnp.repeat(x, len(q) // len(x), axis=0) for x in keys]


def _over_heads(function: Callable[..., Any], arrays: tuple[Any, ...]) -> Any:
    """Map `function` over groups of heads, as large as `SCORES` allows."""
    N, T = arrays[0].shape[:2]
    heads = max(n for n in range(1, N + 1) if N % n == 0 and (n == 1 or n * tile_size(T) * T <= SCORES))
    groups = jax.tree.map(lambda x: x.reshape(-1, heads, *x.shape[1:]), arrays)
    return jax.tree.map(lambda x: x.reshape(N, *x.shape[2:]), jax.lax.map(function, groups))


def _forward_heads(window: int, arrays: tuple[Any, ...]) -> tuple[Array, Array]:
    """Compute attention for a group of heads; return the output and each query's log-sum-exp."""
    q_NTH, k_NSH, v_NSH, document_NT = arrays
    slot, outs, lses = jnp.arange(k_NSH.shape[1]), [], []
    for a, e, first, _ in tiles(len(slot), window):
        k, v = k_NSH[:, first:e], v_NSH[:, first:e]
        scores_NTS = _product("NTH,NSH->NTS", q_NTH[:, a:e], k)
        mask = _mask(np.s_[a:e, None], np.s_[None, first:e], slot, document_NT, window)
        scores_NTS = jnp.where(mask, scores_NTS, jnp.finfo(jnp.float32).min)
        highest_NT1 = scores_NTS.max(-1, keepdims=True)
        weights_NTS = jnp.exp(scores_NTS - highest_NT1)
        total_NT1 = weights_NTS.sum(-1, keepdims=True)
        outs.append((_product("NTS,NSH->NTH", weights_NTS.astype(v.dtype), v) / total_NT1).astype(v.dtype))
        lses.append((highest_NT1 + jnp.log(total_NT1))[..., 0])
    return jnp.concatenate(outs, 1), jnp.concatenate(lses, 1)


def _backward_heads(window: int, arrays: tuple[Any, ...]) -> tuple[Array, Array, Array]:
    """Compute dq, dk and dv for a group of heads, with scores `[N, S, T]` to avoid transpositions."""
    q_NTH, k_NSH, v_NSH, out_NTH, lse_NT, dout_NTH, k_NHS, document_NT = arrays
    dtype = q_NTH.dtype
    delta_NT = _product("NTH,NTH->NT", dout_NTH, out_NTH)
    slot, dk, dv, dq = jnp.arange(k_NSH.shape[1]), [], [], []
    spans = tiles(len(slot), window)
    for a, e, _, end in spans:
        q, k, v, dout = q_NTH[:, a:end], k_NSH[:, a:e], v_NSH[:, a:e], dout_NTH[:, a:end]
        lse_N1T, delta_N1T = lse_NT[:, None, a:end], delta_NT[:, None, a:end]
        mask = _mask(np.s_[None, a:end], np.s_[a:e, None], slot, document_NT, window)
        scores_NST = _product("NSH,NTH->NST", k, q)
        weights_NST = jnp.where(mask, jnp.exp(scores_NST - lse_N1T), 0.0)
        dscores_NST = (weights_NST * (_product("NSH,NTH->NST", v, dout) - delta_N1T)).astype(dtype)
        dv.append(_product("NST,NTH->NSH", weights_NST.astype(dtype), dout))
        dk.append(_product("NST,NTH->NSH", dscores_NST, q))
        dq.append((a, end, _product("NHS,NST->NHT", k_NHS[:, :, a:e], dscores_NST)))
    sums = [sum(part[:, :, a - start : e - start] for start, end, part in dq if start <= a < end) for a, e, *_ in spans]
    return jnp.concatenate(sums, 2).swapaxes(1, 2).astype(dtype), jnp.concatenate(dk, 1), jnp.concatenate(dv, 1)


def _mask(query: Any, key: Any, slot: Array, document_NT: Array | None, window: int) -> Array:
    """Compute the mask of indexed queries and keys in the layout of the scores; transposing it is slower."""
    distance = slot[query] - slot[key]
    mask = (distance >= 0) & (distance < window) if window else distance >= 0
    return mask if document_NT is None else mask[None] & (document_NT[:, *query] == document_NT[:, *key])
