"""Profile some steps of a run: a listener for `train`, in a script or `jaxgpt train --profile`."""

from __future__ import annotations

from collections.abc import Callable
from contextlib import ExitStack, suppress
from dataclasses import dataclass, field
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

WARM_UP = 3  # steps before the trace: the first ones compile, and fill the queue of the devices


class Profile(Listener):
    """Traces `steps` steps of a run after `WARM_UP` steps, in process 0, and writes the files to RUN/profile.

    The trace starts and stops when the metrics of a step have been read, so the run is not blocked: the devices compute the
    next steps meanwhile. Evaluations and checkpoints between these steps are in the trace.

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
        self._directory = Path(PROFILE)
        self._per_call = 1  # steps of a call
        self._seen = 0  # steps whose metrics have been read
        self._trace: _Trace | None = None  # the trace in progress
        self._is_done = not is_leader()

    def started(self, program: Program, data: Data, run: Run, step: int) -> None:
        self._directory = run.path / PROFILE
        self._per_call = program.config.train.steps_per_call

    def progress(self, metrics: dict[str, float]) -> None:
        step = int(metrics["step"])
        self._seen += 1
        if self._is_done:
            return
        if self._trace is None:
            if self._seen >= WARM_UP:
                self._start(step)
            return

        self._trace.last = step
        if self._trace.complete_steps >= self.steps:
            self._stop(self._trace)
        else:
            self._trace.name_step(step + 1)

    def finished(self, outcome: Outcome) -> None:
        self._end_early()

    def failed(self, error: BaseException) -> None:
        self._end_early()

    def _start(self, step: int) -> None:
        """Start the trace after the metrics of `step` have been read."""
        options = jax.profiler.ProfileOptions()
        options.python_tracer_level = 0
        try:
            jax.profiler.start_trace(self._directory, create_perfetto_trace=True, profiler_options=options)
        except Exception as e:
            self._give_up(e)
            return
        # The metrics of a call are read after its last step, so no step of this call is in the trace.
        self._trace = _Trace(first=step + self._per_call, last=step)
        self._trace.name_step(step + 1)

    def _stop(self, trace: _Trace) -> None:
        """Stop the trace, write its files, and report them."""
        self._trace = None
        self._is_done = True
        trace.annotation.close()
        try:
            jax.profiler.stop_trace()
        except Exception as e:
            self._give_up(e)
            return
        if trace.complete_steps == 0:
            self._note_too_short()
            return

        file = newest(self._directory)
        with suppress(Exception):  # after an error, the trace has no names of layers
            [xplane] = file.parent.glob("*.xplane.pb")
            name_layers(file, xplane)
        steps = plural(trace.complete_steps, "step")
        self._note(f"wrote a trace of {steps}: xprof {self._directory}, or {file}")

    def _end_early(self) -> None:
        """Keep the steps traced so far, if the run ends before the trace is complete."""
        if self._is_done:
            return
        if self._trace is not None:
            self._stop(self._trace)
            return
        self._is_done = True
        self._note_too_short()

    def _note_too_short(self) -> None:
        steps_before = WARM_UP + self._per_call - 1
        self._note(f"no profile: the run took {plural(self._seen, 'step')}, and a trace starts after {steps_before}")

    def _give_up(self, error: Exception) -> None:
        self._is_done = True
        with suppress(Exception):
            jax.profiler.stop_trace()
        self._note(f"no profile: {type(error).__name__}: {one_line(error, 300)}")


@dataclass
class _Trace:
    """The steps of a trace in progress, and the annotation of the present step on the host.

    Attributes:
        first: the first step that is complete in the trace.
        last: the last step whose metrics have been read.
        annotation: context of the annotation.
    """

    first: int
    last: int
    annotation: ExitStack = field(default_factory=ExitStack)

    @property
    def complete_steps(self) -> int:
        """Number of complete steps in the trace so far."""
        return max(self.last + 1 - self.first, 0)

    def name_step(self, step: int) -> None:
        """End the annotation of a step, and begin the next one."""
        self.annotation.close()
        self.annotation.enter_context(jax.profiler.StepTraceAnnotation("train", step_num=step))


def newest(directory: Path) -> Path:
    """Return the last trace for Perfetto, or the directory if it has no trace."""
    files = directory.rglob("perfetto_trace.json.gz")
    return max(files, key=lambda file: file.stat().st_mtime, default=directory)
