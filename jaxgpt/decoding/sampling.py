"""From logits to the next token: the text so far, and the filters in the order in which they apply."""

from __future__ import annotations

from collections.abc import Callable, Iterator, Sequence
from dataclasses import asdict, dataclass
from typing import NamedTuple

import jax
import jax.numpy as jnp

from jaxgpt.config import SamplingParams, UserError
from jaxgpt.decoding import filters

# Where a token id is expected and there is none, because of the logits:
NO_TOKEN = -1  # every token is forbidden
NOT_A_NUMBER = -2  # a logit is NaN

DIVERGED = "the model's logits are NaN: its weights have diverged or are damaged; choose an earlier checkpoint"


class TokenBuffer(NamedTuple):
    """The tokens so far.

    Attributes:
        ids_BS: int32, the last token of every row at `length - 1`.
        start_B: int32, the slot of each row's first token.
        length: int32 scalar, slots in use.
    """

    ids_BS: jax.Array
    start_B: jax.Array
    length: jax.Array

    def seen_BS(self) -> jax.Array:  # noqa: N802
        """Which slots hold tokens."""
        slot_S = jnp.arange(self.ids_BS.shape[1])
        return (slot_S[None, :] >= self.start_B[:, None]) & (slot_S < self.length)[None, :]


# (logits_BV, text) -> logits_BV, float32; forbidden tokens become -inf
Filter = Callable[[jax.Array, TokenBuffer], jax.Array]


@dataclass(frozen=True)
class CustomSampling(SamplingParams):
    """Sampling parameters with filters of the caller's, which apply before the temperature. See `with_filters`."""

    filters: tuple[Filter, ...] = ()


def with_filters(sampling: SamplingParams, added: Sequence[Filter]) -> SamplingParams:
    """Add filters to sampling parameters.

    Compiled programs are found again by the identity of the functions, so define each once, at the top of a module.

    Args:
        sampling: the parameters.
        added: pure functions `(logits_BV, text) -> logits_BV`, traced once.

    Raises:
        UserError: one of them is not a function.
    """
    if not added:
        return sampling
    if callable(added) or not all(callable(f) and f.__hash__ for f in added):
        raise UserError("filters must be a list of functions (logits_BV, text) -> logits_BV")
    return CustomSampling(**asdict(sampling), filters=tuple(added))


def _apply(custom: Filter, logits_BV: jax.Array, text: TokenBuffer) -> tuple[str, jax.Array]:
    """The name of a filter, and the logits after it, of the same shape and dtype."""
    name, out = getattr(custom, "__name__", type(custom).__name__), custom(logits_BV, text)
    found, wanted = (f"{a.dtype} {list(a.shape)}" for a in (jnp.asarray(out), logits_BV))
    if found != wanted:
        raise UserError(
            f"the filter {name} returned {found} for logits of {wanted}: shape and dtype must stay the same"
        )
    return name, out


def stages(logits_BV: jax.Array, text: TokenBuffer, sampling: SamplingParams) -> Iterator[tuple[str, jax.Array]]:
    """Yield the name of each enabled filter and the logits after it, in transformers' order: repetition penalty, n-grams, the
    caller's own, temperature, top-k, top-p, min-p."""
    s = sampling
    if s.repetition_penalty != 1:
        logits_BV = filters.penalize_repeats(logits_BV, text.ids_BS, text.seen_BS(), s.repetition_penalty)
        yield f"repetition penalty {s.repetition_penalty:g}", logits_BV
    if s.no_repeat_ngram_size:
        logits_BV = filters.forbid_repeated_ngrams(
            logits_BV, text.ids_BS, text.start_B, text.length, s.no_repeat_ngram_size
        )
        yield f"no-repeat n-gram {s.no_repeat_ngram_size}", logits_BV
    for custom in s.filters if isinstance(s, CustomSampling) else ():
        name, logits_BV = _apply(custom, logits_BV, text)
        yield name, logits_BV
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


def warp(logits_BV: jax.Array, text: TokenBuffer, sampling: SamplingParams) -> jax.Array:
    """Apply all filters; forbidden tokens become -inf. Float32 `[B, V]` in and out."""
    for _, warped_BV in stages(logits_BV, text, sampling):
        logits_BV = warped_BV
    return logits_BV


def row_uniform(key_B: jax.Array, index: jax.typing.ArrayLike) -> jax.Array:
    """The random number that draws token `index` of each row: float32 `[B]` in [0, 1), with x64 or without."""
    return jax.vmap(lambda key: jax.random.uniform(jax.random.fold_in(key, index), dtype=jnp.float32))(key_B)


def sample_token(
    logits_BV: jax.Array, text: TokenBuffer, key_B: jax.Array, index: jax.Array, sampling: SamplingParams
) -> jax.Array:
    """Choose the next token of each row. Every row has a key of its own, so no row depends on the others.

    One random number per token decides: the token at which the cumulative probability first exceeds it. A choice can be
    explained and checked by hand, and costs one random number instead of one per token of the vocabulary.

    Returns:
        int32 `[B]`; `NO_TOKEN` where every token is forbidden, `NOT_A_NUMBER` where a logit is NaN.
    """
    warped_BV = warp(logits_BV, text, sampling)
    if sampling.draws:
        token_B = filters.inverse_cdf_sample(warped_BV, row_uniform(key_B, index))
    else:
        token_B = jnp.argmax(warped_BV, axis=-1).astype(jnp.int32)
    max_B = jnp.max(warped_BV, axis=-1)  # NaN where one of them is
    token_B = jnp.where(jnp.isneginf(max_B), jnp.int32(NO_TOKEN), token_B)
    return jnp.where(jnp.isnan(max_B), jnp.int32(NOT_A_NUMBER), token_B)
