"""From logits to the next id: the settings, and the order in which their filters are applied."""

from __future__ import annotations

import math
from collections.abc import Iterator
from dataclasses import dataclass
from typing import NamedTuple

import jax
import jax.numpy as jnp

from jaxgpt.config import UserError
from jaxgpt.decoding import filters


class History(NamedTuple):
    """The tokens so far.

    Attributes:
        ids_BS: int32, every row's last one at `length - 1`.
        start_B: int32, the slot of each row's first.
        length: int32 scalar, slots in use.
    """

    ids_BS: jax.Array
    start_B: jax.Array
    length: jax.Array

    def seen_BS(self) -> jax.Array:  # noqa: N802
        """Which slots hold tokens."""
        slot_S = jnp.arange(self.ids_BS.shape[1])
        return (slot_S[None, :] >= self.start_B[:, None]) & (slot_S < self.length)[None, :]


@dataclass(frozen=True)
class Policy:
    """How the next token is chosen. The order of the filters is transformers', not that of the fields: see `stages`.

    Attributes:
        temperature: logits are divided by it; 0: always the likeliest.
        top_k: only the k likeliest; 0: all.
        top_p: only the likeliest that together reach this probability; 1: all.
        min_p: only what is at least so many times as likely as the likeliest; 0: all.
        repetition_penalty: what was said before is made less likely by it; 1: off.
        no_repeat_ngram_size: so many tokens in a row never come twice; 0: off.
    """

    temperature: float = 1.0
    top_k: int = 0
    top_p: float = 1.0
    min_p: float = 0.0
    repetition_penalty: float = 1.0
    no_repeat_ngram_size: int = 0

    def __post_init__(self) -> None:
        # Written so that a NaN fails every one of them.
        if not 0 <= self.temperature < math.inf:
            raise UserError(f"temperature must be a number of at least 0, not {self.temperature}")
        if self.top_k < 0:
            raise UserError(f"top-k must be at least 0 (0: all), not {self.top_k}")
        for name, value in (("top-p", self.top_p), ("min-p", self.min_p)):
            if not 0 <= value <= 1:
                raise UserError(f"{name} must be between 0 and 1, not {value}")
        if not 0 < self.repetition_penalty < math.inf:
            raise UserError(f"repetition-penalty must be above 0 (1: off), not {self.repetition_penalty}")
        if self.no_repeat_ngram_size < 0:
            raise UserError(f"no-repeat-ngram-size must be at least 0 (0: off), not {self.no_repeat_ngram_size}")

    @property
    def draws(self) -> bool:
        """Whether chance has a say."""
        return self.temperature > 0


def stages(logits_BV: jax.Array, history: History, policy: Policy) -> Iterator[tuple[str, jax.Array]]:
    """The logits after each rule that is on, with its name, in transformers' order: repetition penalty, n-grams,
    temperature, top-k, top-p, min-p."""
    p = policy
    if p.repetition_penalty != 1:
        seen_BS = history.seen_BS()
        logits_BV = filters.penalize_repeats(logits_BV, history.ids_BS, seen_BS, p.repetition_penalty)
        yield f"repetition penalty {p.repetition_penalty:g}", logits_BV
    if p.no_repeat_ngram_size:
        logits_BV = filters.forbid_repeated_ngrams(
            logits_BV, history.ids_BS, history.seen_BS(), history.length, p.no_repeat_ngram_size
        )
        yield f"no-repeat n-gram {p.no_repeat_ngram_size}", logits_BV
    if p.temperature == 0:
        yield "greedy", filters.keep_likeliest(logits_BV)
        return
    if p.temperature != 1:
        logits_BV = logits_BV / p.temperature
        yield f"temperature {p.temperature:g}", logits_BV
    if p.top_k:
        logits_BV = filters.keep_top_k(logits_BV, p.top_k)
        yield f"top-k {p.top_k}", logits_BV
    if p.top_p < 1:
        logits_BV = filters.keep_top_p(logits_BV, p.top_p)
        yield f"top-p {p.top_p:g}", logits_BV
    if p.min_p > 0:
        logits_BV = filters.keep_min_p(logits_BV, p.min_p)
        yield f"min-p {p.min_p:g}", logits_BV


def warp(logits_BV: jax.Array, history: History, policy: Policy) -> jax.Array:
    """Logits after all rules; what may not be chosen is -inf. Float32 `[B, V]` in and out."""
    for _, warped_BV in stages(logits_BV, history, policy):
        logits_BV = warped_BV
    return logits_BV


def uniform(key_B: jax.Array, index: jax.typing.ArrayLike) -> jax.Array:
    """The random number with which token `index` of each row is drawn, `[B]` in [0, 1)."""
    return jax.vmap(lambda key: jax.random.uniform(jax.random.fold_in(key, index)))(key_B)


def choose(logits_BV: jax.Array, history: History, key_B: jax.Array, index: jax.Array, policy: Policy) -> jax.Array:
    """The next id of each row, int32 `[B]`, every row with a key of its own: no row depends on its company.

    One random number a token decides: the id where the running sum of the probabilities first exceeds it. So a choice can
    be told and checked by hand, and costs one number, not one for every id of the vocabulary.
    """
    warped_BV = warp(logits_BV, history, policy)
    if not policy.draws:
        return jnp.argmax(warped_BV, axis=-1).astype(jnp.int32)
    return filters.draw(warped_BV, uniform(key_B, index))
