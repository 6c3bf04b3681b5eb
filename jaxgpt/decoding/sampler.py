"""The sampler: prefill the cache with the prompts, then generate one token per step in a loop on the device."""

from __future__ import annotations

from collections.abc import Callable
from typing import Any, NamedTuple

import jax
import jax.numpy as jnp

from jaxgpt.config import SamplingParams
from jaxgpt.decoding.sampling import TokenBuffer, sample_token

# (params, tokens_BT, cache, last) -> (logits, cache)
ExtendFn = Callable[[Any, jax.Array, Any, bool], tuple[jax.Array, Any]]
# (start_B, size) -> an empty cache
CacheFn = Callable[[jax.Array, int], Any]


class Model(NamedTuple):
    """A model as two functions. Compiled programs are looked up by their identity, so create them once per model.

    Attributes:
        extend: computes logits for new tokens and appends the tokens to the cache.
        cache: creates an empty cache.
    """

    extend: ExtendFn
    cache: CacheFn


class RowLimits(NamedTuple):
    """Keys and limits of the rows.

    Attributes:
        key_B: sampling keys; token i of a row is sampled with the row's key folded with i.
        limit_B: int32, maximum number of new tokens; 0 for a row that only pads the batch.
    """

    key_B: jax.Array
    limit_B: jax.Array


class SamplerState(NamedTuple):
    """The state of the sampler between steps.

    Attributes:
        text: the tokens so far; the last token of each row is not yet in the cache.
        cache: KV cache of the model.
        done_B: rows that have ended; they repeat their last token, which is never read.
        made: int32 scalar, number of tokens generated so far.
    """

    text: TokenBuffer
    cache: Any
    done_B: jax.Array
    made: jax.Array


def prefill(
    params: Any,
    text: TokenBuffer,
    rows: RowLimits,
    size: int,
    slots: int,
    model: Model,
    sampling: SamplingParams,
    stop_ids: tuple[int, ...],
) -> SamplerState:
    """Compute the cache of the prompts and sample the first token of each row.

    Args:
        params: the weights.
        text: the prompts, which fill `text.ids_BS`.
        rows: keys and limits.
        size: slots for the whole text, prompt included.
        slots: slots of the cache.
        model: the model's functions.
        sampling: sampling parameters.
        stop_ids: ids that end a row.
    """
    logits_B1V, cache = model.extend(params, text.ids_BS, model.cache(text.start_B, slots), True)
    ids_BS = jnp.pad(text.ids_BS, ((0, 0), (0, size - text.ids_BS.shape[1])))
    state = SamplerState(text._replace(ids_BS=ids_BS), cache, rows.limit_B < 1, jnp.int32(0))
    return _append(state, logits_B1V[:, -1], cache, rows, sampling, stop_ids)


def decode_steps(
    params: Any,
    state: SamplerState,
    rows: RowLimits,
    steps: jax.Array,
    model: Model,
    sampling: SamplingParams,
    stop_ids: tuple[int, ...],
    window: int = 0,
) -> SamplerState:
    """Generate up to `steps` more tokens per row, fewer if all rows end.

    Args:
        params: the weights.
        state: as `prefill` or this function returned it.
        rows: keys and limits.
        steps: int32 scalar, at most the number of free slots. Not static, so one program serves all values.
        model: the model's functions.
        sampling: sampling parameters.
        stop_ids: ids that end a row.
        window: recompute the last `window` tokens at each step, as if the text began there. This takes a full forward pass
            per token, but it is the only way to exceed the context with learned positions. 0: use the cache.
    """

    def open_(carry: tuple[SamplerState, jax.Array]) -> jax.Array:
        return (carry[1] < steps) & ~jnp.all(carry[0].done_B)

    def step(carry: tuple[SamplerState, jax.Array]) -> tuple[SamplerState, jax.Array]:
        state, done = carry
        ids_BS, start_B, length = state.text
        if window:
            first = length - window
            ids_BT = jax.lax.dynamic_slice_in_dim(ids_BS, first, window, 1)
            fresh = model.cache(jnp.maximum(start_B - first, 0), window)
            logits_B1V, cache = model.extend(params, ids_BT, fresh, True)[0], state.cache
        else:
            token_B1 = jax.lax.dynamic_slice_in_dim(ids_BS, length - 1, 1, 1)
            logits_B1V, cache = model.extend(params, token_B1, state.cache, True)
        return _append(state, logits_B1V[:, -1], cache, rows, sampling, stop_ids), done + 1

    return jax.lax.while_loop(open_, step, (state, jnp.int32(0)))[0]


def _append(
    state: SamplerState,
    logits_BV: jax.Array,
    cache: Any,
    rows: RowLimits,
    sampling: SamplingParams,
    stop_ids: tuple[int, ...],
) -> SamplerState:
    ids_BS, start_B, length = state.text
    last_B = jax.lax.dynamic_slice_in_dim(ids_BS, length - 1, 1, 1)[:, 0]
    token_B = jnp.where(state.done_B, last_B, sample_token(logits_BV, state.text, rows.key_B, state.made, sampling))
    ended_B = jnp.isin(token_B, jnp.asarray(stop_ids, jnp.int32)) | (token_B < 0)
    done_B = state.done_B | ended_B | (state.made + 1 >= rows.limit_B)
    ids_BS = jax.lax.dynamic_update_slice(ids_BS, token_B[:, None], (jnp.int32(0), length))
    return SamplerState(TokenBuffer(ids_BS, start_B, length + 1), cache, done_B, state.made + 1)
