"""The best evaluation of a run, and early stopping after evaluations without a new best (`train.patience`)."""

from __future__ import annotations

import math
from typing import Any, NamedTuple

from jaxgpt.checkpoint.info import About, Info
from jaxgpt.config import TrainConfig


class Best(NamedTuple):
    """The best evaluation of a run so far.

    Attributes:
        ranking: the lowest ranking; infinite if no evaluation has a finite ranking.
        step: number of steps taken before this evaluation; not used if the ranking is infinite.
        since: number of evaluations after this evaluation; all evaluations so far if the ranking is infinite.
    """

    ranking: float = math.inf
    step: int = 0
    since: int = 0

    def after(self, step: int, ranking: float) -> Best:
        """Return the best evaluation after a further evaluation; a non-finite ranking is never the best."""
        if math.isfinite(ranking) and ranking < self.ranking:
            return Best(ranking, step)
        return self._replace(since=self.since + 1)

    def about(self) -> About:
        """Return the entries of the best evaluation in a checkpoint's `Info.about`."""
        if math.isinf(self.ranking):
            return {"since_best": self.since}
        return {"best": (self.ranking, self.step), "since_best": self.since}


def best_before(first: Info, fingerprint: Any, ranked_by: str) -> Best:
    """Return the best evaluation up to the checkpoint that a run resumes from.

    After a change of the data or of the first evaluator, rankings are not comparable: the result is then `Best()`.

    Args:
        first: the checkpoint; `Info(0)` for a new run.
        fingerprint: fingerprint of the run's data.
        ranked_by: name of the run's first evaluator, as `Info.ranked_by`.
    """
    has_same_data = first.about.get("data", fingerprint) == fingerprint
    has_same_ranking = first.ranked_by in (None, ranked_by)
    if not (has_same_data and has_same_ranking):
        return Best()
    best = Best(since=evaluations_since_best(first))
    if "best" not in first.about:
        return best
    ranking, step = first.about["best"]
    return best._replace(ranking=ranking, step=step)


def evaluations_since_best(info: Info) -> int:
    """Return the number of evaluations after the best evaluation, up to a checkpoint."""
    if "since_best" in info.about:
        return info.about["since_best"]
    if "best" not in info.about:
        return 0
    # Older versions did not record the number: count the multiples of `train.eval_every` after the best step.
    _, best_step = info.about["best"]
    every = info.config().train.eval_every
    evaluated = info.step if info.ranking is not None else info.step - 1
    return int(evaluated // every - best_step // every)


def is_out_of_patience(since_best: int, train: TrainConfig) -> bool:
    """Return whether `since_best` evaluations after the best evaluation end a run; False if `train.patience` is 0."""
    return 0 < train.patience <= since_best
