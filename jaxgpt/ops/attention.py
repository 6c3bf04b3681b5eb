"""Causal attention: the reference implementation that every kernel is tested against.

Letters in names: B batch, T query positions, S key/value positions, N heads, K key/value heads, H head width.
"""

from __future__ import annotations

from collections.abc import Callable

import chex
import jax
import jax.numpy as jnp

from jaxgpt.ops.cpu import apply_alone

# Called with the name of an intermediate result and the array; returns the array to use instead.
Name = Callable[[str, jax.Array], jax.Array]

# Causal self-attention of whole sequences: (q_BTNH, k_BTKH, v_BTKH, scale, window, segment_ids_BT=None) -> out_BTNH. A window
# of 0 is no limit.
AttentionKernel = Callable[..., jax.Array]
# The document of each position [B, T]: attention does not leave it, and its positions are consecutive. None: one per row.
SegmentIds = jax.Array | None


def causal_mask(
    slot_T: jax.Array, slot_S: jax.Array, start_B: jax.Array, window: int = 0, segment_ids_BT: SegmentIds = None
) -> jax.Array:
    """Compute the mask of causal attention: the query at slot t attends to keys at slots `max(start, t - window + 1)` to t.

    Args:
        slot_T: slots of the queries.
        slot_S: slots of the keys.
        start_B: first slot of each row; `[1]` if it is the same for all rows.
        window: number of tokens a query attends to, itself included; 0: no limit.
        segment_ids_BT: the document of each slot, to which attention is restricted (T = S); None: one document per row.

    Returns:
        bool `[B, 1, T, S]`, true where attention is allowed.
    """
    distance_TS = slot_T[:, None] - slot_S[None, :]
    causal_TS = distance_TS >= 0
    if window:
        causal_TS &= distance_TS < window
    started_BS = slot_S[None, :] >= start_B[:, None]
    mask = causal_TS[None, None, :, :] & started_BS[:, None, None, :]
    if segment_ids_BT is None:
        return mask
    return mask & (segment_ids_BT[:, None, :, None] == segment_ids_BT[:, None, None, :])


def segment_positions(segment_ids_BT: jax.Array) -> jax.Array:
    """Compute each token's position in its document, int32 `[B, T]`; the tokens of a document are consecutive."""
    slot_BT = jnp.broadcast_to(jnp.arange(segment_ids_BT.shape[1]), segment_ids_BT.shape)
    begins_BT = jnp.diff(segment_ids_BT, prepend=segment_ids_BT[:, :1]) != 0
    return slot_BT - jax.lax.cummax(jnp.where(begins_BT, slot_BT, 0), axis=1)


def attend(
    q_BTNH: jax.Array,
    k_BSKH: jax.Array,
    v_BSKH: jax.Array,
    mask_BNTS: jax.Array,
    scale: float,
    dropout: Callable[[jax.Array], jax.Array] = lambda weights: weights,
    named: Name = lambda name, x: x,
) -> tuple[jax.Array, jax.Array]:
    """Compute `softmax(scale q k^T + mask) v`, the softmax in float32.

    With fewer key heads than query heads, query head n uses key head `n // (N / K)`.

    Args:
        q_BTNH: queries.
        k_BSKH: keys.
        v_BSKH: values.
        mask_BNTS: bool, broadcastable; a query that is masked everywhere attends to all keys equally.
        scale: multiplies the scores, usually `1 / sqrt(H)`.
        dropout: applied to the attention weights.
        named: called with "scores" and the masked scores `[B, N, T, S]`, then with "pattern" and the weights.

    Returns:
        The output `[B, T, N, H]` and the attention weights `[B, N, T, S]`.

    Source: Vaswani et al. 2017, section 3.2; grouped queries: Ainslie et al. 2023.
    """
    B, T, N, H = q_BTNH.shape
    S, K = k_BSKH.shape[1:3]
    chex.assert_shape([k_BSKH, v_BSKH], (B, S, K, H))
    q_BTKGH = q_BTNH.reshape(B, T, K, N // K, H)
    k_BKSH, v_BKHS = k_BSKH.transpose(0, 2, 1, 3), v_BSKH.transpose(0, 2, 3, 1)  # as the cache has them
    # Fused with the product of a single query, the write of its key and value would copy the cache.
    apply = apply_alone if T == 1 else lambda function, *args: function(*args)
    scores = scale * apply(_scores, q_BTKGH, k_BKSH)
    scores_BNTS = jnp.where(mask_BNTS, scores.reshape(B, N, T, S), jnp.finfo(jnp.float32).min)
    weights_BNTS = named("pattern", jax.nn.softmax(named("scores", scores_BNTS), axis=-1))
    mixed = dropout(weights_BNTS).astype(v_BSKH.dtype).reshape(B, K, N // K, T, S)
    out_BTNH = apply(_weighted_sum, mixed, v_BKHS).reshape(B, T, N, H)
    return out_BTNH, weights_BNTS


def _scores(q_BTKGH: jax.Array, k_BKSH: jax.Array) -> jax.Array:
    return jnp.einsum("BTKGH,BKSH->BKGTS", q_BTKGH, k_BKSH, preferred_element_type=jnp.float32)


def _weighted_sum(weights_BKGTS: jax.Array, v_BKHS: jax.Array) -> jax.Array:
    return jnp.einsum("BKGTS,BKHS->BTKGH", weights_BKGTS, v_BKHS)
