"""How a process joins the others of its run, and what it does when one of them is gone."""

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
from jaxgpt.parallel.processes import count, say_goodbye, tells_of_loss

LAST_WORDS = 5  # seconds in which processes that fail for one reason can all say it
LONGEST = 160  # characters of XLA's reason
GRACE = 60  # seconds for saving, once the launcher is gone
FATAL = b"JAX distributed service detected fatal errors"  # how XLA ends a process when another one is gone

_last_words = threading.Lock()
_loss: Callable[[], str] = str  # what to say if another process is gone
_leaving: int | None = None  # with which code this process is about to exit; then others may be gone before it


@contextlib.contextmanager
def joined(config: DistributedConfig) -> Iterator[None]:
    """Within this, the process is one of those that the settings or the scheduler name. Before JAX's first use of a device.

    A process that fails leaves at once instead of waiting for the others, and so do they when they notice: in an instant
    where a connection breaks, after `heartbeat_seconds` in any case. They say so in one line, with `on_loss`'s advice.

    Raises:
        UserError: the others cannot be reached.
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
        if tells_of_loss(e):
            _lost(str(e))
        if type(e).__module__.startswith("jaxgpt") or (isinstance(e, OSError) and e.errno):
            raise  # the command line tells it, and leaves
        traceback.print_exc()
        leave(1)


def leave(code: int) -> NoReturn:
    """End this process, if it is one of several: it does not wait until they have finished. Else as usual."""
    global _leaving
    sys.stdout.flush()
    sys.stderr.flush()
    if count() == 1:
        sys.exit(code)
    _leaving = code
    say_goodbye(LAST_WORDS)
    os._exit(code)


def on_loss(advice: Callable[[], str]) -> None:
    """Where things stand, and how to go on: what a process adds when it says that another one is gone."""
    global _loss
    _loss = lambda: f"another process of this run is gone, this one cannot go on alone: {advice()}"  # noqa: E731


def _scheduled() -> bool:
    """Whether a scheduler has started several processes, by the variables from which JAX finds out the rest."""
    slurm = _number("SLURM_NTASKS") > 1 and "SLURM_STEP_NODELIST" in os.environ
    hosts = os.environ.get("TPU_PROCESS_ADDRESSES") or os.environ.get("TPU_WORKER_HOSTNAMES", "")
    return slurm or _number("OMPI_COMM_WORLD_SIZE") > 1 or _number("MEGASCALE_NUM_SLICES") > 1 or "," in hosts


def _number(name: str) -> int:
    value = os.environ.get(name, "")
    return int(value) if value.isdecimal() else 0


def _initialize(config: DistributedConfig) -> None:
    # SIGTERM is the loop's business (trainer/signals.py); JAX would take it away.
    jax.config.update("jax_enable_preemption_service", False)
    named: dict[str, Any] = {}
    if config.coordinator not in ("", "auto"):
        named = {
            "coordinator_address": config.coordinator,
            "num_processes": config.num_processes,
            "process_id": config.process_id,
            "cluster_detection_method": "deactivate",
            # JAX's own choice would be every address of the machine; nothing here asks who is calling.
            "coordinator_bind_address": config.bind or config.coordinator,
        }
    elif config.bind:
        named = {"coordinator_bind_address": config.bind}
    where = config.coordinator if config.num_processes else "the scheduler's coordinator"
    failed = f"cannot join the other processes through {where}"
    global _loss
    _loss = lambda: f"{failed} within {config.join_seconds} s: are all of them running, and can its port be reached?"  # noqa: E731
    try:
        jax.distributed.initialize(
            **named,
            initialization_timeout=config.join_seconds,
            heartbeat_timeout_seconds=config.heartbeat_seconds,
        )
    except (jax.errors.JaxRuntimeError, RuntimeError, ValueError) as e:
        raise UserError(f"{failed}: {' '.join(str(e).split())[:200]}") from None
    on_loss(lambda: "nothing has been written yet")


def _part_streams() -> BinaryIO:
    """Python's lines go where they went; what native libraries write goes to a file.

    gloo talks on standard output, and XLA's last words come with a stack trace.
    """
    log = tempfile.TemporaryFile()  # noqa: SIM115
    for name, number in (("stdout", 1), ("stderr", 2)):
        getattr(sys, name).flush()
        setattr(sys, name, os.fdopen(os.dup(number), "w", buffering=1, encoding="utf-8", errors="backslashreplace"))
        os.dup2(log.fileno(), number)
    return log


def _watch_for_aborts(log: BinaryIO) -> None:
    """Where XLA aborts the process because another one is gone, say it in one line and exit with 1.

    It does so in a thread of its own, whatever the others wait for, and there is no other way to be told: the callback
    that it has cannot be one of Python's (its argument has no Python type). Any other abort is one, with its words.
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
        threading.Event().wait()  # another thread is saying it, and ends the process
    try:
        with contextlib.suppress(Exception):
            sys.stderr.write(f"jaxgpt: {_loss()} ({' '.join(reason.split())[:LONGEST]})\n")
            sys.stderr.flush()
    finally:
        os._exit(1)


def _follow_launcher() -> None:
    """Save and stop when the launcher is gone, however it went: the kernel closes its end of standard input."""
    while os.read(0, 1):
        pass
    os.kill(os.getpid(), signal.SIGTERM)
    time.sleep(GRACE)
    os._exit(1)
