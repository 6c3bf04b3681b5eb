"""Join the processes of a run, and exit when one of them fails."""

from __future__ import annotations

import contextlib
import ctypes
import os
import signal
import sys
import tempfile
import threading
import time
import traceback
from collections.abc import Callable, Iterator
from typing import Any, BinaryIO, NoReturn

import jax

from jaxgpt.config import DistributedConfig, UserError
from jaxgpt.parallel.processes import count, is_peer_failure, say_goodbye

LAST_WORDS = 5  # seconds in which processes that fail for the same reason can all report it
LONGEST = 160  # characters of XLA's message that are shown
GRACE = 60  # seconds for saving after the launcher has exited
FATAL = (
    b"JAX distributed service detected fatal errors"  # XLA's message when it ends a process because another one failed
)

_last_words = threading.Lock()
_peer_failure: Callable[[], str] = str  # the message if another process fails
_leaving: int | None = None  # the exit code of this process, once it is exiting: others may then exit before it


@contextlib.contextmanager
def joined(config: DistributedConfig) -> Iterator[None]:
    """Join the processes that the settings or the scheduler name. Enter this before JAX's first use of a device.

    A process that fails exits at once, without waiting for the others. They exit when they notice: immediately if a
    connection breaks, otherwise after `heartbeat_seconds`. Each reports it in one line, with the advice of `on_peer_failure`.

    Raises:
        UserError: the other processes cannot be reached.
    """
    if config.launched:
        threading.Thread(target=_follow_launcher, daemon=True).start()
    if config.coordinator == "none" or (not config.coordinator and not _scheduled()) or config.num_processes == 1:
        yield
        return
    _watch_for_aborts(_part_streams())
    _initialize(config)
    try:
        yield
        jax.distributed.shutdown()
    except Exception as e:
        if is_peer_failure(e):
            _lost(str(e))
        if type(e).__module__.startswith("jaxgpt") or (isinstance(e, OSError) and e.errno):
            raise  # the command line reports it, and exits
        traceback.print_exc()
        leave(1)


def leave(code: int) -> NoReturn:
    """Exit; as one of several processes, without waiting for the others to finish."""
    global _leaving
    sys.stdout.flush()
    sys.stderr.flush()
    if count() == 1:
        sys.exit(code)
    _leaving = code
    say_goodbye(LAST_WORDS)
    os._exit(code)


def on_peer_failure(advice: Callable[[], str]) -> None:
    """Set the advice that this process prints if another one fails: the state of the run, and how to resume it."""
    global _peer_failure
    _peer_failure = lambda: f"another process of this run is gone, this one cannot go on alone: {advice()}"  # noqa: E731


def _scheduled() -> bool:
    """Return whether a scheduler has started several processes, by the environment variables that JAX reads."""
    slurm = _number("SLURM_NTASKS") > 1 and "SLURM_STEP_NODELIST" in os.environ
    hosts = os.environ.get("TPU_PROCESS_ADDRESSES") or os.environ.get("TPU_WORKER_HOSTNAMES", "")
    return slurm or _number("OMPI_COMM_WORLD_SIZE") > 1 or _number("MEGASCALE_NUM_SLICES") > 1 or "," in hosts


def _number(name: str) -> int:
    value = os.environ.get(name, "")
    return int(value) if value.isdecimal() else 0


def _initialize(config: DistributedConfig) -> None:
    # SIGTERM is handled by jaxgpt/signals.py; JAX would replace the handler.
    jax.config.update("jax_enable_preemption_service", False)
    named: dict[str, Any] = {}
    if config.coordinator not in ("", "auto"):
        named = {
            "coordinator_address": config.coordinator,
            "num_processes": config.num_processes,
            "process_id": config.process_id,
            "cluster_detection_method": "deactivate",
            # JAX's default is to listen on every address of the machine, without authentication.
            "coordinator_bind_address": config.bind or config.coordinator,
        }
    elif config.bind:
        named = {"coordinator_bind_address": config.bind}
    where = config.coordinator if config.num_processes else "the scheduler's coordinator"
    failed = f"cannot join the other processes through {where}"
    global _peer_failure
    late = f"{failed} within {config.join_seconds} s: are all of them running, and can its port be reached?"
    _peer_failure = lambda: late  # noqa: E731
    try:
        jax.distributed.initialize(
            **named,
            initialization_timeout=config.join_seconds,
            heartbeat_timeout_seconds=config.heartbeat_seconds,
        )
    except (jax.errors.JaxRuntimeError, RuntimeError, ValueError) as e:
        raise UserError(f"{failed}: {' '.join(str(e).split())[:200]}") from None
    on_peer_failure(lambda: "nothing has been written yet")


def _part_streams() -> BinaryIO:
    """Redirect what native libraries write to a file, and keep Python's output where it was.

    gloo prints on standard output, and XLA ends with a stack trace.
    """
    log = tempfile.TemporaryFile()  # noqa: SIM115
    for name, number in (("stdout", 1), ("stderr", 2)):
        getattr(sys, name).flush()
        setattr(sys, name, os.fdopen(os.dup(number), "w", buffering=1, encoding="utf-8", errors="backslashreplace"))
        os.dup2(log.fileno(), number)
    return log


def _watch_for_aborts(log: BinaryIO) -> None:
    """If XLA aborts the process because another one failed, report it in one line and exit with 1.

    XLA aborts in a thread of its own. Its callback cannot be a Python function (its argument has no Python type), so the
    signal is caught. Other aborts are left as they are, with their output.
    """

    def aborted(_: int) -> None:
        log.seek(0)
        words = log.read()
        if FATAL in words:
            _lost(words.rpartition(b"absl::Status: ")[2].decode("utf-8", "replace"))
        sys.stderr.write(words.decode("utf-8", "replace"))
        sys.stderr.flush()

    handler = ctypes.CFUNCTYPE(None, ctypes.c_int)(aborted)
    _kept.append(handler)
    ctypes.CDLL(None).signal(int(signal.SIGABRT), handler)


_kept: list[Any] = []  # C holds no reference


def _lost(reason: str) -> NoReturn:
    if _leaving is not None:
        os._exit(_leaving)
    if not _last_words.acquire(blocking=False):
        threading.Event().wait()  # another thread is reporting it, and ends the process
    try:
        with contextlib.suppress(Exception):
            sys.stderr.write(f"jaxgpt: {_peer_failure()} ({' '.join(reason.split())[:LONGEST]})\n")
            sys.stderr.flush()
    finally:
        os._exit(1)


def _follow_launcher() -> None:
    """Save and stop when the launcher exits for any reason: the kernel then closes its end of standard input."""
    while os.read(0, 1):
        pass
    os.kill(os.getpid(), signal.SIGTERM)
    time.sleep(GRACE)
    os._exit(1)
