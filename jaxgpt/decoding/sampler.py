"""Prefill once, then one token after the other in a scan, with the cache in the carry: one program for a whole text."""

from __future__ import annotations

from collections.abc import Callable
from typing import Any, NamedTuple

import jax
import jax.numpy as jnp

from jaxgpt.decoding.policy import Policy, choose

# (params, tokens_BT, cache, last) -> (logits, cache)
ExtendFn = Callable[[Any, jax.Array, Any, bool], tuple[jax.Array, Any]]


class SamplerState(NamedTuple):
    """What one step of sampling hands to the next.

    Attributes:
        token_B: the ids chosen last, not yet in the cache.
        cache: the model's.
        done_B: rows that have ended; they go on repeating their last id and are not read.
    """

    token_B: jax.Array
    cache: Any
    done_B: jax.Array


def sample(
    params: Any,
    prompt_BT: jax.Array,
    cache: Any,
    key_B: jax.Array,
    *,
    extend_fn: ExtendFn,
    policy: Policy,
    n: int,
    stop_ids: tuple[int, ...] = (),
) -> jax.Array:
    """Continue every row by n tokens, int32 `[B, n]`.

    Args:
        params: the weights.
        prompt_BT: rows aligned at their ends.
        cache: empty, knowing where each row begins, with room for T + n - 1 tokens.
        key_B: one for each row; token i of a row is drawn with the key folded with i.
        extend_fn: the model.
        policy: how tokens are chosen.
        n: how many, at least 1.
        stop_ids: ids after which a row has ended.
    """

    def next_token(logits_BV: jax.Array, index: jax.typing.ArrayLike) -> jax.Array:
        return choose(logits_BV, jax.vmap(lambda key: jax.random.fold_in(key, index))(key_B), policy)

    def ends(token_B: jax.Array) -> jax.Array:
        return jnp.isin(token_B, jnp.asarray(stop_ids, jnp.int32))

    logits_B1V, cache = extend_fn(params, prompt_BT, cache, True)
    token_B = next_token(logits_B1V[:, -1], 0)

    def step(state: SamplerState, index: jax.Array) -> tuple[SamplerState, jax.Array]:
        logits_B1V, cache = extend_fn(params, state.token_B[:, None], state.cache, True)
        token_B = jnp.where(state.done_B, state.token_B, next_token(logits_B1V[:, -1], index))
        return SamplerState(token_B, cache, state.done_B | ends(token_B)), token_B

    _, rest_nB = jax.lax.scan(step, SamplerState(token_B, cache, ends(token_B)), jnp.arange(1, n))
    return jnp.concatenate([token_B[:, None], rest_nB.T], axis=1)
