"""Tiled causal attention in plain XLA operations, without stored T x T scores: the default on CPUs.

The forward pass computes one tile of queries at a time, with the keys it attends to, and saves each query's log-sum-exp,
`lse = log(sum(exp(scores)))`. The backward pass computes one tile of keys at a time, with the queries that attend to it. It
recomputes the weights as `exp(scores - lse)` (Dao 2023, section 3.1). Only the scores of one tile of a few heads are in memory.
"""

from __future__ import annotations

import functools
import math
from collections.abc import Callable
from typing import Any, NamedTuple

import jax
import jax.numpy as jnp
import numpy as np
from jax.ad_checkpoint import checkpoint_name

from jaxgpt.kernels.devices import per_device
from jaxgpt.kernels.remat import ATTENTION_RESULTS
from jaxgpt.ops import Array
from jaxgpt.ops.attention import Visible

SHORTEST = 128  # minimum sequence length in tokens for a speedup from tiles (measured in float32)
TILE = 256  # tokens per tile, unless this needs fewer than FEWEST_TILES or more than MOST_TILES
FEWEST_TILES = 2
MOST_TILES = 8  # every tile adds code to compile
SCORES = 2**15  # maximum number of scores of a tile, per group of several heads (128 KiB); groups amortize overhead

_product = functools.partial(jnp.einsum, preferred_element_type=jnp.float32)


class Tile(NamedTuple):
    """A range of tokens, as queries with the keys that they attend to, and as keys with the queries that attend to them.

    Attributes:
        start: first token.
        end: token after the last.
        first_key: first key that a query of the tile may attend to; the last is `end - 1`.
        end_query: token after the last query that may attend to a key of the tile; the first is `start`.
    """

    start: int
    end: int
    first_key: int
    end_query: int


def tiled_attention(q_BTNH: Array, k_BKSH: Array, v_BKHS: Array, visible: Visible, scale: float) -> Array:
    """Compute `attend` among the tokens of a sequence, a group of heads at a time."""
    scaled_q = q_BTNH * jnp.asarray(scale, q_BTNH.dtype)
    local = functools.partial(_local, window=visible.window)
    return per_device(local, scaled_q, k_BKSH, v_BKHS, visible.query.document_BT)


@functools.partial(jax.jit, static_argnames="window")  # traced once per shape and window
def _local(q_BTNH: Array, k_BKSH: Array, v_BKHS: Array, document_BT: Array | None, window: int) -> Array:
    """Compute attention on one device, with the heads of all rows on one axis."""
    B, T, N, H = q_BTNH.shape
    q_NTH = q_BTNH.swapaxes(1, 2).reshape(-1, T, H)
    k_NSH = k_BKSH.reshape(-1, T, H)
    v_NSH = v_BKHS.swapaxes(2, 3).reshape(-1, T, H)
    document_NT = None if document_BT is None else jnp.repeat(document_BT, N, axis=0)
    out_NTH = _attention(window, q_NTH, k_NSH, v_NSH, document_NT)
    return out_NTH.reshape(B, N, T, H).swapaxes(1, 2)


