"""Explain how a token was chosen: what each filter removed, and the random number that decided."""

from __future__ import annotations

from typing import NamedTuple

import jax
import numpy as np

from jaxgpt.config import SamplingParams, UserError
from jaxgpt.decoding import filters
from jaxgpt.decoding.sampling import DIVERGED, TokenBuffer, row_uniform, stages


class Stage(NamedTuple):
    """The effect of one filter.

    Attributes:
        name: the filter and its setting.
        removed: number of tokens that it forbade.
        removed_mass: their total probability before it.
        moved_mass: probability that moved between the remaining tokens, half the sum of the changes.
        left: number of tokens that remain.
    """

    name: str
    removed: int
    removed_mass: float
    moved_mass: float
    left: int


class Choice(NamedTuple):
    """How one token was chosen.

    Attributes:
        stages: the filters, in order.
        probability_V: of each token after all of them, float64, sum 1.
        uniform: the random number; None where nothing is drawn.
        before: total probability of the tokens with smaller ids; the token was taken because the random number lies between
            this and `before + probability_V[token]`.
        token: the chosen id.
        key: the row's key, as numbers; folded with the token's index it gives the random number again.
    """

    stages: list[Stage]
    probability_V: np.ndarray
    uniform: float | None
    before: float
    token: int
    key: list[int]


def explain(
    logits_1V: jax.Array, text: TokenBuffer, sampling: SamplingParams, key: jax.Array, index: int = 0
) -> Choice:
    """Choose a token as `sample_token` does, and record how.

    Args:
        logits_1V: of one row.
        text: its tokens so far.
        sampling: how the token is chosen.
        key: of the row.
        index: the token's place among the new ones, from 0.

    Raises:
        UserError: a logit is NaN, or every token is forbidden.
    """
    if np.isnan(np.asarray(logits_1V)).any():
        raise UserError(DIVERGED)
    before_V = _probability(logits_1V)
    effects = []
    for name, logits_1V in stages(logits_1V, text, sampling):  # noqa: B020
        if np.isneginf(np.asarray(logits_1V)).all():
            raise UserError(f"{name} forbids every token: lower no-repeat-ngram-size or use 0, which disables it")
        after_V = _probability(logits_1V)
        gone_V = (before_V > 0) & np.isneginf(np.asarray(logits_1V)[0])
        lost = float(before_V[gone_V].sum())
        kept_V = np.where(gone_V, 0.0, before_V)
        moved = float(np.abs(after_V - kept_V / max(kept_V.sum(), 1e-300)).sum() / 2)
        effects.append(Stage(name, int(gone_V.sum()), lost, moved, int((after_V > 0).sum())))
        before_V = after_V
    number = row_uniform(key[None], index) if sampling.draws else None
    token = int(before_V.argmax() if number is None else filters.inverse_cdf_sample(logits_1V, number)[0])
    return Choice(
        effects,
        before_V,
        None if number is None else float(number[0]),
        float(before_V[:token].sum()),
        token,
        [int(x) for x in jax.random.key_data(key).reshape(-1)],
    )


def _probability(logits_1V: jax.Array) -> np.ndarray:
    logits_V = np.asarray(logits_1V, np.float64)[0]
    weight_V = np.exp(logits_V - logits_V.max())
    out: np.ndarray = weight_V / weight_V.sum()
    return out
