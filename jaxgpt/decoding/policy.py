"""From logits to the next id: what may be chosen, and how likely. Pure functions and one frozen record of settings."""

from __future__ import annotations

from dataclasses import dataclass

import jax
import jax.numpy as jnp

from jaxgpt.config import UserError

NEVER = -jnp.inf


@dataclass(frozen=True)
class Policy:
    """How the next token is chosen. Filters are applied in the order of the fields.

    Attributes:
        temperature: logits are divided by it; 0: always the likeliest.
        top_k: only the k likeliest; 0: all.
        top_p: only the likeliest that together reach this probability; 1: all.
    """

    temperature: float = 1.0
    top_k: int = 0
    top_p: float = 1.0

    def __post_init__(self) -> None:
        if not 0 <= self.temperature < float("inf"):
            raise UserError(f"temperature must be at least 0, not {self.temperature}")
        if self.top_k < 0:
            raise UserError(f"top-k must be at least 0 (0: all), not {self.top_k}")
        if not 0 <= self.top_p <= 1:
            raise UserError(f"top-p must be between 0 and 1, not {self.top_p}")


def warp(logits_BV: jax.Array, policy: Policy) -> jax.Array:
    """Logits after temperature and filters; what may not be chosen is -inf. Float32 `[B, V]` in and out."""
    if policy.temperature == 0:
        return keep_top_k(logits_BV, 1)
    logits_BV = logits_BV / policy.temperature
    if policy.top_k:
        logits_BV = keep_top_k(logits_BV, policy.top_k)
    if policy.top_p < 1:
        logits_BV = keep_top_p(logits_BV, policy.top_p)
    return logits_BV


def choose(logits_BV: jax.Array, key_B: jax.Array, policy: Policy) -> jax.Array:
    """The next id of each row, int32 `[B]`, every row with a key of its own: no row depends on its company."""
    if policy.temperature == 0:
        return jnp.argmax(logits_BV, axis=-1).astype(jnp.int32)
    draw = jax.vmap(lambda key, logits: jax.random.categorical(key, logits))
    return draw(key_B, warp(logits_BV, policy)).astype(jnp.int32)


def keep_top_k(logits_BV: jax.Array, k: int) -> jax.Array:
    """All but the k largest become -inf; what equals the k-th stays. Source: Fan et al. 2018."""
    kth_B1 = jax.lax.top_k(logits_BV, min(k, logits_BV.shape[-1]))[0][:, -1:]
    return jnp.where(logits_BV < kth_B1, NEVER, logits_BV)


def keep_top_p(logits_BV: jax.Array, p: float) -> jax.Array:
    """Keep the smallest set of likeliest ids whose probability is at least p; one is always kept.

    Source: Holtzman et al. 2020 (nucleus sampling).
    """
    order_BV = jnp.argsort(logits_BV, axis=-1)  # ascending
    sorted_BV = jnp.take_along_axis(logits_BV, order_BV, axis=-1)
    # An id goes where all that are less likely, and it, make up no more than 1 - p.
    drop_BV = jnp.cumsum(jax.nn.softmax(sorted_BV, axis=-1), axis=-1) <= 1 - p
    drop_BV = drop_BV.at[:, -1].set(False)
    rows = jnp.arange(logits_BV.shape[0])[:, None]
    return jnp.where(jnp.zeros_like(drop_BV).at[rows, order_BV].set(drop_BV), NEVER, logits_BV)
