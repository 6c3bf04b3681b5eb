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
from jaxgpt.trainer.evaluators import Result
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
        self._followers: list[_FollowProcess] = []

    def started(self, program: Program, data: Data, run: Run, step: int) -> None:
        if not is_leader():
            return
        for name in self.names:
            follower = _FollowProcess(name, run.path)
            try:
                follower.start()
            except OSError as e:
                self._note(f"cannot start the follower of {name}: {e.strerror or e}; {follower.advice()}")
                continue
            self._followers.append(follower)
            self._note(f"sending metrics to {name}, see {follower.log}")

    def evaluated(self, step: int, result: Result) -> None:
        self._report_failed()

    def finished(self, outcome: Outcome) -> None:
        self._report_failed()

    def failed(self, error: BaseException) -> None:
        self._report_failed()

    def _report_failed(self) -> None:
        """Report each follower that has failed, once, without waiting for the others."""
        failed = [follower for follower in self._followers if follower.has_failed()]
        self._followers = [follower for follower in self._followers if follower not in failed]
        for follower in failed:
            self._note(f"the follower of {follower.name} failed, see {follower.log}; {follower.advice()}")


class _FollowProcess:
    """A process that sends the metrics of a run to a tracker.

    Args:
        name: name of the tracker.
        run: directory of the run.
    """

    def __init__(self, name: str, run: Path) -> None:
        self.name = name
        self.log = run / TRACKERS / name / "log.txt"
        self._command = ["follow", str(run), "--to", name]
        self._process: subprocess.Popen[bytes] | None = None

    def start(self) -> None:
        """Start the process; raise `OSError` if the process cannot be started."""
        self.log.parent.mkdir(parents=True, exist_ok=True)
        self._process = start_detached(self._command, self.log)

    def has_failed(self) -> bool:
        """Return whether the process has ended with an error."""
        return self._process is not None and bool(self._process.poll())

    def advice(self) -> str:
        """Return the advice to send the metrics after the run."""
        return f"send the metrics later with: {shlex.join(['jaxgpt', *self._command])}"


def start_detached(words: list[str], log: Path) -> subprocess.Popen[bytes]:
    """Start a command of jaxgpt in a new session, with its output appended to a file."""
    # The process imports this package, even if it is not installed and the run has changed the working directory.
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
