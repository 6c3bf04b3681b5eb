"""Attention to keys that arrive in parts, without stored T x T scores: a running softmax over tiles, and its gradients.

Each query keeps a weighted sum of the values that it has seen, relative to its highest score so far (Milakov and Gimelshein
2018). The backward pass recomputes the weights as `exp(score - lse)`, with the saved log-sum-exp of the scores of each query
(Dao 2023, section 3.1).

The mask of a pair of tiles is the mask of the definition (`Visible.mask`), so tokens may have any order. Pairs of tiles without
visible keys are skipped. The order of the tokens thus changes the computing time, and the results only by rounding.

Letters in names: G query heads per key head, n tiles, t queries of a tile, s keys of a tile.
"""

from __future__ import annotations

import functools
import math
from typing import NamedTuple

import jax
import jax.numpy as jnp

from jaxgpt.ops import Array
from jaxgpt.ops.attention import NO_TOKEN, Positions, Visible

TILE = 512  # maximum number of queries or keys of a tile
SCORES = 2**24  # maximum number of scores of a pair of tiles in all rows and heads (64 MiB); above: smaller tiles
LEAST_LIMIT = 128  # minimum of the halved `TILE`, regardless of the number of scores
LOWEST = -1e30  # score of a hidden key, and initial running maximum

_product = functools.partial(jnp.einsum, preferred_element_type=jnp.float32)


class Rule(NamedTuple):
    """Static arguments of attention.

    Attributes:
        window: sliding window in tokens, as `Visible.window`; 0: no limit.
        scale: factor of the scores.
        tile: number of queries or keys of a tile.
    """

    window: int
    scale: float
    tile: int


class Keys(NamedTuple):
    """Keys and values of some tokens, and their positions."""

    k_BKSH: Array
    v_BKHS: Array
    place: Positions


class Queries(NamedTuple):
    """Tiles of queries, `[n, B, K, G, t, H]`, and their positions, `[n, B or 1, t]`; in a loop over tiles, without n.

    In all products, each array has the axes B and K first: XLA's CPU backend rejects other orders in bfloat16.
    """

    q: Array
    place: Positions


class Softmax(NamedTuple):
    """The softmax of each query over the keys that it has seen, float32 `[n, B, K, G, t]`; in a loop over tiles, without n.

    Attributes:
        sum: sum of `exp(score - highest) * value`, with an axis H.
        highest: highest score.
        total: sum of `exp(score - highest)`.
    """

    sum: Array
    highest: Array
    total: Array


class BackwardInputs(NamedTuple):
    """Per-query inputs of the backward pass, `[n, B, K, G, t]`; in a loop over tiles, without n.

    Attributes:
        dout: gradient of the output, with an axis H.
        lse: log-sum-exp of the scores.
        delta: dot product of the output and its gradient over the axis H.
    """

    dout: Array
    lse: Array
    delta: Array


