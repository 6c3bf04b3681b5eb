"""Prompt lookup: draft the tokens after an earlier match of the last n-gram; verify them in one pass.

A pass reads the weights once, regardless of its number of tokens. If decoding is memory-bound, each accepted
token saves nearly a whole pass. New token i of a row is sampled with `fold_in(key, i)`, regardless of the draft. A drafted
token is accepted if it and all drafted tokens before it equal the sampled tokens. Except for rounding, the text equals the
text of `decode_steps`, and the sampling distribution is unchanged.

Saxena, "Prompt Lookup Decoding" (2023); Leviathan et al., "Fast Inference from Transformers via Speculative Decoding" (2023).
"""

from __future__ import annotations

from typing import Any

import jax
import jax.numpy as jnp

from jaxgpt.decoding.buffer import TokenBuffer
from jaxgpt.decoding.sampler import Sampler, SamplerState, decode_steps, extend, repeat_steps, write_slots
from jaxgpt.decoding.sampling import sample_token

DRAFT = 7  # number of drafted tokens per verification pass; with the last token of the text, the pass reads 8 tokens


def draft_tokens(text: TokenBuffer, ngram: int, count: int) -> tuple[jax.Array, jax.Array]:
    """Find the latest earlier occurrence of the last `ngram` tokens; return the tokens after it.

    Example: the text `1 2 3 4 2 3`, with `ngram` 2 and `count` 7, has the draft `4 2 3 4 2 3 4`.

    Args:
        text: the tokens so far, one row.
        ngram: number of tokens that must match.
        count: number of tokens to draft. If fewer tokens follow the occurrence, they are repeated periodically.

    Returns:
        The draft, int32 `[count]`, and whether an earlier occurrence exists, a bool scalar; if not, the draft is undefined.
    """
    ids_S = text.ids_BS[0]
    match_S = text.matches(ngram)[0]
    slot_S = jnp.arange(len(ids_S))
    latest = jnp.max(jnp.where(match_S, slot_S, -1))

    # The tokens from `first` to the end of the text follow the match; they are one period of the draft.
    first = latest + ngram
    period = jnp.maximum(text.length - first, 1)
    draft_slots = first + jnp.arange(count) % period
    return ids_S[draft_slots], match_S.any()


def lookup_steps(sampler: Sampler, params: Any, state: SamplerState, steps: jax.Array) -> SamplerState:
    """Generate the tokens that `decode_steps` generates, in fewer passes if drafted tokens are accepted.

    Args:
        sampler: model, sampling parameters, stop ids, filters, and `lookup`, the length of the n-grams.
        params: the weights.
        state: state of one row, as returned by `prefill` or this function.
        steps: int32 scalar, number of tokens to generate; fewer if the row ends or the text buffer is full.
            The number of new tokens can exceed `steps` by up to `DRAFT`, because one pass can accept a whole draft.
    """
    assert state.text.ids_BS.shape[0] == 1, "rows accept different numbers of tokens, and the cache has one length"

    def step(state: SamplerState) -> SamplerState:
        draft_G, found = draft_tokens(state.text, sampler.lookup, DRAFT)
        return jax.lax.cond(
            found & _draft_fits(sampler, state.text),
            lambda state: _verify(sampler, params, state, draft_G),
            lambda state: decode_steps(sampler, params, state, jnp.int32(1)),
            state,
        )

    return repeat_steps(step, state, steps)


def _draft_fits(sampler: Sampler, text: TokenBuffer) -> jax.Array:
    """Return whether a draft fits the text buffer and, with learned positions, the table of positions."""
    fits = text.room > DRAFT
    config = sampler.model.config
    if config.positions == "learned":
        fits &= text.tokens_B[0] + DRAFT <= config.block_size
    return fits


def _verify(sampler: Sampler, params: Any, state: SamplerState, draft_G: jax.Array) -> SamplerState:
    """Generate the tokens that a pass over the last token and the draft verifies: 1 to `DRAFT + 1`."""
    # Read the last token and the draft in one pass.
    text = state.text
    drafted = text.append(draft_G[None])
    read_1T = drafted.last(DRAFT + 1).ids_BS
    logits_1TV, cache = extend(sampler.model, params, read_1T, state.cache)

    # Sample a token at each position, as if the drafted tokens before it had been generated.
    def sample(logits_V: jax.Array, t: jax.Array) -> tuple[jax.Array, jax.Array]:
        seen = drafted._replace(length=text.length + t)
        index = state.made + t
        sampled = sample_token(logits_V[None], seen, state.key_B, index, sampler.sampling, sampler.filters)
        return sampled.token_B[0], sampled.log_p_B[0]

    token_T, log_p_T = jax.vmap(sample)(logits_1TV[0], jnp.arange(DRAFT + 1))
    ended_T = sampler.ends(token_T)

    # Accept the draft up to its first wrong token or the end of the row, and the token sampled there.
    correct_G = (token_T[:-1] == draft_G) & ~ended_T[:-1]
    accepted_G = jnp.cumprod(correct_G)
    count = accepted_G.sum(dtype=jnp.int32) + 1

    # Keep `count` tokens: the slots after them are masked until later tokens overwrite them.
    extended = text.append(token_T[None])
    log_p_BS = write_slots(state.log_p_BS, log_p_T[None], text.length)
    return state._replace(
        text=extended._replace(length=text.length + count),
        cache=cache._replace(length=state.cache.length + count),
        done_B=ended_T[count - 1][None],
        made=state.made + count,
        log_p_BS=log_p_BS,
    )
