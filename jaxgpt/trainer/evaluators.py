"""Evaluators: the state of the run that they receive, and their results."""

from __future__ import annotations

import math
from collections.abc import Callable, Mapping, Sequence
from concurrent.futures import Future
from dataclasses import dataclass
from typing import Any, NamedTuple, Protocol, runtime_checkable

from jaxgpt.data import Data
from jaxgpt.progress import NO_PROGRESS, Progress
from jaxgpt.trainer.program import Program


class Result(Protocol):
    """The result of an evaluator."""

    @property
    def metrics(self) -> Mapping[str, float]:
        """Numbers for `metrics.jsonl`; NaN and infinities are omitted from the file."""
        ...

    @property
    def ranking(self) -> float:
        """The value that ranks checkpoints; lower is better. A run uses the ranking of its first evaluator.

        The ranking selects the best checkpoint, and ends the run after `train.patience` evaluations without a new best.
        A checkpoint with a non-finite ranking has no rank.
        """
        ...


class Watch(NamedTuple):
    """The state of the run that an evaluator may need.

    Attributes:
        final: whether this is the last evaluation of the run, which may take longer.
        step: number of steps taken.
        data: the data of the run; None: no data, as outside a run (`NO_RUN`).
        interrupted: called between batches, with equal results in all processes; True: stop and return None.
        progress: called with the number of evaluated examples and the total.
        wait: waits for a batch, but may return earlier, for example on a signal; call `interrupted` next.
    """

    final: bool = True
    step: int = 0
    data: Data | None = None
    interrupted: Callable[[], bool] = lambda: False
    progress: Progress = NO_PROGRESS
    wait: Callable[[Future[Any]], None] = lambda future: None


NO_RUN = Watch()  # state of an evaluation outside a run


class Measured(NamedTuple):
    """The result of a custom evaluator: numbers by name, and a ranking (NaN: no rank), which only the first evaluator needs."""

    metrics: Mapping[str, float]
    ranking: float = math.nan

    def __str__(self) -> str:
        """Format the numbers as `accuracy 0.9062, reward 0.8125`."""
        return ", ".join(f"{name} {value:.4g}" for name, value in self.metrics.items())


# An evaluator maps (program, params, watch) to a result, or None if interrupted. `params` are the `eval_params` of a state, on
# their devices. Examples: the loss on a split, the score of a task, a mean reward.
Evaluator = Callable[[Program, Any, Watch], Result | None]


@runtime_checkable
class NamedRanking(Protocol):
    """An evaluator whose ranking has a name.

    Attributes:
        ranks_by: the name, such as "loss" or "reward". Other evaluators are named by their function or class.
    """

    ranks_by: str


def run_evaluators(evaluators: Sequence[Evaluator], program: Program, params: Any, watch: Watch) -> list[Result] | None:
    """Return the result of each evaluator, in their order; None if an evaluation was interrupted."""
    results = []
    for evaluator in evaluators:
        result = evaluator(program, params, watch)
        if result is None:
            return None
        results.append(result)
    return results


@dataclass(frozen=True)
class Every:
    """An expensive evaluator, which is called at fewer evaluations than the others.

    Attributes:
        evaluator: evaluator to call. It cannot be the first evaluator of a run, which ranks the checkpoints.
        steps: call it after every multiple of this number of steps, and at the last evaluation; 0: only at the last evaluation.
    """

    evaluator: Evaluator
    steps: int

    def __call__(self, program: Program, params: Any, watch: Watch) -> Result | None:
        """Call the evaluator if it is due; otherwise, return a result without numbers."""
        is_due = watch.final or bool(self.steps and watch.step % self.steps == 0)
        if not is_due:
            return Measured({})
        return self.evaluator(program, params, watch)
