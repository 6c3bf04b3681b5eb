"""The sampler: prefill the cache with prompts, then generate tokens in a loop on the device.

A step reads the last token of each row and samples the next; the cache holds the tokens before it.
"""

from __future__ import annotations

from collections.abc import Callable
from dataclasses import dataclass
from functools import partial
from typing import Any, NamedTuple

import jax
import jax.numpy as jnp

from jaxgpt.config import SamplingParams
from jaxgpt.decoding.buffer import TokenBuffer
from jaxgpt.decoding.sampling import Filter, sample_token
from jaxgpt.model import GPT, KVCache


@dataclass(frozen=True)
class Sampler:
    """A model and the settings of generation. Equal samplers share compiled programs.

    Attributes:
        model: the GPT, without weights.
        sampling: sampling parameters.
        stop_ids: ids that end a row.
        filters: filters applied before the temperature; functions are compared by identity.
        context: maximum number of tokens that `prefill` and `slide_steps` read; 0: no limit; `slide_steps` needs a limit.
        lookup: length of the n-grams that `lookup_steps` (one row) matches, at least 1; 0: no prompt lookup.
    """

    model: GPT
    sampling: SamplingParams = SamplingParams()
    stop_ids: tuple[int, ...] = ()
    filters: tuple[Filter, ...] = ()
    context: int = 0
    lookup: int = 0

    def ends(self, ids: jax.Array) -> jax.Array:
        """Return whether each id ends its row: a stop id, or a negative id."""
        stop_ids = jnp.asarray(self.stop_ids, jnp.int32)
        return jnp.isin(ids, stop_ids) | (ids < 0)


class SamplerState(NamedTuple):
    """The state of the sampler between steps.

    Attributes:
        text: prompts and generated tokens.
        cache: KV cache of the tokens except the last of each row.
        done_B: bool, rows that have ended at a stop id or negative id, and rows without tokens; they repeat their last token,
            and their logits are not used. The caller drops the tokens beyond the maximum of each row.
        made: int32 scalar, number of tokens generated so far per row; 0 after `prefill`.
        key_B: sampling keys; new token i of a row is sampled with `fold_in(key, i)`.
        log_p_BS: float32, logarithm of the model's probability of the token in each slot of `text`, like
            `Sampled.log_p_B`; 0 in the slots of the prompt, and after the end of a row; undefined in unused slots.
    """

    text: TokenBuffer
    cache: KVCache
    done_B: jax.Array
    made: jax.Array
    key_B: jax.Array
    log_p_BS: jax.Array


def prefill(sampler: Sampler, params: Any, text: TokenBuffer, key_B: jax.Array, size: int) -> SamplerState:
    """Compute the cache of the prompts, without the last token of each row.

    Args:
        sampler: the model, and `context`.
        params: the weights.
        text: the prompts, padded on the left, without unused slots; rows without tokens have ended.
        key_B: sampling keys, one per row.
        size: number of slots of the text buffer, prompt included.
    """
    P = text.ids_BS.shape[1]
    read = P
    slots = size
    if sampler.context:
        read = min(P, sampler.context)
        slots = min(size, read + sampler.context)  # `slide_steps` adds at most `context` tokens to the cache
    cache = read_prompts(sampler.model, params, text.last(read), slots)

    ids_BS = jnp.pad(text.ids_BS, ((0, 0), (0, size - P)))
    text = text._replace(ids_BS=ids_BS)
    return SamplerState(
        text=text,
        cache=cache,
        done_B=text.tokens_B == 0,
        made=jnp.int32(0),
        key_B=key_B,
        log_p_BS=jnp.zeros(ids_BS.shape, jnp.float32),
    )


