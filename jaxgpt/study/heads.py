"""Describe attention heads by their patterns: previous-token and induction scores, and entropy."""

from __future__ import annotations

from functools import partial
from typing import Any, NamedTuple

import jax
import jax.numpy as jnp

from jaxgpt.lm import LM
from jaxgpt.lm.arguments import as_keys
from jaxgpt.model import GPT
from jaxgpt.settings import as_int
from jaxgpt.study.activation_names import layer_names
from jaxgpt.study.observer import forward
from jaxgpt.study.token_ids import on_tokens


class Heads(NamedTuple):
    """Scores of each head, means over rows and positions.

    Attributes:
        previous: attention to the previous token, `[L, N]`; NaN for a single token.
        induction: attention to the tokens that followed earlier occurrences of the query's token, `[L, N]`; NaN if no row
            contains a token twice.
        entropy: entropy of the attention weights, in nats, `[L, N]`.
    """

    previous: jax.Array
    induction: jax.Array
    entropy: jax.Array


def heads(lm: LM, ids: Any) -> Heads:
    """Score the heads on a text or ids `[B, T]`, such as the ids of `repeated_tokens`; errors as in `run`."""
    return on_tokens(_heads, lm, ids)


@partial(jax.jit, static_argnums=0)
def _heads(model: GPT, params: Any, tokens_BT: jax.Array) -> Heads:
    names = tuple(layer_names(model.config, "attn.pattern"))
    taps = forward(model, params, tokens_BT, names).taps
    pattern_LBNTS = jnp.stack([taps[name] for name in names])
    return Heads(
        previous=jax.vmap(previous_score)(pattern_LBNTS),
        induction=jax.vmap(induction_score, (0, None))(pattern_LBNTS, tokens_BT),
        entropy=entropy(pattern_LBNTS).mean((1, 3)),
    )


def previous_score(pattern_BNTS: jax.Array) -> jax.Array:
    """Compute each head's mean attention to the previous token, `[N]`, over all queries but the first."""
    return jnp.diagonal(pattern_BNTS, -1, 2, 3).mean((0, 2))


def induction_score(pattern_BNTS: jax.Array, tokens_BT: jax.Array) -> jax.Array:
    """Compute each head's mean attention to tokens that followed earlier occurrences of the query's token, `[N]`.

    The mean is over queries with an earlier occurrence. Source: Olsson et al. 2022.
    """
    T = tokens_BT.shape[1]
    # For the ids [a, b, a], the token a of query 2 also occurs at 0, so an induction head attends to key 1, the b that followed
    # it. Key s follows an earlier occurrence if the token at s - 1 equals the query's token.
    before_BTS = tokens_BT[:, :, None] == jnp.roll(tokens_BT, 1, 1)[:, None, :]
    position_T = jnp.arange(T)
    is_causal_TS = position_T[None, :] <= position_T[:, None]
    candidates_TS = is_causal_TS & (position_T[None, :] > 0)  # keys up to the query, except the first
    follows_BTS = before_BTS & candidates_TS[None]
    repeated_BT = follows_BTS.any(-1)
    mass_N = jnp.where(follows_BTS[:, None], pattern_BNTS, 0.0).sum((0, 2, 3))
    return mass_N / repeated_BT.sum().astype(mass_N.dtype)


@jax.jit
def entropy(pattern_BNTS: jax.Array) -> jax.Array:
    """Compute the entropy of each query's attention weights, in nats, `[B, N, T]`."""
    return jax.scipy.special.entr(pattern_BNTS).sum(-1)


def repeated_tokens(lm: LM, period: int, rows: int = 8, key: int | jax.Array = 0) -> jax.Array:
    """Draw rows of `period` random tokens that are repeated once, int32 `[rows, 2 * period]`.

    `period` is at most half the context length. Raises `UserError` if `period` or `rows` is out of range.
    """
    c = lm.config.model
    rows = as_int("rows", rows, 1, 2**20)
    period = as_int("period", period, 1, c.block_size // 2)
    once = jax.random.randint(as_keys(key), (rows, period), 0, c.vocab_size, jnp.int32)
    return jnp.tile(once, (1, 2))
