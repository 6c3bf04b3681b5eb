"""jaxgpt launch --processes N [--devices-per-process N] train ..."""

from __future__ import annotations

import math
import os
import re
import shlex
import signal
import socket
import subprocess
import sys
import threading
import time
from collections import deque
from collections.abc import Iterable, Sequence
from contextlib import suppress
from typing import IO, Annotated, Any, NamedTuple

from cyclopts import Parameter
from cyclopts.validators import Number

from jaxgpt.cli.options import Count
from jaxgpt.cli.output import note
from jaxgpt.cli.parse import parse
from jaxgpt.cpu import cores
from jaxgpt.errors import FAILED, UserError
from jaxgpt.signals import SIGNALS, UNFINISHED, restore_signals

HERE = "127.0.0.1"
STDERR_LINES = 200  # maximum lines of standard error to keep per process
OWN = "jaxgpt: "  # prefix of the messages of jaxgpt
LOG = re.compile(r"[IWEF]\d{4} \d\d:\d\d:\d\d|\*\*\* Check failure")  # beginning of XLA's log records
RESUME = "resume with: "  # beginning of the command that resumes a run, in the message of a process
PATIENCE = 90  # seconds between the first nonzero exit code and SIGKILL for the remaining processes


def launch(
    *command: Annotated[str, Parameter(allow_leading_hyphen=True)],
    processes: Annotated[int, Parameter(validator=Number(gte=1, lte=4096))] = 2,
    devices_per_process: Count = 0,
) -> int:
    """Train in several processes on this machine.

    jaxgpt launch --processes 2 train shakespeare
    jaxgpt launch --processes 4 --devices-per-process 2 train llama-tiny --mesh.fsdp 8 --mesh.data 1
    jaxgpt launch --processes 2 train --resume --out runs/shakespeare

    Args:
        command: train, and its arguments and options
        processes: number of processes
        devices_per_process: CPU devices per process; 0: JAX_NUM_CPU_DEVICES, or an equal share of the cores
    """
    if command[:1] != ("train",):
        raise UserError(f"expected train, not {' '.join(command[:1])!r}: use jaxgpt launch --processes 2 train PRESET")
    _, bound = parse(command)  # report an unknown option here, not in every process
    given = bound.arguments
    run = given.get("out", "")
    if not run and given.get("resume"):
        run = given.get("target", "")

    fleet = _Fleet(processes)
    with socket.socket() as reserved:
        # Reserve the port for process 0, which listens on it. A socket that does not listen receives no connections.
        reserved.setsockopt(socket.SOL_SOCKET, socket.SO_REUSEPORT, 1)
        reserved.bind((HERE, 0))
        coordinator = f"{HERE}:{reserved.getsockname()[1]}"
        fleet.start([*command, "--distributed.coordinator", coordinator], devices_per_process)
        ending = fleet.wait()
    if ending.needs_resume_command:
        words = ["jaxgpt", "launch", "--processes", str(processes), "train", "--resume", "--out", run or "RUN"]
        note(f"{RESUME}{shlex.join(words)}")
    return ending.code


class Ending(NamedTuple):
    """The exit of all processes.

    Attributes:
        code: highest exit code; `FAILED` for a process that was killed.
        needs_resume_command: whether a process was killed, and no process printed the command that resumes the run.
    """

    code: int
    needs_resume_command: bool


