"""Exits of the processes of `jaxgpt launch`: which failure to report, with which lines, and the exit code of the launcher.

A process that exits with a nonzero code has printed the reason and, if there is a checkpoint, the command that resumes the
run. A process that a signal kills prints nothing about its end. XLA then aborts the processes that wait for the killed process.
"""

from __future__ import annotations

import re
import signal
from collections.abc import Iterable, Sequence
from typing import NamedTuple

from jaxgpt.errors import FAILED, UNFINISHED

OWN = "jaxgpt: "  # prefix of the messages of jaxgpt
LOG = re.compile(r"[IWEF]\d{4} \d\d:\d\d:\d\d|\*\*\* Check failure")  # beginning of XLA's log records


class Exit(NamedTuple):
    """The exit of a process.

    Attributes:
        code: exit code; negative: minus the number of the signal that killed the process.
        lines: the last lines of its standard error.
        is_expected: whether the launcher killed the process, or forwarded a signal to it.
    """

    code: int
    lines: Sequence[str]
    is_expected: bool = False

    @property
    def was_killed(self) -> bool:
        """Whether the process was killed by a signal that the launcher did not send."""
        return self.code < 0 and not self.is_expected


def exit_code(exits: Iterable[Exit]) -> int:
    """Return the highest exit code, with `FAILED` for a process that was killed."""
    return max(process.code if process.code >= 0 else FAILED for process in exits)


def has_reason(exits: Iterable[Exit]) -> bool:
    """Return whether a process has exited with an error, and printed the reason."""
    return any(process.code > 0 and process.lines for process in exits)


def needs_resume_command(exits: Sequence[Exit]) -> bool:
    """Return whether a process was killed, and no process could print the command that resumes the run."""
    return any(process.was_killed for process in exits) and not has_reason(exits)


def failure_lines(exits: Sequence[Exit]) -> list[str]:
    """Return the lines that report the failed processes, without the lines of process 0, which are printed already.

    If a process has printed the reason, the log records and aborts of XLA in other processes, which follow from it, are
    omitted.
    """
    reason_is_printed = has_reason(exits)
    printed = set(exits[0].lines)
    report: list[str] = []
    for index, process in enumerate(exits):
        if process.code in (0, UNFINISHED):
            continue
        is_consequence = reason_is_printed and process.code == -signal.SIGABRT
        if process.was_killed and not is_consequence:
            report.append(f"{OWN}process {index} was killed by {signal_name(-process.code)}\n")
        lines = without_logs(process.lines) if reason_is_printed else process.lines
        report += [line for line in lines if line not in printed]
        printed.update(lines)
    return report


def signal_name(number: int) -> str:
    """Return the name of a signal, such as SIGKILL, or its number: most real-time signals have no name."""
    try:
        return signal.Signals(number).name
    except ValueError:
        return f"signal {number}"


def without_logs(lines: Iterable[str]) -> list[str]:
    """Drop the log records of XLA, which can have several lines, and its stack traces."""
    kept = []
    is_log = False
    for line in lines:
        if line.startswith((OWN, "Traceback")):
            is_log = False
        elif LOG.match(line):
            is_log = True
        if not is_log:
            kept.append(line)
    return kept
