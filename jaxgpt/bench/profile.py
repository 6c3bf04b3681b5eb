"""Profile some steps of a run: a listener for `train`, in a script or `jaxgpt train --profile`."""

from __future__ import annotations

from collections.abc import Callable
from contextlib import suppress
from pathlib import Path
from typing import Any

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
        self._seen = 0  # steps whose metrics have been read
        self._last = -1  # the last of these steps
        self._step_name: Any = None  # annotation of the present step; None: no trace
        self._end = -1  # step at which the trace stops
        self._is_done = not is_leader()

    def started(self, program: Program, data: Data, run: Run, step: int) -> None:
        self._directory = run.path / PROFILE
        self._per_call = program.config.train.steps_per_call

    def progress(self, metrics: dict[str, float]) -> None:
        step = int(metrics["step"])
        self._seen += 1
        self._last = step
        if self._is_done:
            return
        if self._step_name is None:
            if self._seen >= WARM_UP:
                self._start(step)
        elif step >= self._end:
            self._stop()
        else:
            self._name_step(step + 1)

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
        # The steps of a call are read together, after its last step: none of them is in the trace.
        self._end = step + self.steps + self._per_call - 1
        self._name_step(step + 1)

    def _stop(self) -> None:
        """Stop the trace, and write its files."""
        self._step_name.__exit__(None, None, None)
        self._step_name = None
        self._is_done = True
        try:
            jax.profiler.stop_trace()
        except Exception as e:
            self._give_up(e)
            return
        trace = newest(self._directory)
        with suppress(Exception):  # otherwise, the trace has the names of instructions only
            [xplane] = trace.parent.glob("*.xplane.pb")
            name_layers(trace, xplane)
        self._note(f"wrote a trace of {plural(self.steps, 'step')}: xprof {self._directory}, or {trace}")

    def _end_early(self) -> None:
        """Keep what was traced if the run ends before."""
        if self._is_done:
            return
        if self._step_name is not None:
            self.steps -= self._end - self._last
            self._stop()
        else:
            self._is_done = True
            self._note(f"no profile: the run took {plural(self._seen, 'step')}, and a trace starts after {WARM_UP}")

    def _give_up(self, error: Exception) -> None:
        self._is_done = True
        with suppress(Exception):
            jax.profiler.stop_trace()
        self._note(f"no profile: {type(error).__name__}: {one_line(error, 300)}")

    def _name_step(self, step: int) -> None:
        """End the annotation of a step on the host, and begin the next one."""
        if self._step_name is not None:
            self._step_name.__exit__(None, None, None)
        self._step_name = jax.profiler.StepTraceAnnotation("train", step_num=step)
        self._step_name.__enter__()


def newest(directory: Path) -> Path:
    """Return the last trace for Perfetto, or the directory if it has no trace."""
    files = directory.rglob("perfetto_trace.json.gz")
    return max(files, key=lambda file: file.stat().st_mtime, default=directory)
