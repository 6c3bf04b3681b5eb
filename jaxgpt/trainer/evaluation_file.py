"""The listener that writes evaluation.json; `windows.py` defines the file."""

from __future__ import annotations

from pathlib import Path

import numpy as np

from jaxgpt.checkpoint.run import Run
from jaxgpt.data import Data
from jaxgpt.data.batches import Windows
from jaxgpt.parallel.processes import is_leader
from jaxgpt.trainer.evaluators import Result
from jaxgpt.trainer.events import Listener
from jaxgpt.trainer.mean_loss import Evaluation
from jaxgpt.trainer.program import Program
from jaxgpt.trainer.windows import MOST_WINDOWS, WindowLosses, digest, write_windows


class EvaluationFile(Listener):
    """Writes the loss of each window to evaluation.json in the run, replacing the file after each evaluation.

    Evaluations of more than `MOST_WINDOWS` windows are not written.
    """

    def __init__(self) -> None:
        self._path: Path | None = None  # directory of the run
        self._step = -1  # step of the last evaluation in the file
        self._rows: Windows | None = None  # the windows of the last digest
        self._digest = ""

    def started(self, program: Program, data: Data, run: Run, step: int) -> None:
        self._path = run.path
        self._step = -1  # a listener may be reused for a different run

    def evaluated(self, step: int, result: Result) -> None:
        assert self._path is not None, "a run has started"
        if not isinstance(result, Evaluation) or result.rows is None or result.windows > MOST_WINDOWS:
            return
        if step == self._step or not is_leader():  # written after an earlier evaluator, or by process 0
            return
        self._step = step
        losses = WindowLosses(self._digest_of(result.rows), result.sums, result.counts)
        write_windows(self._path, step, result.loss, losses)

    def _digest_of(self, rows: Windows) -> str:
        """Return the digest of windows; read their tokens only if they differ from the previous windows."""
        last = self._rows
        is_known = last is not None and last.split is rows.split and np.array_equal(last.starts_B, rows.starts_B)
        if not is_known:
            self._digest = digest(rows)
            self._rows = rows
        return self._digest
