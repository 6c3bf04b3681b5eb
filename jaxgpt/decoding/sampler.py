"""The sampler: prefill the cache with prompts, then generate tokens in a loop on the device."""

from __future__ import annotations

from dataclasses import dataclass
from typing import Any, NamedTuple

import jax
import jax.numpy as jnp
import numpy as np

from jaxgpt.config import SamplingParams
from jaxgpt.decoding.sampling import Filter, TokenBuffer, sample_token
from jaxgpt.model import GPT


@dataclass(frozen=True)
class Decoder:
    """A model as two functions, with probability 0 for ids without text; equal decoders share programs.

    Attributes:
        model: the model.
        has_text: one byte per id, 0 for an id without text (a padded vocabulary); empty: all have a text.
    """

    model: GPT
    has_text: bytes = b""

    def prefill(
        self, params: Any, tokens_BT: jax.Array, position_BT: jax.Array, slots: int, last: bool
    ) -> tuple[jax.Array, Any]:
        """Return the logits of prompts, `[B, T, V]` or of the last position, and a cache of `slots` slots."""
        result: Any = self.model.apply({"params": params}, tokens_BT, position_BT, slots, last, method="prefill")
        return only_text(result[0], self.has_text), result[1]

    def extend(self, params: Any, tokens_BT: jax.Array, cache: Any, last: bool) -> tuple[jax.Array, Any]:
        """Return the logits of tokens that follow the cached tokens, and the extended cache."""
        result: Any = self.model.apply({"params": params}, tokens_BT, cache, last, method="extend")
        return only_text(result[0], self.has_text), result[1]


def only_text(logits_BTV: jax.Array, has_text: bytes) -> jax.Array:
    """Set the logits of ids without a text to -inf; `has_text` as for `Decoder`."""
    possible = np.frombuffer(has_text, np.bool_)
    return logits_BTV if possible.all() else jnp.where(possible[None, None], logits_BTV, -jnp.inf)


@dataclass(frozen=True)
class Sampler:
    """A model and the settings of generation. Equal samplers share compiled programs.

    Attributes:
        model: the model as two functions.
        sampling: sampling parameters.
        stop_ids: ids that end a row.
        filters: custom filters, applied before the temperature; compared by identity.
        window: beyond this number of tokens, recompute the last `window` tokens at each step, as if the text began there.
            Each token then takes a full forward pass. With learned positions, texts beyond the context need a window. 0: off.
        lookup: number of tokens that must match to draft the next tokens (`lookup_steps`); 0: no drafts.
    """

    model: Decoder
    sampling: SamplingParams = SamplingParams()
    stop_ids: tuple[int, ...] = ()
    filters: tuple[Filter, ...] = ()
    window: int = 0
    lookup: int = 0


class SamplerState(NamedTuple):
    """The state of the sampler between steps.

    Attributes:
        text: the tokens so far; the last token of each row is not yet in the cache.
        cache: KV cache of the model.
        done_B: bool, rows that have ended; they repeat their last token, and their logits are not used.
        made: int32 scalar, number of tokens generated so far.
        key_B: sampling keys; token i of a row is sampled with `fold_in(key, i)`.
        limit_B: int32, maximum number of new tokens; 0 for a row that only pads the batch.
    """

    text: TokenBuffer
    cache: Any
    done_B: jax.Array
    made: jax.Array
    key_B: jax.Array
    limit_B: jax.Array


def prefill(
    sampler: Sampler, params: Any, text: TokenBuffer, key_B: jax.Array, limit_B: jax.Array, size: int
) -> SamplerState:
    """Compute the cache of the prompts and sample the first token of each row.

    Args:
        sampler: model, sampling parameters and stop ids.
        params: the weights.
        text: the prompts, which fill `text.ids_BS`.
        key_B: sampling keys.
        limit_B: int32, maximum number of new tokens of each row.
        size: slots for the whole text, prompt included. The cache has fewer slots if the sampler's window is smaller.
    """
    P, window = text.ids_BS.shape[1], sampler.window or size
    # At most `window` tokens are cached after the prompt: beyond the window, the cache is not used.
    seen, slots = text.last(min(P, window)), min(size, min(P, window) + window)
    logits_B1V, cache = sampler.model.prefill(params, seen.ids_BS, seen.positions(), slots, True)
    text = text._replace(ids_BS=jnp.pad(text.ids_BS, ((0, 0), (0, size - P))))
    return _append(sampler, SamplerState(text, cache, limit_B < 1, jnp.int32(0), key_B, limit_B), logits_B1V, cache)


def decode_steps(sampler: Sampler, params: Any, state: SamplerState, steps: jax.Array) -> SamplerState:
    """Generate up to `steps` more tokens per row, fewer if all rows end.

    Args:
        sampler: model, sampling parameters and stop ids.
        params: the weights.
        state: returned by `prefill` or this function.
        steps: int32 scalar. Not static, so one program serves all values.
    """
    last, window = state.made + steps, sampler.window

    def going(state: SamplerState) -> jax.Array:
        return (state.made < last) & ~jnp.all(state.done_B)

    def within_window(state: SamplerState) -> jax.Array:
        return going(state) & (state.text.length - state.text.start_B.min() <= window)

    def cached(state: SamplerState) -> SamplerState:
        logits_B1V, cache = sampler.model.extend(params, state.text.last(1).ids_BS, state.cache, True)
        return _append(sampler, state, logits_B1V, cache)

    def recomputed(state: SamplerState) -> SamplerState:
        seen = state.text.last(window)
        logits_B1V, _ = sampler.model.prefill(params, seen.ids_BS, seen.positions(), window, True)
        return _append(sampler, state, logits_B1V, state.cache)

    if not window:
        return jax.lax.while_loop(going, cached, state)
    return jax.lax.while_loop(going, recomputed, jax.lax.while_loop(within_window, cached, state))


def _append(sampler: Sampler, state: SamplerState, logits_B1V: jax.Array, cache: Any) -> SamplerState:
    text, made = state.text, state.made + 1
    token_B, _ = sample_token(logits_B1V[:, -1], text, state.key_B, state.made, sampler.sampling, sampler.filters)
    token_B = jnp.where(state.done_B, text.last(1).ids_BS[:, 0], token_B)
    ended_B = jnp.isin(token_B, jnp.asarray(sampler.stop_ids, jnp.int32)) | (token_B < 0)
    done_B = state.done_B | ended_B | (made >= state.limit_B)
    return state._replace(text=text.append(token_B[:, None]), cache=cache, done_B=done_B, made=made)
