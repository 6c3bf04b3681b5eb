"""jaxgpt launch --processes N [--devices-per-process N] train ..."""

from __future__ import annotations

import os
import signal
import socket
import subprocess
import sys
import threading
import time
from collections import deque
from collections.abc import Iterator
from contextlib import contextmanager, suppress
from dataclasses import dataclass
from itertools import pairwise
from typing import IO, Annotated, Any

from cyclopts import Parameter

from jaxgpt.cli.output import command_line, note
from jaxgpt.errors import UserError
from jaxgpt.runtime import cores
from jaxgpt.settings import Section, setting
from jaxgpt.signals import SIGNALS, UNFINISHED

STDERR_LINES = 200  # lines of standard error to keep per process
SLACK = 10  # seconds after the heartbeat timeout before the remaining processes are killed


@dataclass(frozen=True)
class Processes(Section):
    """Processes to start."""

    processes: int = setting(2, "number of processes", 1, 4096)
    devices_per_process: int = setting(0, "CPU devices per process; 0: an equal share of the cores", 0, 4096)
    address: str = setting("127.0.0.1", "address that process 0 listens on; connections are not authenticated")
    heartbeat_seconds: int = setting(30, "abort if a process is silent for this many seconds", 2, 86400)


def launch(*command: Annotated[str, Parameter(allow_leading_hyphen=True)], options: Processes) -> int:
    """Train in several processes on this machine.

    jaxgpt launch --processes 2 train shakespeare
    jaxgpt launch --processes 4 --devices-per-process 2 train llama-tiny --mesh.fsdp 8 --mesh.data 1
    jaxgpt launch --processes 2 train --resume --out runs/shakespeare

    Args:
        command: train, and its arguments and options
    """
    if command[:1] != ("train",):
        raise UserError(
            f"expected train, not {' '.join(command[:1])!r}; as in jaxgpt launch --processes 2 train PRESET"
        )
    with _port(options.address) as port:
        return _Fleet(options, [*command, "--distributed.coordinator", f"{options.address}:{port}"]).wait()


@contextmanager
def _port(address: str) -> Iterator[int]:
    """Reserve an unused port, which process 0 can listen on: a socket that does not listen receives no connections."""
    with socket.socket() as reserved:
        try:
            reserved.setsockopt(socket.SOL_SOCKET, socket.SO_REUSEPORT, 1)
            reserved.bind((address, 0))
        except OSError as e:
            raise UserError(f"cannot listen on --address {address}: {e.strerror}") from None
        port: int = reserved.getsockname()[1]
        yield port


class _Fleet:
    """Child processes; they exit when the launcher dies and closes their standard input."""

    def __init__(self, args: Processes, command: list[str]) -> None:
        self.environment = {"JAX_NUM_CPU_DEVICES": str(max(cores() // args.processes, 1))} | os.environ
        if args.devices_per_process:
            self.environment["JAX_NUM_CPU_DEVICES"] = str(args.devices_per_process)
        self.patience = args.heartbeat_seconds + SLACK
        self.out = next((value for flag, value in pairwise(command) if flag == "--out"), "")
        self.errors = [deque[str](maxlen=STDERR_LINES) for _ in range(args.processes)]
        self.forwarded = 0
        for number in SIGNALS:
            if signal.getsignal(number) is not signal.SIG_IGN:  # as SIGHUP under nohup
                signal.signal(number, self._forward)
        self.processes: list[subprocess.Popen[str]] = []
        flags = ["--distributed.num-processes", str(args.processes), "--distributed.launched"]
        flags += ["--distributed.heartbeat-seconds", str(args.heartbeat_seconds)]
        for index in range(args.processes):
            self.processes.append(self._start(index, [*command, *flags, "--distributed.process-id", str(index)]))

    def _start(self, index: int, command: list[str]) -> Any:
        process = subprocess.Popen(
            [sys.executable, "-m", "jaxgpt", *command],
            stdin=subprocess.PIPE,
            stdout=None if index == 0 else subprocess.DEVNULL,
            stderr=subprocess.PIPE,
            text=True,
            errors="replace",
            env=self.environment,
            start_new_session=True,  # Ctrl-C reaches only this process, which forwards it once
        )
        assert process.stderr is not None
        threading.Thread(target=self._listen, args=(index, process.stderr), daemon=True).start()
        return process

    def _listen(self, index: int, lines: IO[str]) -> None:
        for line in lines:
            self.errors[index].append(line)
            if index == 0:
                with suppress(OSError):  # standard error is closed; a process whose errors are not read would wait
                    sys.stderr.write(line)
                    sys.stderr.flush()

    def _forward(self, number: int, _: Any) -> None:
        self.forwarded = number
        self._signal(number)

    def _signal(self, number: int) -> None:
        for process in self.processes:
            if process.poll() is None:
                process.send_signal(number)

    def wait(self) -> int:
        """Wait for all processes; return the highest exit code, counting 1 for a process killed by a signal."""
        deadline = float("inf")
        while any(process.poll() is None for process in self.processes):
            if deadline == float("inf") and any(process.poll() for process in self.processes):
                deadline = time.monotonic() + self.patience  # the others detect the failure and exit on their own
            if time.monotonic() > deadline:
                self._signal(signal.SIGKILL)
            time.sleep(0.05)
        codes = [process.returncode for process in self.processes]
        self._tell(codes)
        if self.forwarded and all(code in (0, -self.forwarded) for code in codes) and any(codes):
            return 128 + self.forwarded  # stopped before there was anything to save
        return max(code if code >= 0 else 1 for code in codes)

    def _tell(self, codes: list[int]) -> None:
        """Print which processes a signal killed, and errors of the other processes that process 0 did not print."""
        time.sleep(0.1)  # for the last lines to arrive
        said = set(self.errors[0])
        for index, code in enumerate(codes):
            if code < 0 and not self.forwarded:
                note(f"process {index} was killed by signal {-code} ({signal.Signals(-code).name})")
            for line in list(self.errors[index]) if index and code not in (0, UNFINISHED) else []:
                if line not in said:
                    said.add(line)
                    sys.stderr.write(line)
        sys.stderr.flush()
        if self.out and not self.forwarded and min(codes) < 0:  # XLA ends the other processes before they can print it
            note(f"resume with: {command_line('train', '--resume', '--out', self.out)}")
