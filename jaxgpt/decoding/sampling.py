"""Sample the next token from logits: the filters in their order, then one random number per row."""

from __future__ import annotations

from collections.abc import Callable, Iterator, Sequence
from typing import NamedTuple

import jax
import jax.numpy as jnp

from jaxgpt.config import SamplingParams
from jaxgpt.decoding import filters
from jaxgpt.decoding.buffer import TokenBuffer
from jaxgpt.ops.attention import NO_TOKEN

NOT_A_NUMBER = -2  # id returned if a logit is NaN; `NO_TOKEN` (-1) is returned if every token is removed
DIVERGED = "the model's logits are NaN: the weights have diverged or are damaged; choose an earlier checkpoint"

# A filter maps (logits_BV, text) to new float32 logits_BV, with -inf for removed tokens (checked in lm/arguments.py).
Filter = Callable[[jax.Array, TokenBuffer], jax.Array]


def filter_name(custom: Filter) -> str:
    """Return the name of a custom filter: its `__name__`, which a function has, or the name of its class."""
    return str(getattr(custom, "__name__", type(custom).__name__))


def stages(
    logits_BV: jax.Array, text: TokenBuffer, sampling: SamplingParams, custom: Sequence[Filter] = ()
) -> Iterator[tuple[str, jax.Array]]:
    """Yield the name of each enabled filter and the logits after it.

    The order matches transformers: repetition penalty, n-grams, custom filters, temperature, top-k, top-p, min-p.
    """
    s = sampling
    if s.repetition_penalty != 1:
        logits_BV = filters.penalize_repeats(logits_BV, text, s.repetition_penalty)
        yield f"repetition penalty {s.repetition_penalty:g}", logits_BV
    if s.no_repeat_ngram_size:
        logits_BV = filters.forbid_repeated_ngrams(logits_BV, text, s.no_repeat_ngram_size)
        yield f"no-repeat n-gram {s.no_repeat_ngram_size}", logits_BV

    for custom_filter in custom:
        logits_BV = custom_filter(logits_BV, text)
        yield filter_name(custom_filter), logits_BV

    if s.temperature == 0:
        yield "greedy", filters.keep_argmax(logits_BV)
        return
    if s.temperature != 1:
        logits_BV = filters.divide_by_temperature(logits_BV, s.temperature)
        yield f"temperature {s.temperature:g}", logits_BV

    if s.top_k:
        logits_BV = filters.keep_top_k(logits_BV, s.top_k)
        yield f"top-k {s.top_k}", logits_BV
    if s.top_p < 1:
        logits_BV = filters.keep_top_p(logits_BV, s.top_p)
        yield f"top-p {s.top_p:g}", logits_BV
    if s.min_p > 0:
        logits_BV = filters.keep_min_p(logits_BV, s.min_p)
        yield f"min-p {s.min_p:g}", logits_BV


def warp(logits_BV: jax.Array, text: TokenBuffer, sampling: SamplingParams, custom: Sequence[Filter] = ()) -> jax.Array:
    """Apply all filters; the logits of removed tokens become -inf. Input and output are float32 `[B, V]`."""
    for _, warped_BV in stages(logits_BV, text, sampling, custom):
        logits_BV = warped_BV
    return logits_BV


def row_uniform(key_B: jax.Array, index: jax.typing.ArrayLike) -> jax.Array:
    """Return each row's uniform random number for new token `index`: float32 `[B]` in [0, 1)."""

    def uniform(key: jax.Array) -> jax.Array:
        return jax.random.uniform(jax.random.fold_in(key, index), dtype=jnp.float32)

    return jax.vmap(uniform)(key_B)


class Sampled(NamedTuple):
    """The next token of each row, and its log probabilities, in nats.

    Attributes:
        token_B: int32; `NO_TOKEN` if every token is removed, `NOT_A_NUMBER` if a logit is NaN.
        log_p_B: `log softmax(logits)[token]` before all filters and the temperature, float32: the model's log probability,
            regardless of the sampling parameters. Undefined without a token.
        drawn_log_p_B: log probability of the token in the distribution after all filters, float32. NaN without a token.
    """

    token_B: jax.Array
    log_p_B: jax.Array
    drawn_log_p_B: jax.Array


def sample_token(
    logits_BV: jax.Array,
    text: TokenBuffer,
    key_B: jax.Array,
    index: jax.Array,
    sampling: SamplingParams,
    custom: Sequence[Filter] = (),
) -> Sampled:
    """Sample the next token of each row. Every row has a separate key, so rows are independent.

    At temperature 0, the token is the most probable; above 0, the first with a cumulative probability above a random number
    (inverse CDF). The method needs one random number per row, not per token of the vocabulary, and can be verified by hand.
    """
    warped_BV = warp(logits_BV, text, sampling, custom)
    if sampling.draws:
        token_B = filters.inverse_cdf_sample(warped_BV, row_uniform(key_B, index))
    else:
        token_B = jnp.argmax(warped_BV, axis=-1).astype(jnp.int32)
    log_p_B = _log_p(logits_BV, token_B)
    drawn_log_p_B = _log_p(warped_BV, token_B)  # the compiler removes this value if the caller does not use it

    max_B = jnp.max(warped_BV, axis=-1)  # NaN if any logit is NaN
    token_B = jnp.where(jnp.isneginf(max_B), jnp.int32(NO_TOKEN), token_B)
    token_B = jnp.where(jnp.isnan(max_B), jnp.int32(NOT_A_NUMBER), token_B)
    return Sampled(token_B, log_p_B, drawn_log_p_B)


def _log_p(logits_BV: jax.Array, token_B: jax.Array) -> jax.Array:
    """Compute `log softmax(logits)[token]` of each row, `[B]`."""
    logit_B = jnp.take_along_axis(logits_BV, token_B[:, None], axis=-1)[:, 0]
    return logit_B - jax.nn.logsumexp(logits_BV, axis=-1)
