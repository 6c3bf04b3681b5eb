"""Evaluation of the state during a run: evaluators, metrics, checkpoint."""

from __future__ import annotations

import time
from collections.abc import Sequence
from dataclasses import dataclass

from jaxgpt.data import Data
from jaxgpt.heap import trim_memory
from jaxgpt.train.step import TrainState
from jaxgpt.trainer.evaluators import Evaluator, Watch, run_evaluators
from jaxgpt.trainer.events import StageProgress
from jaxgpt.trainer.failures import evaluating
from jaxgpt.trainer.monitor import Monitor
from jaxgpt.trainer.record import Recorder
from jaxgpt.trainer.saving import Checkpoints, RunRequest


@dataclass(frozen=True)
class Evaluate:
    """Evaluates the state after a step: runs the evaluators, writes their metrics, and saves a checkpoint.

    Attributes:
        evaluators: evaluators of the run, called in this order; the first ranks the checkpoints.
        record: receives the metrics.
        checkpoints: receives the state and its ranking.
        data: data of the run.
        monitor: waits for batches, and has the request to stop.
    """

    evaluators: Sequence[Evaluator]
    record: Recorder
    checkpoints: Checkpoints
    data: Data
    monitor: Monitor

    def __call__(self, state: TrainState) -> bool:
        """Evaluate and save a state; return False, without saving the state, if the evaluation was interrupted."""
        record = self.record
        record.read()  # error if the run has diverged
        began = time.perf_counter()
        watch = Watch(
            final=record.step == record.config.train.steps,
            step=record.step,
            data=self.data,
            interrupted=self._is_interrupted,
            progress=StageProgress(record.listener, "evaluating"),
            wait=self.monitor.wait,
        )
        with evaluating(record.program, record.step):
            results = run_evaluators(self.evaluators, record.program, state.eval_params, watch)
        if results is None:
            return False

        record.listener.stage("")
        record.evaluation(results, self.data.fingerprint)
        self.checkpoints.evaluation(state, float(results[0].ranking))
        trim_memory()  # otherwise the heap grows with every evaluation and checkpoint
        record.speed.exclude(time.perf_counter() - began)
        return True

    def _is_interrupted(self) -> bool:
        """Return whether any process has received a request to stop."""
        return self.checkpoints.ask(self.monitor.stop.requested) == RunRequest.STOP