def decode_steps(sampler: Sampler, params: Any, state: SamplerState, steps: jax.Array) -> SamplerState:
    """Generate up to `steps` more tokens per row, fewer if all rows end or the text buffer is full.

    Args:
        sampler: model, sampling parameters, stop ids and filters.
        params: the weights.
        state: state after `prefill` or a previous call.
        steps: maximum number of new tokens per row, a traced int32 scalar, so that one program serves all values.
    """
    return repeat_steps(partial(decode_step, sampler, params), state, steps)


def slide_steps(sampler: Sampler, params: Any, state: SamplerState, steps: jax.Array) -> SamplerState:
    """Generate like `decode_steps`, but read only the last `context` tokens, as if the text began with them.

    With learned positions, a text can exceed the model's context only in this way. Beyond the context, each token takes a
    forward pass over the whole context, because the positions of its tokens change.
    """
    if state.text.ids_BS.shape[1] <= sampler.context:  # the buffer cannot hold a text that exceeds the context
        return decode_steps(sampler, params, state, steps)

    def read_again(state: SamplerState) -> SamplerState:
        text = state.text.last(sampler.context)
        cache = read_prompts(sampler.model, params, text, state.cache.size)
        return decode_step(sampler, params, state._replace(cache=cache))

    # Count ended rows too: once a row exceeds the context, the cache lacks tokens and must not be used again.
    longest = state.text.tokens_B.max()
    # A step with the cache reads all tokens of a row, at most `context`.
    cached_steps = jnp.clip(sampler.context + 1 - longest, 0, steps)
    state = decode_steps(sampler, params, state, cached_steps)
    return repeat_steps(read_again, state, steps - cached_steps)


def decode_step(sampler: Sampler, params: Any, state: SamplerState) -> SamplerState:
    """Read the last token of each row, then sample and append the next; ended rows repeat their last token."""
    text = state.text
    last_B1 = text.last(1).ids_BS
    logits_B1V, cache = extend(sampler.model, params, last_B1, state.cache)
    sampled = sample_token(logits_B1V[:, -1], text, state.key_B, state.made, sampler.sampling, sampler.filters)
    token_B = jnp.where(state.done_B, last_B1[:, 0], sampled.token_B)
    log_p_B = jnp.where(state.done_B, 0.0, sampled.log_p_B)
    log_p_BS = write_slots(state.log_p_BS, log_p_B[:, None], text.length)
    return state._replace(
        text=text.append(token_B[:, None]),
        cache=cache,
        done_B=state.done_B | sampler.ends(token_B),
        made=state.made + 1,
        log_p_BS=log_p_BS,
    )


def write_slots(x_BS: jax.Array, new_BT: jax.Array, slot: jax.Array) -> jax.Array:
    """Write T values into each row, starting at `slot`."""
    return jax.lax.dynamic_update_slice(x_BS, new_BT, (jnp.int32(0), slot))


def repeat_steps(
    advance: Callable[[SamplerState], SamplerState], state: SamplerState, steps: jax.Array
) -> SamplerState:
    """Call `advance` until `steps` more tokens per row exist, all rows end, or the text buffer is full."""
    last = state.made + jnp.minimum(steps, state.text.room)

    def is_open(state: SamplerState) -> jax.Array:
        return (state.made < last) & ~jnp.all(state.done_B)

    return jax.lax.while_loop(is_open, advance, state)


def read_prompts(model: GPT, params: Any, text: TokenBuffer, slots: int) -> KVCache:
    """Run the model on prompts without the last token of each row; return a cache of `slots` slots."""
    P = max(text.ids_BS.shape[1], 2)  # the model reads at least one slot
    ids_BT = text.last(P).ids_BS[:, :-1]
    result: Any = model.apply({"params": params}, ids_BT, slots, method=GPT.prefill)
    _, cache = result  # the compiler removes the logits
    return cache


def extend(model: GPT, params: Any, ids_BT: jax.Array, cache: KVCache) -> tuple[jax.Array, KVCache]:
    """Run the model on the next tokens; return their logits and the extended cache."""
    result: Any = model.apply({"params": params}, ids_BT, cache, method=GPT.extend)
    return result
