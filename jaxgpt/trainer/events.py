"""Events of a run, and the listeners that receive them: progress lines, trackers, tests."""

from __future__ import annotations

from contextlib import suppress
from typing import NamedTuple

from jaxgpt.checkpoint.run import Run
from jaxgpt.data import Data
from jaxgpt.errors import one_line
from jaxgpt.exception_notes import add_own_note
from jaxgpt.progress import Progress
from jaxgpt.train.step import TrainState
from jaxgpt.trainer.evaluators import Result
from jaxgpt.trainer.program import Program


class Outcome(NamedTuple):
    """Result of a run.

    Attributes:
        state: the final state.
        step: steps taken, including steps before a resume.
        evaluation: the last result of the first evaluator since the start or resume; None: no evaluation.
        stopped: whether the run ended before its last step and evaluation; False after early stopping (`train.patience`).
    """

    state: TrainState
    step: int
    evaluation: Result | None
    stopped: bool

    def __repr__(self) -> str:
        """Format the outcome in one line, without the arrays of its state."""
        ended = "stopped" if self.stopped else "finished"
        return f"<Outcome: {ended} at step {self.step}, evaluation {self.evaluation}>"


class Listener:
    """Receives the events of a run, in every process, and ignores them. A subclass overrides the events that it uses."""

    def opened(self, program: Program, data: Data, step: int) -> None:
        """Called before the run is created or reopened, to start or resume at `step`. Raise `UserError` to reject the run."""

    def started(self, program: Program, data: Data, run: Run, step: int) -> None:
        """Called before the train step is compiled; training starts or resumes at `step`."""

    def stage(self, name: str, done: int = 0, total: int = 0) -> None:
        """Called when a stage such as "evaluating" starts or advances; `name` is "" when it ends."""

    def compiled(self, seconds: float) -> None:
        """Called when the step is compiled and the state exists, `seconds` after compilation started."""

    def progress(self, metrics: dict[str, float]) -> None:
        """Called for every step, once its metrics have been read.

        Args:
            metrics: as in metrics.jsonl, with lists for values of layers, and `seconds_left`. Unknown speeds and times are
                omitted.
        """

    def evaluated(self, step: int, result: Result) -> None:
        """Called with the result of each evaluator, in their order."""

    def note(self, text: str) -> None:
        """Called with a one-line message for the user."""

    def finished(self, outcome: Outcome) -> None:
        """Called at the end of a run that did not fail, even if it was stopped."""

    def failed(self, error: BaseException) -> None:
        """Called if an error ends the run, including before `started`. An exception here is added to the notes of the error."""


class StageProgress(Progress):
    """Passes the progress of a stage to a listener."""

    def __init__(self, listener: Listener, name: str) -> None:
        super().__init__(name)
        self.listener = listener

    def __call__(self, done: int, total: int, detail: str = "") -> None:
        self.listener.stage(self.name, done, total)


class StatusWithoutErrors(Listener):
    """Passes stages, metrics and notes to a listener, and drops its exceptions, so that they cannot prevent a checkpoint.

    Other events are not passed.
    """

    def __init__(self, listener: Listener) -> None:
        self.listener = listener

    def stage(self, name: str, done: int = 0, total: int = 0) -> None:
        with suppress(Exception):
            self.listener.stage(name, done, total)

    def progress(self, metrics: dict[str, float]) -> None:
        with suppress(Exception):
            self.listener.progress(metrics)

    def note(self, text: str) -> None:
        with suppress(Exception):
            self.listener.note(text)


class Listeners(Listener):
    """Passes each event to several listeners, in their order.

    Every method of `Listener` must be overridden here; otherwise, the listeners do not receive its event.
    """

    def __init__(self, *listeners: Listener) -> None:
        self.listeners = listeners

    def opened(self, program: Program, data: Data, step: int) -> None:
        for listener in self.listeners:
            listener.opened(program, data, step)

    def started(self, program: Program, data: Data, run: Run, step: int) -> None:
        for listener in self.listeners:
            listener.started(program, data, run, step)

    def stage(self, name: str, done: int = 0, total: int = 0) -> None:
        for listener in self.listeners:
            listener.stage(name, done, total)

    def compiled(self, seconds: float) -> None:
        for listener in self.listeners:
            listener.compiled(seconds)

    def progress(self, metrics: dict[str, float]) -> None:
        for listener in self.listeners:
            listener.progress(dict(metrics))  # a copy, which the listener may change

    def evaluated(self, step: int, result: Result) -> None:
        for listener in self.listeners:
            listener.evaluated(step, result)

    def note(self, text: str) -> None:
        for listener in self.listeners:
            listener.note(text)

    def finished(self, outcome: Outcome) -> None:
        for listener in self.listeners:
            listener.finished(outcome)

    def failed(self, error: BaseException) -> None:
        # The error of the run has precedence over errors of listeners, and every listener receives it.
        for listener in self.listeners:
            try:
                listener.failed(error)
            except Exception as e:
                name = type(listener).__name__
                add_own_note(error, f"{name}.failed raised {type(e).__name__}: {one_line(e, 200)}")
