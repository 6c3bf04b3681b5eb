"""Calls: split the steps of a run into jitted calls. A call ends at each evaluation and checkpoint."""

from __future__ import annotations

from collections.abc import Iterator

from jaxgpt.checkpoint.info import Info
from jaxgpt.config import TrainConfig
from jaxgpt.errors import UserError


def plan_calls(last: Info | None, until: int | None, train: TrainConfig, whole: bool = False) -> Iterator[range]:
    """Yield the steps of each call: up to `train.steps_per_call`, ending at evaluations and checkpoints.

    The steps begin after the checkpoint `last`, and end at `until` (None: the last step of the run). The first step is a
    separate call, so that the measured speed excludes its overhead. An empty range comes first if the checkpoint still
    needs its evaluation, for example after a stop during the evaluation.

    With `whole`, every call takes exactly `train.steps_per_call` steps: the batches depend on the state before the call.

    Raises:
        UserError: with `whole`, if the first step, an evaluation, a checkpoint or the end is inside a call.
    """
    first = last.step if last else 0
    end = train.steps if until is None else min(until, train.steps)
    if first and last and last.ranking is None and is_evaluated(first, train):
        yield range(first, first)
    if whole:
        _check_whole(first, end, train)

    intervals = [every for every in (train.eval_every, train.checkpoint_every) if every]
    size = train.steps_per_call if whole else 1
    start = first
    while start < end:
        # No call contains a multiple of an interval, except at its end.
        next_multiples = [(start // every + 1) * every for every in intervals]
        stop = min(start + size, end, *next_multiples)
        yield range(start, stop)
        start = stop
        size = train.steps_per_call


def _check_whole(first: int, end: int, train: TrainConfig) -> None:
    """Raise `UserError` if the first step, an evaluation, a checkpoint or the end would be inside a call."""
    size = train.steps_per_call
    ends = {
        "the first step": first,
        "the last step": end,
        "train.eval_every": train.eval_every,
        "train.checkpoint_every": train.checkpoint_every,
    }
    for name, value in ends.items():
        if value % size:
            raise UserError(
                f"{name} ({value}) must be a multiple of train.steps_per_call ({size}), the steps of a rollout"
            )


def is_evaluated(done: int, train: TrainConfig) -> bool:
    """Return whether the model is evaluated after `done` steps."""
    return done % train.eval_every == 0 or done == train.steps


def is_saved(done: int, train: TrainConfig) -> bool:
    """Return whether `train.checkpoint_every` requests a checkpoint after `done` steps, even without an evaluation."""
    return bool(train.checkpoint_every) and done % train.checkpoint_every == 0
