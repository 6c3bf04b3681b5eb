"""Prompt-lookup decoding: draft the next tokens by finding the last n-gram earlier in the text, and verify them in one pass.

A pass over several tokens reads the weights once, as a pass over one token does, so each accepted token saves nearly a whole
pass. Token i of a row is sampled with the row's key folded with i, whatever is drafted, and a drafted token is accepted if it
equals the sampled one. So the text is the one that `decode_steps` generates, and sampled tokens keep their distribution.

Saxena, "Prompt Lookup Decoding" (2023); Leviathan et al., "Fast Inference from Transformers via Speculative Decoding" (2023).
"""

from __future__ import annotations

from typing import Any

import jax
import jax.numpy as jnp

from jaxgpt.config import SamplingParams
from jaxgpt.decoding.sampler import Model, RowLimits, SamplerState, decode_steps
from jaxgpt.decoding.sampling import TokenBuffer, sample_token

DRAFT = 7  # tokens drafted at once; with the last token, a pass reads 8


def draft_tokens(text: TokenBuffer, ngram: int, count: int) -> tuple[jax.Array, jax.Array]:
    """Find the latest earlier occurrence of the last `ngram` tokens, and return the tokens that follow it.

    Args:
        text: one row.
        ngram: number of tokens that must match.
        count: number of tokens to draft. If fewer follow, they repeat, as in a text with that period.

    Returns:
        The draft, int32 `[count]`, and whether there is one, a bool scalar.
    """
    ids_S, start, length = text.ids_BS[0], text.start_B[0], text.length
    slot_S = jnp.arange(ids_S.shape[0])
    match_S = (slot_S >= start) & (slot_S + ngram < length)
    for i in range(ngram):
        match_S &= jnp.roll(ids_S, -i) == ids_S[length - ngram + i]
    first = jnp.max(jnp.where(match_S, slot_S, -1)) + ngram  # slot of the token after the n-gram
    period = jnp.maximum(length - first, 1)
    return ids_S[first + jnp.arange(count) % period], match_S.any()


def lookup_steps(
    params: Any,
    state: SamplerState,
    rows: RowLimits,
    steps: jax.Array,
    model: Model,
    sampling: SamplingParams,
    stop_ids: tuple[int, ...],
    ngram: int,
) -> SamplerState:
    """Generate the tokens that `decode_steps` generates, in fewer passes where the text repeats itself.

    Args:
        params: the weights.
        state: of one row, as `prefill` or this function returned it.
        rows: key and limit.
        steps: int32 scalar, number of tokens to generate: up to `DRAFT` more are returned, but not more than the row's limit.
        model: the model's functions.
        sampling: sampling parameters.
        stop_ids: ids that end the row.
        ngram: number of tokens that must match to draft.
    """
    assert state.text.ids_BS.shape[0] == 1, "rows accept different numbers of tokens, and the cache has one length"
    target, limit = state.made + steps, rows.limit_B[0]

    def plain(state: SamplerState, _: jax.Array) -> SamplerState:
        return decode_steps(params, state, rows, jnp.int32(1), model, sampling, stop_ids)

    def verify(state: SamplerState, draft_G: jax.Array) -> SamplerState:
        (ids_1S, start_1, length), cache = state.text, state.cache
        ids_1S = jax.lax.dynamic_update_slice(ids_1S, draft_G[None], (jnp.int32(0), length))
        read_1T = jax.lax.dynamic_slice_in_dim(ids_1S, length - 1, DRAFT + 1, 1)
        logits_1TV, after = model.extend(params, read_1T, cache, False)

        def sample(logits_V: jax.Array, t: jax.Array) -> jax.Array:
            text = TokenBuffer(ids_1S, start_1, length + t)
            return sample_token(logits_V[None], text, rows.key_B, state.made + t, sampling)[0]

        token_T = jax.vmap(sample)(logits_1TV[0], jnp.arange(DRAFT + 1))
        accepted = jnp.cumprod(token_T[:-1] == draft_G).sum()  # the token after them is sampled from the text with them
        ended_T = jnp.isin(token_T, jnp.asarray(stop_ids, jnp.int32)) | (token_T < 0)
        count = jnp.minimum(accepted, jnp.where(ended_T.any(), jnp.argmax(ended_T), DRAFT)).astype(jnp.int32) + 1
        made = state.made + count
        # Slots after the accepted tokens are overwritten by later tokens, and no token attends to them before that.
        ids_1S = jax.lax.dynamic_update_slice(ids_1S, token_T[None], (jnp.int32(0), length))
        text = TokenBuffer(ids_1S, start_1, length + count)
        return SamplerState(
            text, after._replace(length=cache.length + count), ended_T[count - 1][None] | (made >= limit), made
        )

    def step(state: SamplerState) -> SamplerState:
        draft_G, found = draft_tokens(state.text, ngram, DRAFT)
        return jax.lax.cond(found & (state.made + DRAFT < limit), verify, plain, state, draft_G)

    return jax.lax.while_loop(lambda state: (state.made < target) & ~state.done_B[0], step, state)
