"""Recorder: check and write the metrics of each step."""

from __future__ import annotations

import math
import time
from collections import deque
from collections.abc import Callable, Iterator, Sequence
from concurrent.futures import Future
from contextlib import contextmanager, suppress
from typing import Any, NamedTuple

import jax

from jaxgpt.checkpoint.info import Info
from jaxgpt.config_changes import changes
from jaxgpt.counts import flops_per_token
from jaxgpt.parallel.chips import peak_flops
from jaxgpt.provenance import provenance
from jaxgpt.trainer.divergence import Diverged, check_step, skip_note
from jaxgpt.trainer.evaluators import Result
from jaxgpt.trainer.events import Listener, StatusWithoutErrors
from jaxgpt.trainer.metrics import MetricsFile
from jaxgpt.trainer.program import Program
from jaxgpt.trainer.speed import CallSpeed, Speed
from jaxgpt.trainer.step_metrics import metrics_of_steps, numbers

LAG = 2  # number of later calls dispatched before blocking on the metrics of a call


class _Ended(NamedTuple):
    """A step that has ended: its metrics, on the host, and the speed at the end of its call."""

    step: int
    metrics: dict[str, Any]
    speed: CallSpeed


class Recorder:
    """Reads the metrics of each step `LAG` calls later, checks them and writes them.

    `last` is the checkpoint that training resumes from; None: train from step 0.

    Attributes:
        listener: receiver of the metrics, and of stages and notes of `Checkpoints`.
        first: the checkpoint that training resumes from; `Info(0)` for a new run.
        step: number of steps taken, including steps in flight.
        checked_step: number of steps whose metrics have been read and checked.
        result: result of the first evaluator in the last evaluation since the start or resume; None: no evaluation.
        speed: recent speed of training.
    """

    def __init__(self, program: Program, file: MetricsFile, listener: Listener, last: Info | None) -> None:
        config = program.config
        self.program = program
        self.config = config
        self.file = file
        self.listener = listener
        self.first = last or Info(0)
        self.step = self.first.step
        self.checked_step = self.step
        self.result: Result | None = None

        flops = flops_per_token(program.model, program.abstract.weights, config.window, config.lora)
        peak = peak_flops(program.mesh)
        self.speed = Speed(config, flops / peak if peak else 0.0)
        self._began = time.perf_counter() - file.elapsed_seconds
        self._waited = 0.0  # seconds waited for data since the last line

        self._in_flight: deque[tuple[range, dict[str, jax.Array]]] = deque()  # steps and metrics of each call
        self._ended: deque[_Ended] = deque()  # steps whose metrics have not been checked

    def started(self, last: Info | None) -> None:
        """Write a line about this process, with the settings that differ from the checkpoint `last`."""
        changed = changes(last.config(), self.config) if last else {}
        self.file.write(step=self.step, **provenance(), changed=changed)

    @contextmanager
    def closing(self, is_stopped: Callable[[], bool]) -> Iterator[None]:
        """Context manager: close the metrics file at the end of the run.

        The last line records how the run ended, except after a KeyboardInterrupt. `is_stopped` returns whether a run without
        an error was stopped.
        """
        with self.file:
            try:
                yield
            except (Exception, SystemExit):
                with suppress(OSError):  # a full disk; the error of the run has precedence
                    self.file.end(self.checked_step, "failed")
                raise
            self.file.end(self.checked_step, "stopped" if is_stopped() else "finished")

    def add(self, steps: range, metrics: dict[str, jax.Array]) -> None:
        """Add the metrics of a call, and read the metrics of `LAG` calls ago; block on the first call."""
        self._in_flight.append((steps, metrics))
        self.step = steps.stop
        is_first = steps.start == self.first.step
        self.read(0 if is_first else LAG)

    def read(self, leave: int = 0) -> None:
        """Read, check and write the metrics of all calls in flight except the last `leave`."""
        self._write_ended()
        while len(self._in_flight) > leave:
            steps, arrays = self._in_flight.popleft()
            per_step = metrics_of_steps(arrays, len(steps))  # blocking until the call has ended
            speed = self.speed.call_ended(steps.stop)
            self._ended.extend(_Ended(step, values, speed) for step, values in zip(steps, per_step, strict=True))
            self._write_ended()

    def _write_ended(self) -> None:
        """Check the metrics of the ended steps; write those of every `train.log_every` steps and of the last step.

        If the listener raises an error, the next call continues after the last step that was checked.
        """
        train = self.config.train
        while self._ended:
            step, values, speed = self._ended[0]
            line = {
                "step": step,
                **self._checked(step, values),
                "tokens": self.tokens(step + 1),
                "elapsed_seconds": time.perf_counter() - self._began,
                **speed.metrics,
            }
            if step % train.log_every == 0 or step == train.steps - 1:
                line |= self._host_metrics()
                self._waited = 0.0
                self.file.write(**line)
            self._ended.popleft()
            self.checked_step = step + 1
            self.listener.progress(line | speed.estimates)

    def _checked(self, step: int, values: dict[str, Any]) -> dict[str, Any]:
        """Return the metrics of a step for the file, as numbers; report a skipped update.

        Raises:
            Diverged: as in `check_step`.
        """
        metrics = numbers({name: value for name, value in values.items() if name != "grad_squares"})
        skipped = int(metrics.pop("skipped_in_a_row", 0))
        if skipped:
            self.listener.note(skip_note(step, metrics, skipped))
        check_step(self.program, step, metrics, skipped, values["grad_squares"])
        return metrics

    def tolerate_listener(self) -> None:
        """Drop later exceptions of the listener, so that they cannot prevent a checkpoint."""
        self.listener = StatusWithoutErrors(self.listener)

    def waiting(self, wait: Callable[[Future[Any]], None]) -> Callable[[Future[Any]], None]:
        """Return a function that waits for data with `wait`, and counts the seconds for the next line of the metrics."""

        def timed(future: Future[Any]) -> None:
            began = time.perf_counter()
            wait(future)
            self._waited += time.perf_counter() - began

        return timed

    def _host_metrics(self) -> dict[str, float]:
        """Return the seconds waited for data since the last line, and the highest use of device memory, if known."""
        metrics = {"data_wait_seconds": self._waited}
        memory = peak_memory()
        if memory:
            metrics["device_memory_bytes"] = memory
        return metrics

    def evaluation(self, results: Sequence[Result], data: object) -> None:
        """Write the metrics of the evaluators on validation data with the fingerprint `data`, and report each result.

        Raises:
            Diverged: if the validation loss is non-finite.
        """
        metrics = {}
        for result in results:
            for name, value in result.metrics.items():
                metrics[name] = value if isinstance(value, (int, float)) else float(value)  # a NumPy or JAX scalar
        if not math.isfinite(metrics.get("val_loss", 0.0)):
            raise Diverged(f"validation loss is {metrics['val_loss']} at step {self.step}")
        self.file.write(step=self.step, **metrics, val_data=data)
        self.result = results[0]
        for result in results:
            self.listener.evaluated(self.step, result)

    def tokens(self, done: int) -> int:
        """Return the number of tokens in the windows of `done` steps, even if a resume changed the batch size."""
        tokens_per_step = self.config.train.batch_size * self.config.row_tokens
        return self.first.tokens + (done - self.first.step) * tokens_per_step


def peak_memory() -> int:
    """Return the highest use of memory of a local device so far, in bytes; 0 if the platform does not measure it."""
    peaks = [0]
    for device in jax.local_devices():
        measured = device.memory_stats() or {}
        peaks.append(measured.get("peak_bytes_in_use", 0))
    return max(peaks)
