"""jaxgpt launch --processes N [--devices-per-process N] train ..."""

from __future__ import annotations

import math
import os
import shlex
import signal
import socket
import subprocess
import sys
import threading
import time
from collections import deque
from collections.abc import Mapping, Sequence
from contextlib import suppress
from typing import IO, Annotated, Any

from cyclopts import Parameter
from cyclopts.validators import Number

from jaxgpt.cli.console import note
from jaxgpt.cli.exits import Exit, exit_code, failure_lines, needs_resume_command
from jaxgpt.cli.options import Count
from jaxgpt.cli.parse import parse
from jaxgpt.cpu import cores
from jaxgpt.errors import UserError
from jaxgpt.signals import SIGNALS, restore_signals

HERE = "127.0.0.1"
STDERR_LINES = 200  # maximum number of lines of standard error to keep per process
DEVICES = "JAX_NUM_CPU_DEVICES"  # environment variable with the number of CPU devices of a process
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
    directory = given.get("out", "")
    if not directory and given.get("resume"):
        directory = given.get("target", "")

    fleet = _Fleet(processes)
    with socket.socket() as reserved:
        # Reserve the port for process 0, which listens on it. A socket that does not listen receives no connections.
        reserved.setsockopt(socket.SOL_SOCKET, socket.SO_REUSEPORT, 1)
        reserved.bind((HERE, 0))
        coordinator = f"{HERE}:{reserved.getsockname()[1]}"
        fleet.start([*command, "--distributed.coordinator", coordinator], devices_per_process)
        exits = fleet.wait()

    sys.stderr.writelines(failure_lines(exits))
    if needs_resume_command(exits):
        words = ["jaxgpt", "launch", "--processes", str(processes), "train", "--resume", "--out", directory or "RUN"]
        note(f"resume with: {shlex.join(words)}")
    return exit_code(exits)


class _Fleet:
    """Child processes; they stop if the launcher dies, because its death closes their standard input."""

    def __init__(self, count: int) -> None:
        self.count = count
        self.children = list[_Child]()
        self.forwarded: int | None = None  # the last forwarded signal; None: no signal
        self.previous: dict[int, Any] = {}  # signal handlers to restore

    def start(self, command: Sequence[str], devices: int) -> None:
        """Start the processes, and forward the signals of this process to them.

        Two Ctrl-C in two seconds end the children, but not this process, which waits for them.
        """
        restore_signals()
        for number in SIGNALS:
            is_ignored = signal.getsignal(number) is signal.SIG_IGN  # for example, SIGHUP under nohup
            if not is_ignored:
                self.previous[number] = signal.signal(number, self._forward)

        environment = _environment(devices, self.count)
        flags = ["--distributed.num-processes", str(self.count), "--distributed.launched"]
        for index in range(self.count):
            words = [*command, *flags, "--distributed.process-id", str(index)]
            self.children.append(_Child(words, environment, is_shown=index == 0))
        if self.forwarded is not None:  # a signal before all processes had started
            self._forward(self.forwarded, None)

    def wait(self) -> list[Exit]:
        """Wait for all processes, restore the signal handlers, and return the exit of each process."""
        deadline = math.inf
        while any(child.process.poll() is None for child in self.children):
            if any(child.process.poll() for child in self.children):
                # Give the other processes time to detect the failure and exit.
                deadline = min(deadline, time.monotonic() + PATIENCE)
            if time.monotonic() > deadline:
                for child in self.children:
                    child.kill()
            time.sleep(0.05)

        for child in self.children:
            child.reader.join(1)
        for number, handler in self.previous.items():
            signal.signal(number, handler)
        is_signalled = self.forwarded is not None
        return [
            Exit(child.process.returncode, list(child.last_lines), is_expected=is_signalled or child.is_killed)
            for child in self.children
        ]

    def _forward(self, number: int, _: Any) -> None:
        """Handle a signal: forward it to all processes."""
        self.forwarded = number
        for child in self.children:
            child.process.send_signal(number)


class _Child:
    """A child process, and a thread that reads its standard error.

    Args:
        words: command line of jaxgpt.
        environment: environment variables.
        is_shown: whether to print the output and the standard error of the process.

    Attributes:
        last_lines: the last lines of its standard error.
        is_killed: whether the launcher has killed the process.
    """

    def __init__(self, words: Sequence[str], environment: Mapping[str, str], is_shown: bool) -> None:
        self.last_lines = deque[str](maxlen=STDERR_LINES)
        self.is_killed = False
        self.process = subprocess.Popen(
            [sys.executable, "-m", "jaxgpt", *words],
            stdin=subprocess.PIPE,
            stdout=None if is_shown else subprocess.DEVNULL,
            stderr=subprocess.PIPE,
            text=True,
            errors="replace",
            env=environment,
            start_new_session=True,  # Ctrl-C reaches only the launcher, which forwards it
        )
        self.reader = threading.Thread(target=self._read, args=(self.process.stderr, is_shown), daemon=True)
        self.reader.start()

    def _read(self, lines: IO[str], is_shown: bool) -> None:
        """Keep the last lines of the standard error, and print all lines if the process is shown."""
        for line in lines:
            self.last_lines.append(line)
            if is_shown:
                with suppress(OSError):  # keep reading: a full pipe would block the process
                    sys.stderr.write(line)
                    sys.stderr.flush()

    def kill(self) -> None:
        """Kill the process, if it still runs."""
        if self.process.poll() is None:
            self.is_killed = True
            self.process.kill()


def _environment(devices: int, count: int) -> dict[str, str]:
    """Return the environment of each of `count` processes, with the number of its CPU devices.

    `devices` 0: JAX_NUM_CPU_DEVICES, or an equal share of the cores.
    """
    environment = dict(os.environ)
    if devices:
        environment[DEVICES] = str(devices)
    elif not environment.get(DEVICES):
        environment[DEVICES] = str(max(cores() // count, 1))
    return environment
