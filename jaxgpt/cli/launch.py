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
from collections.abc import Sequence
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
STDERR_LINES = 200  # maximum lines of standard error to keep per process
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
        self.processes = list[subprocess.Popen[str]]()
        self.readers = list[threading.Thread]()
        self.last_lines = [deque[str](maxlen=STDERR_LINES) for _ in range(count)]
        self.forwarded: int | None = None  # the last forwarded signal; None: no signal
        self.previous: dict[int, Any] = {}  # signal handlers to restore
        self.killed = set[int]()  # indices of the processes that this process has killed

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
            process = subprocess.Popen(
                [sys.executable, "-m", "jaxgpt", *command, *flags, "--distributed.process-id", str(index)],
                stdin=subprocess.PIPE,
                stdout=None if index == 0 else subprocess.DEVNULL,
                stderr=subprocess.PIPE,
                text=True,
                errors="replace",
                env=environment,
                start_new_session=True,  # Ctrl-C reaches only this process, which forwards it
            )
            self.processes.append(process)
            reader = threading.Thread(target=self._read, args=(index, process.stderr), daemon=True)
            reader.start()
            self.readers.append(reader)
        if self.forwarded is not None:  # a signal before all processes had started
            self._forward(self.forwarded, None)

    def wait(self) -> list[Exit]:
        """Wait for all processes, restore the signal handlers, and return the exit of each process."""
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
        return [self._exit(index, process.returncode) for index, process in enumerate(self.processes)]

    def _exit(self, index: int, code: int) -> Exit:
        """Return the exit of a process with the code `code`."""
        is_expected = self.forwarded is not None or index in self.killed
        return Exit(code, list(self.last_lines[index]), is_expected)

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
                self.killed.add(index)
                process.kill()

    def _forward(self, number: int, _: Any) -> None:
        """Handle a signal: forward it to all processes."""
        self.forwarded = number
        for process in self.processes:
            process.send_signal(number)


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