def tile_size(T: int) -> int:
    """Return the number of tokens of a tile; the last may have fewer."""
    count = min(max(T // TILE, FEWEST_TILES), MOST_TILES)
    return math.ceil(T / count)


def tiles(T: int, window: int) -> list[Tile]:
    """Divide T tokens into tiles; with a window, a tile attends to as many whole tiles before it as the window touches."""
    size = tile_size(T)
    reach = math.ceil((window or T) / size) * size
    found = []
    for start in range(0, T, size):
        tile = Tile(
            start=start,
            end=min(start + size, T),
            first_key=max(start - reach, 0),
            end_query=min(start + size + reach, T),
        )
        found.append(tile)
    return found


class _Inputs(NamedTuple):
    """The inputs of attention; N: the heads of all rows, or of a group.

    Attributes:
        q_NTH: queries.
        k_NSH: keys; before `with_heads_of_queries`, they may have fewer heads, as may the values.
        v_NSH: values.
        document_NT: document of each token; None: rows of one document.
    """

    q_NTH: Array
    k_NSH: Array
    v_NSH: Array
    document_NT: Array | None

    def with_heads_of_queries(self) -> _Inputs:
        """Repeat the heads of keys and values to match the query heads."""
        queries_per_key = len(self.q_NTH) // len(self.k_NSH)
        k_NSH = jnp.repeat(self.k_NSH, queries_per_key, axis=0)
        v_NSH = jnp.repeat(self.v_NSH, queries_per_key, axis=0)
        return self._replace(k_NSH=k_NSH, v_NSH=v_NSH)


class _Results(NamedTuple):
    """The results of the forward pass: the output, and the log-sum-exp of the scores of each query."""

    out_NTH: Array
    lse_NT: Array


class _PartOfDq(NamedTuple):
    """The terms of dq from a tile of keys, `[N, H, T]`, for the queries from `start` to `end`."""

    start: int
    end: int
    dq_NHT: Array


@functools.partial(jax.custom_vjp, nondiff_argnums=(0,))
def _attention(window: int, q: Array, k: Array, v: Array, document_NT: Array | None) -> Array:
    """Compute attention for `[N, T, H]`, N: the heads of all rows; keys and values may have fewer heads."""
    out, _ = _forward(window, q, k, v, document_NT)
    return out


def _forward(window: int, q: Any, k: Any, v: Any, document_NT: Any) -> tuple[Array, tuple[_Inputs, _Results]]:
    inputs = _Inputs(q, k, v, document_NT)
    results = _over_heads(functools.partial(_forward_heads, window), inputs.with_heads_of_queries())
    # The backward pass needs these two arrays: rematerialization with `dots` and `offload` keeps them (`kernels/remat.py`).
    results = checkpoint_name(results, ATTENTION_RESULTS)
    return results.out_NTH, (inputs, results)


def _backward(window: int, saved: tuple[_Inputs, _Results], dout: Array) -> tuple[Array | None, ...]:
    inputs, results = saved
    repeated = inputs.with_heads_of_queries()
    # Transpose the keys once, outside the loop: inside, XLA would fuse the transposition with each product.
    k_NHS = repeated.k_NSH.swapaxes(1, 2)
    backward = functools.partial(_backward_heads, window)
    dq, dk_of_q, dv_of_q = _over_heads(backward, repeated, results, dout, k_NHS)

    # A key head that serves several query heads receives the sum of their gradients.
    def of_key_heads(gradient: Array) -> Array:
        by_key_head = gradient.reshape(len(inputs.k_NSH), -1, *gradient.shape[1:])
        return by_key_head.sum(1).astype(inputs.k_NSH.dtype)

    return dq, of_key_heads(dk_of_q), of_key_heads(dv_of_q), None


_attention.defvjp(_forward, _backward)


def _over_heads(function: Callable[..., Any], inputs: _Inputs, *others: Any) -> Any:
    """Map `function(inputs, *others)` over groups of heads, as large as `SCORES` allows."""
    N, T, _ = inputs.q_NTH.shape
    scores_per_head = tile_size(T) * T
    divisors = [n for n in range(1, N + 1) if N % n == 0]
    heads = max(n for n in divisors if n == 1 or n * scores_per_head <= SCORES)

    groups = jax.tree.map(lambda x: x.reshape(-1, heads, *x.shape[1:]), (inputs, *others))
    results = jax.lax.map(lambda group: function(*group), groups)
    return jax.tree.map(lambda x: x.reshape(N, *x.shape[2:]), results)


def _forward_heads(window: int, inputs: _Inputs) -> _Results:
    """Compute attention for a group of heads."""
    q_NTH, k_NSH, v_NSH, document_NT = inputs
    slot = jnp.arange(k_NSH.shape[1])
    outs = []
    lses = []
    for tile in tiles(len(slot), window):
        # The queries of this tile, and all keys that they may attend to.
        queries = np.s_[tile.start : tile.end]
        keys = np.s_[tile.first_key : tile.end]
        q = q_NTH[:, queries]
        k = k_NSH[:, keys]
        v = v_NSH[:, keys]
        mask = _mask(np.s_[queries, None], np.s_[None, keys], slot, document_NT, window)

        # Softmax with the maximum subtracted; the division follows the product with the values.
        scores_NTS = _product("NTH,NSH->NTS", q, k)
        scores_NTS = jnp.where(mask, scores_NTS, jnp.finfo(jnp.float32).min)
        highest_NT1 = scores_NTS.max(-1, keepdims=True)
        weights_NTS = jnp.exp(scores_NTS - highest_NT1)
        total_NT1 = weights_NTS.sum(-1, keepdims=True)
        out_NTH = _product("NTS,NSH->NTH", weights_NTS.astype(v.dtype), v) / total_NT1
        lse_NT1 = highest_NT1 + jnp.log(total_NT1)

        outs.append(out_NTH.astype(v.dtype))
        lses.append(lse_NT1[..., 0])
    return _Results(jnp.concatenate(outs, 1), jnp.concatenate(lses, 1))


def _backward_heads(
    window: int, inputs: _Inputs, results: _Results, dout_NTH: Array, k_NHS: Array
) -> tuple[Array, Array, Array]:
    """Compute dq, dk and dv for a group of heads, with scores `[N, S, T]` to avoid transpositions.

    `dout_NTH` is the gradient of the output, and `k_NHS` the transposed keys.
    """
    q_NTH, k_NSH, v_NSH, document_NT = inputs
    out_NTH, lse_NT = results
    dtype = q_NTH.dtype
    slot = jnp.arange(k_NSH.shape[1])
    all_tiles = tiles(len(slot), window)
    delta_NT = _product("NTH,NTH->NT", dout_NTH, out_NTH)
    dks = []
    dvs = []
    dq_parts = []
    for tile in all_tiles:
        # The keys of this tile, and all queries that may attend to them.
        keys = np.s_[tile.start : tile.end]
        queries = np.s_[tile.start : tile.end_query]
        k = k_NSH[:, keys]
        v = v_NSH[:, keys]
        q = q_NTH[:, queries]
        dout = dout_NTH[:, queries]
        lse_N1T = lse_NT[:, None, queries]
        delta_N1T = delta_NT[:, None, queries]
        mask = _mask(np.s_[None, queries], np.s_[keys, None], slot, document_NT, window)

        scores_NST = _product("NSH,NTH->NST", k, q)
        weights_NST = jnp.where(mask, jnp.exp(scores_NST - lse_N1T), 0.0)
        dweights_NST = _product("NSH,NTH->NST", v, dout)
        dscores_NST = (weights_NST * (dweights_NST - delta_N1T)).astype(dtype)

        dvs.append(_product("NST,NTH->NSH", weights_NST.astype(dtype), dout))
        dks.append(_product("NST,NTH->NSH", dscores_NST, q))
        dq_NHT = _product("NHS,NST->NHT", k_NHS[:, :, keys], dscores_NST)
        dq_parts.append(_PartOfDq(tile.start, tile.end_query, dq_NHT))

    dq_NTH = _joined_dq(all_tiles, dq_parts).swapaxes(1, 2)
    return dq_NTH.astype(dtype), jnp.concatenate(dks, 1), jnp.concatenate(dvs, 1)


def _joined_dq(all_tiles: list[Tile], parts: list[_PartOfDq]) -> Array:
    """Return dq of all queries, `[N, H, T]`: each tile of queries has a part from every tile of keys that it attends to."""
    dqs = []
    for tile in all_tiles:
        terms = []
        for part in parts:
            if part.start <= tile.start < part.end:
                terms.append(part.dq_NHT[:, :, tile.start - part.start : tile.end - part.start])
        dqs.append(sum(terms))
    return jnp.concatenate(dqs, 2)


def _mask(query: Any, key: Any, slot: Array, document_NT: Array | None, window: int) -> Array:
    """Compute the mask of queries and keys in the layout of the scores; transposing a mask would be slower.

    `query` and `key` are indices of a sequence, such as `np.s_[0:4, None]`, with None for the axis of the other.
    """
    distance = slot[query] - slot[key]
    mask = distance >= 0
    if window:
        mask &= distance < window
    if document_NT is None:
        return mask
    same_document = document_NT[:, *query] == document_NT[:, *key]
    return mask[None] & same_document
