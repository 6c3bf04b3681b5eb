"""Report: the events of a run, for progress lines, trackers and tests."""

from __future__ import annotations

from typing import Protocol

from jaxgpt.checkpoint.run import Run
from jaxgpt.data import Data
from jaxgpt.trainer.evaluation import Evaluation
from jaxgpt.trainer.program import Program


class Report(Protocol):
    """Receives the events of a run, in every process. A subclass overrides the events that it uses."""

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

    def evaluated(self, step: int, result: Evaluation) -> None:
        """Called after an evaluation."""

    def note(self, text: str) -> None:
        """Called with a one-line message for the user."""
