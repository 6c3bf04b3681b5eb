"""Start followers from a run: a listener for `train`, in a script, a notebook or `jaxgpt train --track`."""

from __future__ import annotations

import os
import shlex
import subprocess
import sys
from collections.abc import Callable
from pathlib import Path

import jaxgpt
from jaxgpt.checkpoint.run import Run
from jaxgpt.data import Data
from jaxgpt.directories import TRACKERS
from jaxgpt.follow.trackers import tracker_of
from jaxgpt.parallel.processes import is_leader
from jaxgpt.trainer.evaluation import Result
from jaxgpt.trainer.events import Listener, Outcome
from jaxgpt.trainer.program import Program


class Follow(Listener):
    """Starts `jaxgpt follow RUN --to NAME` for each tracker when the run starts, and never waits for it.

    Process 0 starts the followers. They are detached: Ctrl-C does not reach them, and they continue after the run until they
    have sent its last line. A follower that fails is reported in one line, and does not affect the run.

    Args:
        names: names of trackers, as in `jaxgpt.follow.trackers.TRACKERS`.
        note: called with one-line messages.

    Raises:
        UserError: if a name is unknown, or the package of a tracker is not installed.
    """

    def __init__(self, *names: str, note: Callable[[str], None] = print) -> None:
        for name in names:
            tracker_of(name)
        self.names = list(dict.fromkeys(names))
        self._note = note
        self._run = Path()
        self._followers: dict[str, subprocess.Popen[bytes]] = {}

    def started(self, program: Program, data: Data, run: Run, step: int) -> None:
        if not is_leader():
            return
        self._run = run.path
        for name in self.names:
            log = run.path / TRACKERS / name / "log.txt"
            command = ["follow", str(run.path), "--to", name]
            try:
                log.parent.mkdir(parents=True, exist_ok=True)
                self._followers[name] = start_detached(command, log)
            except OSError as e:
                self._note(f"cannot start the follower of {name}: {e.strerror}; {later(command)}")
                continue
            self._note(f"sending metrics to {name}, see {log}")

    def evaluated(self, step: int, result: Result) -> None:
        self._report_failed()

    def finished(self, outcome: Outcome) -> None:
        self._report_failed()

    def failed(self, error: BaseException) -> None:
        self._report_failed()

    def _report_failed(self) -> None:
        """Report each follower that has failed, once, without waiting for the others."""
        for name, follower in list(self._followers.items()):
            if follower.poll():
                command = ["follow", str(self._run), "--to", name]
                log = self._run / TRACKERS / name / "log.txt"
                self._note(f"the follower of {name} failed, see {log}; {later(command)}")
                del self._followers[name]


def start_detached(words: list[str], log: Path) -> subprocess.Popen[bytes]:
    """Start a command of jaxgpt in a new session, with its output appended to a file."""
    root = str(Path(jaxgpt.__file__).parents[1])
    paths = filter(None, [root, os.environ.get("PYTHONPATH")])
    with log.open("ab") as output:
        return subprocess.Popen(
            [sys.executable, "-m", "jaxgpt", *words],
            stdin=subprocess.DEVNULL,
            stdout=output,
            stderr=subprocess.STDOUT,
            start_new_session=True,
            env=os.environ | {"PYTHONPATH": os.pathsep.join(paths)},
        )


def later(words: list[str]) -> str:
    """Return the advice to send the metrics after the run."""
    return f"send the metrics later with: {shlex.join(['jaxgpt', *words])}"
