"""Causal attention: the plain definition that every kernel is tested against.

Letters in names: B batch, T query positions, S key/value positions, N heads, K key/value heads, H head width.
"""

from __future__ import annotations

from collections.abc import Callable

import chex
import jax
import jax.numpy as jnp

# Causal self-attention of whole sequences: (q_BTNH, k_BTKH, v_BTKH, scale, window) -> out_BTNH. K divides N; window 0 means
# no limit.
AttentionKernel = Callable[[jax.Array, jax.Array, jax.Array, float, int], jax.Array]


def causal_mask(slot_T: jax.Array, slot_S: jax.Array, start_B: jax.Array, window: int = 0) -> jax.Array:
    """Mark the keys that a query attends to: not after it, not before its row's start, not outside the window.

    Args:
        slot_T: slots of the queries, `[T]`.
        slot_S: slots of the keys, `[S]`.
        start_B: first slot of each row; `[1]` if it is the same for all rows.
        window: number of tokens a query attends to, itself included; 0: no limit.

    Returns:
        bool `[B, 1, T, S]`, true where attention is allowed.
    """
    distance_TS = slot_T[:, None] - slot_S[None, :]
    seen_TS = distance_TS >= 0
    if window:
        seen_TS &= distance_TS < window
    begun_BS = slot_S[None, :] >= start_B[:, None]
    return seen_TS[None, None, :, :] & begun_BS[:, None, None, :]


def attend(
    q_BTNH: jax.Array,
    k_BSKH: jax.Array,
    v_BSKH: jax.Array,
    mask_BNTS: jax.Array,
    scale: float,
    dropout: Callable[[jax.Array], jax.Array] = lambda weights: weights,
) -> tuple[jax.Array, jax.Array]:
    """Compute `softmax(scale q k^T + mask) v`, the softmax in float32.

    With fewer key heads than query heads, query head n uses key head `n // (N / K)` (Ainslie et al. 2023).

    Args:
        q_BTNH: queries.
        k_BSKH: keys.
        v_BSKH: values.
        mask_BNTS: bool, broadcastable; a query whose mask is all false attends uniformly to every key.
        scale: factor of the scores, usually `1 / sqrt(H)`.
        dropout: applied to the attention weights.

    Returns:
        The output `[B, T, N, H]` and the attention weights `[B, N, T, S]`.

    Source: Vaswani et al. 2017, section 3.2.
    """
    B, T, N, H = q_BTNH.shape
    S, K = k_BSKH.shape[1:3]
    chex.assert_shape([k_BSKH, v_BSKH], (B, S, K, H))
    q_BTKGH = q_BTNH.reshape(B, T, K, N // K, H)
    scores = scale * jnp.einsum("BTKGH,BSKH->BKGTS", q_BTKGH, k_BSKH, preferred_element_type=jnp.float32)
    scores_BNTS = jnp.where(mask_BNTS, scores.reshape(B, N, T, S), jnp.finfo(jnp.float32).min)
    weights_BNTS = jax.nn.softmax(scores_BNTS, axis=-1)
    mixed = dropout(weights_BNTS).astype(v_BSKH.dtype).reshape(B, K, N // K, T, S)
    out_BTNH = jnp.einsum("BKGTS,BSKH->BTKGH", mixed, v_BSKH).reshape(B, T, N, H)
    return out_BTNH, weights_BNTS
