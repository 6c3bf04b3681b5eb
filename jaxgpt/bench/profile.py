"""Profile some steps of a run: a listener for `train`, in a script or `jaxgpt train --profile`."""

from __future__ import annotations

from collections.abc import Callable
from contextlib import ExitStack, suppress
from pathlib import Path

import jax

from jaxgpt.bench.layers import name_layers
from jaxgpt.checkpoint.run import Run
from jaxgpt.data import Data
from jaxgpt.directories import PROFILE
from jaxgpt.errors import one_line, plural
from jaxgpt.parallel.processes import is_leader
from jaxgpt.trainer.events import Listener, Outcome
from jaxgpt.trainer.program import Program
from jaxgpt.trainer.record import LAG

WARM_UP = 3  # steps before the trace, during which the program is compiled and the queue of the devices is filled


class Profile(Listener):
    """Traces `steps` complete steps of a run after `WARM_UP` steps, in process 0, and writes the files to RUN/profile.

    The trace starts and stops when the metrics of a step have been read, so the run is not blocked: the devices compute the
    next steps meanwhile. The steps in flight at the start of the trace are not counted, because they may have started earlier.
    Evaluations and checkpoints between the steps are in the trace.

    plugins/profile/DATE/*.xplane.pb               for XProf: `xprof RUN/profile`
    plugins/profile/DATE/perfetto_trace.json.gz    for Perfetto, with the names of the layers

    An error of the profiler is reported in one line, and does not end the run.

    Args:
        steps: number of steps to trace.
        note: called with one-line messages.
    """

    def __init__(self, steps: int, note: Callable[[str], None] = print) -> None:
        self.steps = steps
        self._note = note
        self._tracer: _Tracer | None = None  # None: the run has not started, or another process traces it

    def started(self, program: Program, data: Data, run: Run, step: int) -> None:
        if is_leader():
            # The metrics of a step are read after all steps of its call, and with `LAG` later calls in flight.
            per_call = program.config.train.steps_per_call
            in_flight = per_call - 1 + LAG * per_call
            self._tracer = _Tracer(self.steps, run.path / PROFILE, in_flight, self._note)

    def progress(self, metrics: dict[str, float]) -> None:
        if self._tracer:
            self._tracer.step_ended(int(metrics["step"]))

    def finished(self, outcome: Outcome) -> None:
        if self._tracer:
            self._tracer.end()

    def failed(self, error: BaseException) -> None:
        if self._tracer:
            self._tracer.end()


class _Tracer:
    """Starts and stops the only trace of a run, and reports it."""

    def __init__(self, steps: int, directory: Path, in_flight: int, note: Callable[[str], None]) -> None:
        """Trace nothing until `WARM_UP` steps have ended.

        Args:
            steps: number of steps to trace.
            directory: directory for the files.
            in_flight: maximum number of later steps that may have started when the metrics of a step are read.
            note: called with one-line messages.
        """
        self._steps = steps
        self._directory = directory
        self._in_flight = in_flight
        self._note = note
        self._seen = 0  # steps whose metrics have been read
        self._trace: _Trace | None = None  # the trace, once it has started
        self._has_ended = False  # whether the trace has stopped or failed, or the run has ended

    def step_ended(self, step: int) -> None:
        """Start or stop the trace, if it is time, after the metrics of a step have been read."""
        self._seen += 1
        if self._has_ended:
            return
        if self._trace is not None:
            self._trace.step_ended(step)
            if self._trace.is_complete:
                self.end()
        elif self._seen >= WARM_UP:
            self._start(step)

    def _start(self, step: int) -> None:
        """Start the trace after the metrics of `step` have been read."""
        first = step + self._in_flight + 1  # the first step that begins after the start of the trace
        try:
            self._trace = _Trace(self._directory, range(first, first + self._steps))
        except Exception as e:
            self._has_ended = True
            self._note(_failure(e))

    def end(self) -> None:
        """Stop the trace, if any, and report the steps that it contains. Only the first call has an effect."""
        if self._has_ended:
            return
        self._has_ended = True
        try:
            steps = self._trace.stop() if self._trace else 0
        except Exception as e:
            self._note(_failure(e))
            return
        if steps == 0:
            not_traced = WARM_UP + self._in_flight
            self._note(
                f"no profile: the run took {plural(self._seen, 'step')}, and the first {not_traced} are not traced"
            )
            return

        file = newest(self._directory)
        with suppress(Exception):  # after an error, the trace has no names of layers
            [xplane] = file.parent.glob("*.xplane.pb")
            name_layers(file, xplane)
        self._note(f"wrote a trace of {plural(steps, 'step')}: xprof {self._directory}, or {file}")


class _Trace:
    """A trace in progress, with an annotation of each step on the host. The constructor starts the trace.

    Args:
        directory: directory for the files.
        steps: steps to trace.
    """

    def __init__(self, directory: Path, steps: range) -> None:
        options = jax.profiler.ProfileOptions()
        options.python_tracer_level = 0
        jax.profiler.start_trace(directory, create_perfetto_trace=True, profiler_options=options)
        self._steps = steps
        self._next = 0  # the first step whose metrics have not been read
        self._annotation = ExitStack()  # context of the annotation of this step

    @property
    def is_complete(self) -> bool:
        """Whether all steps to trace have ended."""
        return self._next >= self._steps.stop

    def step_ended(self, step: int) -> None:
        """End the annotation of a step whose metrics have been read, and begin the annotation of the next step."""
        self._next = step + 1
        self._annotation.close()
        if self._next in self._steps:
            self._annotation.enter_context(jax.profiler.StepTraceAnnotation("train", step_num=self._next))

    def stop(self) -> int:
        """Stop the trace, write its files, and return the number of steps that have ended."""
        self._annotation.close()
        jax.profiler.stop_trace()
        return max(self._next - self._steps.start, 0)


def _failure(error: Exception) -> str:
    """Return the message about an error of the profiler."""
    return f"no profile: {type(error).__name__}: {one_line(error, 300)}"


def newest(directory: Path) -> Path:
    """Return the last trace for Perfetto, or the directory if it has no trace."""
    files = directory.rglob("perfetto_trace.json.gz")
    return max(files, key=lambda file: file.stat().st_mtime, default=directory)
