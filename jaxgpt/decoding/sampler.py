"""Prefill once, then one token after the other in a loop on the device, with the cache in its state."""

from __future__ import annotations

from collections.abc import Callable
from typing import Any, NamedTuple

import jax
import jax.numpy as jnp

from jaxgpt.decoding.policy import History, Policy, choose

# (params, tokens_BT, cache, last) -> (logits, cache)
ExtendFn = Callable[[Any, jax.Array, Any, bool], tuple[jax.Array, Any]]
# (start_B, size) -> an empty cache
CacheFn = Callable[[jax.Array, int], Any]


class Model(NamedTuple):
    """The model as decoding knows it: two functions, always the same two for the same model, so that what was compiled
    with them is found again.

    Attributes:
        extend: logits of the next tokens, and the cache with them in it.
        cache: an empty cache.
    """

    extend: ExtendFn
    cache: CacheFn


class Rows(NamedTuple):
    """What is asked for, row by row.

    Attributes:
        key_B: of the draws; token i of a row is drawn with the key folded with i.
        limit_B: int32, how many tokens at most; 0 for a row that only fills up a bucket.
    """

    key_B: jax.Array
    limit_B: jax.Array


class SamplerState(NamedTuple):
    """What one step of sampling hands to the next.

    Attributes:
        history: the tokens so far; those chosen last are not yet in the cache.
        cache: the model's.
        done_B: rows that have ended; they go on repeating their last id, which nobody reads.
        made: int32 scalar, tokens made so far.
    """

    history: History
    cache: Any
    done_B: jax.Array
    made: jax.Array


def begin(
    params: Any,
    history: History,
    rows: Rows,
    size: int,
    slots: int,
    model: Model,
    policy: Policy,
    stop_ids: tuple[int, ...],
) -> SamplerState:
    """Read the prompts and choose the first token of each row.

    Args:
        params: the weights.
        history: the prompts, in slots up to `history.ids_BS.shape[1]`, and nothing else.
        rows: what is asked for.
        size: tokens that the whole text may take, prompt included.
        slots: of the cache.
        model: the functions.
        policy: how tokens are chosen.
        stop_ids: ids after which a row has ended.
    """
    logits_B1V, cache = model.extend(params, history.ids_BS, model.cache(history.start_B, slots), True)
    ids_BS = jnp.pad(history.ids_BS, ((0, 0), (0, size - history.ids_BS.shape[1])))
    state = SamplerState(history._replace(ids_BS=ids_BS), cache, rows.limit_B < 1, jnp.int32(0))
    return _append(state, logits_B1V[:, -1], cache, rows, policy, stop_ids)


def advance(
    params: Any,
    state: SamplerState,
    rows: Rows,
    steps: jax.Array,
    model: Model,
    policy: Policy,
    stop_ids: tuple[int, ...],
    window: int = 0,
) -> SamplerState:
    """Up to `steps` more tokens in every row; fewer where all rows end before.

    Args:
        steps: int32 scalar, within the room that is left. Not static: one program serves every number.
        window: see only so many tokens, as if the text began there, at the price of a whole pass for every token: what a
            model with learned positions has to do beyond its context. 0: the cache goes on.
    """

    def open_(carry: tuple[SamplerState, jax.Array]) -> jax.Array:
        return (carry[1] < steps) & ~jnp.all(carry[0].done_B)

    def step(carry: tuple[SamplerState, jax.Array]) -> tuple[SamplerState, jax.Array]:
        state, done = carry
        ids_BS, start_B, length = state.history
        if window:
            first = length - window
            ids_BT = jax.lax.dynamic_slice_in_dim(ids_BS, first, window, 1)
            fresh = model.cache(jnp.maximum(start_B - first, 0), window)
            logits_B1V, cache = model.extend(params, ids_BT, fresh, True)[0], state.cache
        else:
            token_B1 = jax.lax.dynamic_slice_in_dim(ids_BS, length - 1, 1, 1)
            logits_B1V, cache = model.extend(params, token_B1, state.cache, True)
        return _append(state, logits_B1V[:, -1], cache, rows, policy, stop_ids), done + 1

    return jax.lax.while_loop(open_, step, (state, jnp.int32(0)))[0]


def _append(
    state: SamplerState, logits_BV: jax.Array, cache: Any, rows: Rows, policy: Policy, stop_ids: tuple[int, ...]
) -> SamplerState:
    ids_BS, start_B, length = state.history
    last_B = jax.lax.dynamic_slice_in_dim(ids_BS, length - 1, 1, 1)[:, 0]
    token_B = jnp.where(state.done_B, last_B, choose(logits_BV, state.history, rows.key_B, state.made, policy))
    done_B = state.done_B | jnp.isin(token_B, jnp.asarray(stop_ids, jnp.int32)) | (state.made + 1 >= rows.limit_B)
    ids_BS = jax.lax.dynamic_update_slice(ids_BS, token_B[:, None], (jnp.int32(0), length))
    return SamplerState(History(ids_BS, start_B, length + 1), cache, done_B, state.made + 1)
