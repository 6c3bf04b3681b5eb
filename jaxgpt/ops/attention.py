"""Causal attention: positions, visibility, and the reference definition for all kernels.

Letters in names: B batch, T query positions, S key/value positions, N heads, K key/value heads, G = N / K, H head width.
"""

from __future__ import annotations

from collections.abc import Callable
from dataclasses import dataclass, field
from typing import NamedTuple

import chex
import jax
import jax.numpy as jnp

# An edit, (name, array) -> array, receives a named activation and returns the array to use instead.
Edit = Callable[[str, jax.Array], jax.Array]

NO_TOKEN = -1  # id and position of padding, and position of empty cache slots


class Positions(NamedTuple):
    """The position of each token, and its document.

    Attributes:
        position_BT: position in the document, starting at 0; `NO_TOKEN` for left padding. `[1, T]`: equal in all rows.
        document_BT: id of the token's document; negative for padding on the right; None: one document per row.
    """

    position_BT: jax.Array
    document_BT: jax.Array | None = None


@jax.tree_util.register_dataclass
@dataclass(frozen=True)
class Visible:
    """The keys that a query attends to: tokens of its document, up to its position, within the window.

    Attributes:
        query: positions of the queries.
        key: positions of the keys; None: queries and keys are the same tokens, with positions from `row_positions`,
            `padded_positions` or `document_positions`. Each document is then a run of consecutive tokens, so a kernel
            can mask by the order of the tokens in the row. Only attention functions made for a permuted order
            (`train.loss.next_token_loss`) receive tokens in that order.
        window: maximum number of tokens that a query attends to, including itself; 0: no limit.
    """

    query: Positions
    key: Positions | None = None
    window: int = field(default=0, metadata={"static": True})

    def mask(self) -> jax.Array:
        """Return the attention mask, bool `[B or 1, 1, T, S]`: true where the query attends to the key."""
        query = self.query
        key = self.key or query
        distance_BTS = query.position_BT[:, :, None] - key.position_BT[:, None, :]
        exists_BS = key.position_BT != NO_TOKEN
        mask_BTS = (distance_BTS >= 0) & exists_BS[:, None, :]
        if self.window:
            mask_BTS &= distance_BTS < self.window
        if query.document_BT is not None and key.document_BT is not None:
            mask_BTS &= query.document_BT[:, :, None] == key.document_BT[:, None, :]
        return mask_BTS[:, None]


def real_tokens(positions: Positions) -> jax.Array:
    """Return the mask of tokens, bool `[B or 1, T]`; false for padding, which has no position or a negative document id."""
    token_BT = positions.position_BT != NO_TOKEN
    if positions.document_BT is not None:
        token_BT &= positions.document_BT >= 0
    return token_BT


def row_positions(tokens: int) -> Positions:
    """Return the positions 0 to `tokens - 1` of rows without padding: `[1, T]`."""
    return Positions(jnp.arange(tokens, dtype=jnp.int32)[None])


def padded_positions(ids_BT: jax.Array) -> Positions:
    """Return the positions of left-padded rows; padding has negative ids and is a separate document."""
    token_BT = (ids_BT >= 0).astype(jnp.int32)
    position_BT = jnp.cumsum(token_BT, axis=1) - 1  # padding: 0 - 1, which is `NO_TOKEN`
    return Positions(position_BT, token_BT)


def document_positions(document_BT: jax.Array) -> Positions:
    """Return positions that start at 0 in each document; a document is a run of equal ids in its row."""
    slot_T = jnp.arange(document_BT.shape[1], dtype=jnp.int32)
    slot_BT = jnp.broadcast_to(slot_T, document_BT.shape)
    begins_BT = jnp.diff(document_BT, prepend=document_BT[:, :1]) != 0
    start_BT = jax.lax.cummax(jnp.where(begins_BT, slot_BT, 0), axis=1)
    return Positions(slot_BT - start_BT, document_BT)


def attend(
    q_BTNH: jax.Array, k_BKSH: jax.Array, v_BKHS: jax.Array, visible: Visible, scale: float, edit: Edit | None = None
) -> jax.Array:
    """Compute `softmax(scale * q k^T) v` over the visible keys, with a float32 softmax: `[B, T, N, H]`.

    With fewer key heads than query heads, query head n uses key head `n // (N / K)`. The output of a query without visible
    keys (padding) is finite and not used: here the query attends to all keys equally; kernels may return other values.

    Args:
        q_BTNH: queries.
        k_BKSH: keys.
        v_BKHS: values. Both matrix products contract the last axis of each operand.
        visible: the keys that each query attends to.
        scale: factor of the scores, usually `1 / sqrt(H)`.
        edit: called with "scores" and the masked scores `[B, N, T, S]`, then with "pattern" and the attention weights.
            Kernels call this function instead if `edit` is not None.

    Source: Vaswani et al. 2017, section 3.2; grouped queries: Ainslie et al. 2023.
    """
    B, T, N, H = q_BTNH.shape
    _, K, S, _ = k_BKSH.shape
    G = N // K
    chex.assert_shape([k_BKSH, v_BKHS], [(B, K, S, H), (B, K, H, S)])

    q_BTKGH = q_BTNH.reshape(B, T, K, G, H)
    scores_BKGTS = scale * jnp.einsum("BTKGH,BKSH->BKGTS", q_BTKGH, k_BKSH, preferred_element_type=jnp.float32)
    scores_BNTS = scores_BKGTS.reshape(B, N, T, S)
    scores_BNTS = jnp.where(visible.mask(), scores_BNTS, jnp.finfo(jnp.float32).min)
    if edit:
        scores_BNTS = edit("scores", scores_BNTS)

    weights_BNTS = jax.nn.softmax(scores_BNTS, axis=-1)
    if edit:
        weights_BNTS = edit("pattern", weights_BNTS)

    weights_BKGTS = weights_BNTS.astype(v_BKHS.dtype).reshape(B, K, G, T, S)
    out_BTKGH = jnp.einsum("BKGTS,BKHS->BTKGH", weights_BKGTS, v_BKHS)
    return out_BTKGH.reshape(B, T, N, H)