def tile_size(tokens: int, rows: int, heads: int) -> int:
    """Return the number of tokens of a tile.

    If possible, each half of the tokens has whole tiles, larger than half the maximum: in `halo.balanced_order`, the
    halves attend to different keys.
    """
    most = TILE
    while most > LEAST_LIMIT and rows * heads * most**2 > SCORES:
        most //= 2
    half = math.ceil(tokens / 2)
    for size in range(min(most, half), most // 2, -1):
        if half % size == 0:
            return size
    return min(most, half)


def queries_of(q_BTNH: Array, K: int, place: Positions, rule: Rule) -> Queries:
    """Cut queries into tiles, with the query heads grouped by their key head."""
    return Queries(_heads_in_tiles(q_BTNH, K, rule), _places_in_tiles(place, rule))


def empty_softmax(queries: Queries) -> Softmax:
    """Return the softmax over no keys, of each tile of queries."""
    sum_nBKGtH = jnp.zeros(queries.q.shape, jnp.float32)
    total_nBKGt = jnp.zeros(queries.q.shape[:-1], jnp.float32)
    return Softmax(sum_nBKGtH, total_nBKGt + LOWEST, total_nBKGt)


def add_keys(queries: Queries, keys: Keys, state: Softmax, rule: Rule) -> Softmax:
    """Add keys to the softmax of each tile of queries."""
    tiles = _key_tiles(keys, rule)

    def add_to_query_tile(query_and_state: tuple[Queries, Softmax]) -> Softmax:
        query, state = query_and_state

        def add_key_tile(state: Softmax, tile: Keys) -> tuple[Softmax, None]:
            mask = _mask(query.place, tile.place, rule)
            return jax.lax.cond(mask.any(), lambda: _add_tile(query, tile, mask, state, rule), lambda: state), None

        state, _ = jax.lax.scan(add_key_tile, state, tiles)
        return state

    softmax: Softmax = jax.lax.map(add_to_query_tile, (queries, state))
    return softmax


def finish(state: Softmax, like_BTNH: Array) -> tuple[Array, Array]:
    """Return the output `[B, T, N, H]`, with the dtype of `like_BTNH`, and the log-sum-exp of the scores `[n, B, K, G, t]`."""
    # A query without visible keys (padding) has the total 0. Its output here is 0; the definition attends to all keys equally.
    total = jnp.where(state.total > 0, state.total, 1.0)
    out_nBKGtH = state.sum / total[..., None]
    return joined(out_nBKGtH, like_BTNH), state.highest + jnp.log(total)


def backward_inputs(out_BTNH: Array, lse_nBKGt: Array, dout_BTNH: Array, K: int, rule: Rule) -> BackwardInputs:
    """Return the per-query inputs of `gradients`."""
    delta_BTN1 = _product("BTNH,BTNH->BTN", out_BTNH, dout_BTNH)[..., None]
    delta_nBKGt = _heads_in_tiles(delta_BTN1, K, rule)[..., 0]
    return BackwardInputs(_heads_in_tiles(dout_BTNH, K, rule), lse_nBKGt, delta_nBKGt)


def gradients(
    queries: Queries, saved: BackwardInputs, keys: Keys, dq_nBKGtH: Array, rule: Rule
) -> tuple[Array, Array, Array]:
    """Return dq plus the terms of some keys, and the gradients of these keys and values, all float32.

    The outer loop, over tiles of keys, carries dq of all queries. The inner loop, over tiles of queries, carries dk and dv of
    the tile of keys.
    """

    def of_key_tile(dq_nBKGtH: Array, tile: Keys) -> tuple[Array, tuple[Array, Array]]:
        zeros = jnp.zeros(tile.k_BKSH.shape, jnp.float32), jnp.zeros(tile.v_BKHS.shape, jnp.float32)

        def add_query_tile(
            dk_and_dv: tuple[Array, Array], query_tile: tuple[Queries, BackwardInputs, Array]
        ) -> tuple[tuple[Array, Array], Array]:
            dk_BKsH, dv_BKHs = dk_and_dv
            query, saved, dq_BKGtH = query_tile
            mask = _mask(query.place, tile.place, rule)

            def terms() -> tuple[tuple[Array, Array], Array]:
                dq, dk, dv = _tile_gradients(query, saved, tile, mask, rule)
                return (dk_BKsH + dk, dv_BKHs + dv), dq_BKGtH + dq

            return jax.lax.cond(mask.any(), terms, lambda: (dk_and_dv, dq_BKGtH))

        dk_and_dv, dq_nBKGtH = jax.lax.scan(add_query_tile, zeros, (queries, saved, dq_nBKGtH))
        return dq_nBKGtH, dk_and_dv

    dq_nBKGtH, (dk_nBKsH, dv_nBKHs) = jax.lax.scan(of_key_tile, dq_nBKGtH, _key_tiles(keys, rule))
    return dq_nBKGtH, _join(dk_nBKsH, 2, keys.k_BKSH.shape[2]), _join(dv_nBKHs, 3, keys.v_BKHS.shape[3])


def joined(x_nBKGtH: Array, like_BTNH: Array) -> Array:
    """Join tiles of queries to an array with the shape and dtype of `like_BTNH`."""
    _, T, _, _ = like_BTNH.shape
    x_BKGTH = _join(x_nBKGtH, 3, T)
    x_BTKGH = jnp.moveaxis(x_BKGTH, 3, 1)
    return x_BTKGH.reshape(like_BTNH.shape).astype(like_BTNH.dtype)


# Tiles.


def _heads_in_tiles(x_BTNH: Array, K: int, rule: Rule) -> Array:
    """Group the query heads by their key head, and cut the queries into tiles, `[n, B, K, G, t, H]`."""
    B, T, N, H = x_BTNH.shape
    x_BTKGH = x_BTNH.reshape(B, T, K, N // K, H)
    return _cut(jnp.moveaxis(x_BTKGH, 1, 3), 3, rule.tile, 0)


def _places_in_tiles(place: Positions, rule: Rule) -> Positions:
    return jax.tree.map(lambda x_BT: _cut(x_BT, 1, rule.tile, NO_TOKEN), place)


def _key_tiles(keys: Keys, rule: Rule) -> Keys:
    k_nBKsH = _cut(keys.k_BKSH, 2, rule.tile, 0)
    v_nBKHs = _cut(keys.v_BKHS, 3, rule.tile, 0)
    return Keys(k_nBKsH, v_nBKHs, _places_in_tiles(keys.place, rule))


def _cut(x: Array, axis: int, size: int, fill: int) -> Array:
    """Cut an axis into tiles, padded with `fill`, and move the axis of the tiles to the front."""
    no = (0, 0)
    widths = [no] * x.ndim
    widths[axis] = (0, -x.shape[axis] % size)
    padded = jnp.pad(x, widths, constant_values=fill)
    tiles = padded.reshape(*x.shape[:axis], -1, size, *x.shape[axis + 1 :])
    return jnp.moveaxis(tiles, axis, 0)


def _join(tiles: Array, axis: int, length: int) -> Array:
    """Invert `_cut`."""
    x = jnp.moveaxis(tiles, 0, axis)
    x = x.reshape(*x.shape[:axis], -1, *x.shape[axis + 2 :])
    return jax.lax.slice_in_dim(x, 0, length, axis=axis)


def _mask(query: Positions, key: Positions, rule: Rule) -> Array:
    """Return the mask of the definition with an axis for G, `[B or 1, 1, 1, t, s]`."""
    return Visible(query, key, rule.window).mask()[:, None]


# One pair of tiles.


def _add_tile(query: Queries, tile: Keys, mask: Array, state: Softmax, rule: Rule) -> Softmax:
    """Add the keys of a tile to the softmax of a tile of queries."""
    scores_BKGts = rule.scale * _product("BKGtH,BKsH->BKGts", query.q, tile.k_BKSH)
    scores_BKGts = jnp.where(mask, scores_BKGts, LOWEST)
    highest_BKGt = jnp.maximum(state.highest, scores_BKGts.max(-1))
    weights_BKGts = jnp.where(mask, jnp.exp(scores_BKGts - highest_BKGt[..., None]), 0.0)
    values_BKGtH = _product("BKGts,BKHs->BKGtH", weights_BKGts.astype(tile.v_BKHS.dtype), tile.v_BKHS)

    # The old sums are relative to the old highest score.
    shrink_BKGt = jnp.exp(state.highest - highest_BKGt)
    return Softmax(
        sum=state.sum * shrink_BKGt[..., None] + values_BKGtH,
        highest=highest_BKGt,
        total=state.total * shrink_BKGt + weights_BKGts.sum(-1),
    )


def _tile_gradients(
    query: Queries, saved: BackwardInputs, tile: Keys, mask: Array, rule: Rule
) -> tuple[Array, Array, Array]:
    """Return dq, dk and dv of a pair of tiles."""
    q_BKGtH = query.q
    dout_BKGtH = saved.dout
    scores_BKGts = rule.scale * _product("BKGtH,BKsH->BKGts", q_BKGtH, tile.k_BKSH)
    weights_BKGts = jnp.where(mask, jnp.exp(scores_BKGts - saved.lse[..., None]), 0.0)
    dweights_BKGts = _product("BKGtH,BKHs->BKGts", dout_BKGtH, tile.v_BKHS)
    dscores_BKGts = rule.scale * weights_BKGts * (dweights_BKGts - saved.delta[..., None])
    dscores_BKGts = dscores_BKGts.astype(q_BKGtH.dtype)
    dq_BKGtH = _product("BKGts,BKsH->BKGtH", dscores_BKGts, tile.k_BKSH)
    dk_BKsH = _product("BKGts,BKGtH->BKsH", dscores_BKGts, q_BKGtH)
    dv_BKHs = _product("BKGts,BKGtH->BKHs", weights_BKGts.astype(dout_BKGtH.dtype), dout_BKGtH)
    return dq_BKGtH, dk_BKsH, dv_BKHs