class _Fleet:
    """Child processes; they stop if the launcher dies, because its death closes their standard input."""

    def __init__(self, count: int) -> None:
        self.count = count
        self.processes = list[subprocess.Popen[str]]()
        self.readers = list[threading.Thread]()
        self.last_lines = [deque[str](maxlen=STDERR_LINES) for _ in range(count)]
        self.forwarded: int | None = None  # the last forwarded signal; None: no signal
        self.previous: dict[int, Any] = {}  # signal handlers to restore
        self.stopped = set[int]()  # indices of the processes that this process has killed

    def start(self, command: Sequence[str], devices: int) -> None:
        """Start the processes and forward signals to them; on two Ctrl-C in two seconds, they exit, and this process waits."""
        restore_signals()
        for number in SIGNALS:
            is_ignored = signal.getsignal(number) is signal.SIG_IGN  # for example, SIGHUP under nohup
            if not is_ignored:
                self.previous[number] = signal.signal(number, self._forward)

        variable = "JAX_NUM_CPU_DEVICES"
        devices_each = devices or os.environ.get(variable) or max(cores() // self.count, 1)
        flags = ["--distributed.num-processes", str(self.count), "--distributed.launched", "--distributed.process-id"]
        for index in range(self.count):
            process = subprocess.Popen(
                [sys.executable, "-m", "jaxgpt", *command, *flags, str(index)],
                stdin=subprocess.PIPE,
                stdout=None if index == 0 else subprocess.DEVNULL,
                stderr=subprocess.PIPE,
                text=True,
                errors="replace",
                env=os.environ | {variable: str(devices_each)},
                start_new_session=True,  # Ctrl-C reaches only this process, which forwards it
            )
            self.processes.append(process)
            reader = threading.Thread(target=self._read, args=(index, process.stderr), daemon=True)
            reader.start()
            self.readers.append(reader)
        if self.forwarded is not None:  # a signal before all processes had started
            self._forward(self.forwarded, None)

    def wait(self) -> Ending:
        """Wait for all processes, restore the signal handlers, and print failures."""
        deadline = math.inf
        while any(process.poll() is None for process in self.processes):
            if any(process.poll() for process in self.processes):
                # Give the other processes time to detect the failure and exit.
                deadline = min(deadline, time.monotonic() + PATIENCE)
            if time.monotonic() > deadline:
                self._kill()
            time.sleep(0.05)

        for reader in self.readers:
            reader.join(1)
        for number, handler in self.previous.items():
            signal.signal(number, handler)

        codes = [process.returncode for process in self.processes]
        printed = self._print_failures(codes)
        was_killed = min(codes) < 0 and self.forwarded is None
        has_command = any(RESUME in line for line in printed)
        code = max(code if code >= 0 else FAILED for code in codes)
        return Ending(code, was_killed and not has_command)

    def _read(self, index: int, lines: IO[str]) -> None:
        """Keep the last lines of a process's standard error; print all lines of process 0."""
        for line in lines:
            self.last_lines[index].append(line)
            if index == 0:
                with suppress(OSError):  # keep reading: a full pipe would block the process
                    sys.stderr.write(line)
                    sys.stderr.flush()

    def _kill(self) -> None:
        """Kill the processes that still run."""
        for index, process in enumerate(self.processes):
            if process.poll() is None:
                self.stopped.add(index)
                process.kill()

    def _forward(self, number: int, _: Any) -> None:
        """Handle a signal: forward it to all processes."""
        self.forwarded = number
        for process in self.processes:
            process.send_signal(number)

    def _print_failures(self, codes: Sequence[int]) -> set[str]:
        """Print the processes killed by a signal, and the errors that process 0 did not print; return all printed lines."""
        printed = set(self.last_lines[0])
        errors = [line for index, code in enumerate(codes) if code for line in self.last_lines[index]]
        is_explained = any(line.startswith(OWN) for line in errors)
        for index, code in enumerate(codes):
            if code in (0, UNFINISHED):
                continue
            number = -code  # the signal that killed the process, if positive
            # XLA aborts the remaining processes, which does not explain the failure.
            is_victim = index in self.stopped or (is_explained and number == signal.SIGABRT)
            if number > 0 and self.forwarded is None and not is_victim:
                note(f"process {index} was killed by {signal.Signals(number).name}")

            lines = list(self.last_lines[index])
            if is_explained:
                lines = without_logs(lines)
            for line in lines:
                if line not in printed:
                    printed.add(line)
                    sys.stderr.write(line)
        return printed


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
