"""Report: the events of a run, for progress lines, trackers and tests."""

from __future__ import annotations

from typing import NamedTuple

from jaxgpt.checkpoint.run import Run
from jaxgpt.data import Data
from jaxgpt.train.step import TrainState
from jaxgpt.trainer.evaluation import Result
from jaxgpt.trainer.program import Program


class Outcome(NamedTuple):
    """Result of a run.

    Attributes:
        state: the final state.
        step: steps taken, including steps before a resume.
        evaluation: the last result of the first evaluator since the start or resume; None: no evaluation.
        stopped: whether the run ended before its last step and evaluation, unless ended by `train.patience`.
    """

    state: TrainState
    step: int
    evaluation: Result | None
    stopped: bool


class Report:
    """Receives the events of a run, in every process, and ignores them. A subclass overrides the events that it uses."""

    def started(self, program: Program, data: Data, run: Run, step: int) -> None:
        """Called before the train step is compiled; training starts or resumes at `step`."""

    def stage(self, name: str, done: int = 0, total: int = 0) -> None:
        """Called when a stage such as "evaluating" starts or advances; `name` is "" when it ends."""

    def compiled(self, seconds: float) -> None:
        """Called when the step is compiled and the state exists, `seconds` after compilation started."""

    def progress(self, metrics: dict[str, float]) -> None:
        """Called for every step, once its metrics have been read.

        Args:
            metrics: as in metrics.jsonl, and `seconds_left`. Unknown speeds and times are omitted.
        """

    def evaluated(self, step: int, result: Result) -> None:
        """Called with the result of each evaluator, in their order."""

    def note(self, text: str) -> None:
        """Called with a one-line message for the user."""

    def finished(self, outcome: Outcome) -> None:
        """Called at the end of a run that did not fail, even if it was stopped."""

    def failed(self, error: BaseException) -> None:
        """Called if an error ends the run, also before `started`."""


class Reports(Report):
    """Passes each event to several reports, in their order."""

    def __init__(self, *reports: Report) -> None:
        self.reports = reports

    def started(self, program: Program, data: Data, run: Run, step: int) -> None:
        for report in self.reports:
            report.started(program, data, run, step)

    def stage(self, name: str, done: int = 0, total: int = 0) -> None:
        for report in self.reports:
            report.stage(name, done, total)

    def compiled(self, seconds: float) -> None:
        for report in self.reports:
            report.compiled(seconds)

    def progress(self, metrics: dict[str, float]) -> None:
        for report in self.reports:
            report.progress(dict(metrics))

    def evaluated(self, step: int, result: Result) -> None:
        for report in self.reports:
            report.evaluated(step, result)

    def note(self, text: str) -> None:
        for report in self.reports:
            report.note(text)

    def finished(self, outcome: Outcome) -> None:
        for report in self.reports:
            report.finished(outcome)

    def failed(self, error: BaseException) -> None:
        for report in self.reports:
            report.failed(error)
