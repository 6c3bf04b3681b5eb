"""Causal self-attention. `attend` and the masks are plain functions; `Attention` owns the projections."""

from __future__ import annotations

import functools
import math
from collections.abc import Callable

import chex
import flax.linen as nn
import jax
import jax.numpy as jnp

from jaxgpt.config import ModelConfig
from jaxgpt.model.cache import write
from jaxgpt.model.dropout import dropout
from jaxgpt.model.flash import Flash
from jaxgpt.model.linear import Linear, constrain
from jaxgpt.model.norms import Norm
from jaxgpt.model.positions import Rotation, rotate


def causal_mask(slot_T: jax.Array, slot_S: jax.Array, start_B: jax.Array, window: int = 0) -> jax.Array:
    """Which keys a query may see: none after it, none before its row's start, none outside the window.

    Args:
        slot_T: slots of the queries.
        slot_S: slots of the keys.
        start_B: first slot of each row (`[1]` where all rows are alike).
        window: how many tokens a query sees, itself included; 0: no limit.

    Returns:
        bool `[B, 1, T, S]`, true where the query may look.
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
    """`softmax(scale q k^T + mask) v`, the softmax in float32.

    With fewer heads of keys than of queries, query head n reads key head `n // (N / K)` (Ainslie et al. 2023).

    Args:
        mask_BNTS: bool, broadcastable; a query that may see nothing attends evenly to everything.
        scale: what the scores are multiplied with, usually `1 / sqrt(H)`.
        dropout: applied to the weights.

    Returns:
        The mixed values `[B, T, N, H]` and the weights `[B, N, T, S]`.

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


class Attention(nn.Module):
    """Multi-head causal self-attention with grouped keys and values, and an explicit cache.

    Without `flash`, or with a cache, the weights are computed as such, and sown.
    """

    config: ModelConfig
    dtype: jnp.dtype
    flash: Flash | None = None

    @nn.compact
    def __call__(
        self,
        x_BTD: jax.Array,
        mask_BNTS: jax.Array | None,
        rotation: Rotation | None,
        cache: tuple[jax.Array, jax.Array, jax.Array] | None,
        layer: int | jax.Array,
        key: jax.Array | None,
    ) -> tuple[jax.Array, tuple[jax.Array, jax.Array] | None]:
        """Returns what is added to the residual stream and, given `cache = (k, v, slot)`, the k and v written."""
        c = self.config
        project = functools.partial(self._project, x_BTD)
        q_BTNH, k_BTKH, v_BTKH = (
            project("q_proj", c.n_head),
            project("k_proj", c.kv_heads),
            project("v_proj", c.kv_heads),
        )
        if c.qk_norm:
            q_BTNH = Norm(c, self.dtype, "rmsnorm", name="q_norm")(q_BTNH)
            k_BTKH = Norm(c, self.dtype, "rmsnorm", name="k_norm")(k_BTKH)
        if rotation is not None:
            q_BTNH, k_BTKH = rotate(q_BTNH, rotation), rotate(k_BTKH, rotation)
        if c.scale_attn_by_inverse_layer_idx:
            q_BTNH = q_BTNH / jnp.asarray(layer + 1, self.dtype)
        scale = 1 / math.sqrt(c.head_width) if c.scale_attn_weights else 1.0
        k_BSKH, v_BSKH, written = k_BTKH, v_BTKH, None
        if cache is not None:
            k_BSKH, v_BSKH = write(cache[0], k_BTKH, cache[2]), write(cache[1], v_BTKH, cache[2])
            written = (k_BSKH, v_BSKH)
        if self.flash and cache is None:
            out_BTNH = self.flash(q_BTNH, k_BTKH, v_BTKH, scale, c.sliding_window)
        else:
            assert mask_BNTS is not None
            drop = functools.partial(dropout, rate=c.dropout, key=key)
            out_BTNH, weights_BNTS = attend(
                q_BTNH, k_BSKH.astype(self.dtype), v_BSKH.astype(self.dtype), mask_BNTS, scale, drop
            )
            self.sow("intermediates", "attention", weights_BNTS)
        if not c.attn_proj:
            return out_BTNH.reshape(x_BTD.shape), written
        out = Linear(
            c,
            (c.n_head, c.head_width, c.n_embd),
            ("heads", "head_dim", "embed"),
            c.bias,
            self.dtype,
            residual=True,
            n_in=2,
            name="o_proj",
        )
        return out(out_BTNH), written

    def _project(self, x_BTD: jax.Array, name: str, heads: int) -> jax.Array:
        axis = "heads" if name == "q_proj" else "kv_heads"
        shape = (self.config.n_embd, heads, self.config.head_width)
        y = Linear(self.config, shape, ("embed", axis, "head_dim"), self.config.bias, self.dtype, name=name)(x_BTD)
        return constrain(y, ("batch", "length", axis, "head_dim"))
