"""Why this token: what each rule removed, and the number that decided."""

from __future__ import annotations

from typing import NamedTuple

import jax
import numpy as np

from jaxgpt.decoding import filters
from jaxgpt.decoding.policy import History, Policy, stages, uniform


class Stage(NamedTuple):
    """One rule at work.

    Attributes:
        name: the rule and its setting.
        removed: ids that it forbade.
        removed_mass: probability that they had before it, of 1 among what was left by then.
        moved_mass: probability that went from some of the other ids to others, half the sum of the changes.
        left: ids that may still be chosen.
    """

    name: str
    removed: int
    removed_mass: float
    moved_mass: float
    left: int


class Choice(NamedTuple):
    """How one token was chosen.

    Attributes:
        stages: the rules, in order.
        probability_V: of each id after all of them, float64, sum 1.
        uniform: the random number; None where nothing is drawn.
        before: sum of the probabilities of all ids before the chosen one; it was taken because the random number lies
            between this and `before + probability_V[token]`.
        token: the chosen id.
        key: of the row, as numbers; folded with the token's index it gives the random number again.
    """

    stages: list[Stage]
    probability_V: np.ndarray
    uniform: float | None
    before: float
    token: int
    key: list[int]


def explain(logits_1V: jax.Array, history: History, policy: Policy, key: jax.Array, index: int = 0) -> Choice:
    """Choose as `choose` does, and tell how.

    Args:
        logits_1V: of one row.
        history: its tokens so far.
        policy: the rules.
        key: of the row.
        index: which of its tokens this is, from 0.
    """
    before_V = _probability(logits_1V)
    told = []
    for name, logits_1V in stages(logits_1V, history, policy):  # noqa: B020
        after_V = _probability(logits_1V)
        gone_V = (before_V > 0) & np.isneginf(np.asarray(logits_1V)[0])
        lost = float(before_V[gone_V].sum())
        kept_V = np.where(gone_V, 0.0, before_V)
        moved = float(np.abs(after_V - kept_V / max(kept_V.sum(), 1e-300)).sum() / 2)
        told.append(Stage(name, int(gone_V.sum()), lost, moved, int((after_V > 0).sum())))
        before_V = after_V
    number = uniform(key[None], index) if policy.draws else None
    token = int(before_V.argmax() if number is None else filters.draw(logits_1V, number)[0])
    return Choice(
        told,
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
