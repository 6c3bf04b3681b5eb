"""Join the processes of a run, and exit when one of them fails.

A process notices a failure in one of three ways: an error of a computation with all processes (`joined`), a missing
heartbeat (`Heartbeats`), or the end of the launcher (`_stop_with_launcher`).
"""

from __future__ import annotations

import contextlib
import os
import signal
import sys
import threading
import time
import traceback
from collections.abc import Callable, Iterator
from typing import Any, NoReturn

import jax

from jaxgpt.config import DistributedConfig
from jaxgpt.early_end import with_advice
from jaxgpt.errors import BAD_INPUT, FAILED, UserError, one_line
from jaxgpt.parallel.heartbeat import LAST_WORDS, CoordinatorBoard, Heartbeats, set_heartbeats
from jaxgpt.parallel.processes import is_leader, is_peer_failure, process_count, set_place

# JAX's own heartbeat limit, which aborts with a stack trace, is this number of seconds above the limit of `Heartbeats`.
MARGIN = 30
GRACE = 60  # maximum seconds for saving after the launcher has exited
SAMPLING = 86_400  # maximum seconds that finished processes wait for process 0, which samples at the end of a run


@contextlib.contextmanager
def joined(config: DistributedConfig, is_reported: Callable[[Exception], bool] = lambda error: False) -> Iterator[None]:
    """Join the processes of the config or of a scheduler, if there are several, before JAX first uses a device.

    A process that fails exits without waiting for the other processes. The remaining processes exit immediately if
    they wait for the failed process, or if process 0 failed; otherwise `Heartbeats` end them after `heartbeat_seconds`.

    Args:
        config: number, index and coordinator of the processes, and time limits.
        is_reported: returns whether the caller reports an error of the block, and then calls `exit_process`. With several
            processes, other errors are printed here with their stack trace, or in one line if another process failed.

    Raises:
        UserError: if JAX cannot join the processes; after `join_seconds`, the process exits instead.
    """
    if config.launched:
        threading.Thread(target=_stop_with_launcher, daemon=True).start()
    is_alone = config.coordinator == "none" or (not config.coordinator and not _scheduled())
    if is_alone or config.num_processes == 1:
        yield
        return

    _initialize(config)
    count, index = _place(config)
    set_place(count, index)
    heartbeats = Heartbeats(CoordinatorBoard(), index, count, config.heartbeat_seconds)
    set_heartbeats(heartbeats)
    heartbeats.start()

    try:
        yield
        heartbeats.stop()
        jax.distributed.shutdown()
    except Exception as e:
        if is_peer_failure(e):
            reason = with_advice("another process exited, so this process stops")
            print(f"jaxgpt: {reason} ({one_line(e, 160)})", file=sys.stderr)
            exit_process(FAILED)
        if is_reported(e):
            raise
        traceback.print_exc()
        exit_process(FAILED)


def exit_process(code: int) -> NoReturn:
    """Exit; with several processes, do not wait for the other processes to finish."""
    if process_count() == 1:
        sys.exit(code)
    sys.stdout.flush()
    if is_leader() and jax.distributed.is_initialized():
        # XLA ends the other processes when process 0 exits, before they have printed their error.
        time.sleep(LAST_WORDS)
    os._exit(code)


def _exit_unjoined(config: DistributedConfig) -> NoReturn:
    """Report that the processes have not joined, and exit."""
    coordinator = config.coordinator if config.num_processes else "the coordinator of the scheduler"
    print(
        f"jaxgpt: cannot join the other processes through {coordinator} within {config.join_seconds} s: check that all "
        "processes run and can reach the coordinator's port",
        file=sys.stderr,
        flush=True,
    )
    os._exit(BAD_INPUT)


def _scheduled() -> bool:
    """Return whether a scheduler started several processes, by environment variables that JAX reads."""
    if _scheduled_place() is not None or _number("MEGASCALE_NUM_SLICES") > 1:
        return True
    hosts = os.environ.get("TPU_PROCESS_ADDRESSES") or os.environ.get("TPU_WORKER_HOSTNAMES", "")
    return "," in hosts


def _scheduled_place() -> tuple[int, int] | None:
    """Return the number of processes that mpirun or srun started, and the index of this process; None: fewer than two."""
    # In a Slurm job, processes of mpirun have the variables of mpirun and Slurm. Like JAX, read the variables of mpirun first.
    if _number("OMPI_COMM_WORLD_SIZE") > 1:
        return _number("OMPI_COMM_WORLD_SIZE"), _number("OMPI_COMM_WORLD_RANK")
    # A script of sbatch has SLURM_NTASKS, but it is one process: only srun sets the variable of a step.
    if "SLURM_STEP_NODELIST" in os.environ and _number("SLURM_NTASKS") > 1:
        return _number("SLURM_NTASKS"), _number("SLURM_PROCID")
    return None


def _place(config: DistributedConfig) -> tuple[int, int]:
    """Return the number of processes, and the index of this process."""
    if config.num_processes:
        return config.num_processes, config.process_id
    scheduled = _scheduled_place()
    if scheduled is not None:
        return scheduled
    return jax.process_count(), jax.process_index()  # `jax.process_count` starts the backend


def _number(name: str) -> int:
    """Return the number in an environment variable; 0: the variable is not set, or is not a number."""
    value = os.environ.get(name, "")
    return int(value) if value.isdecimal() else 0


def _initialize(config: DistributedConfig) -> None:
    """Connect this process to the coordinator of the config; without `num_processes`, JAX finds the scheduler's coordinator."""
    # The preemption service would replace the SIGTERM handler of jaxgpt/signals.py.
    jax.config.update("jax_enable_preemption_service", False)

    place: dict[str, Any] = {}  # JAX finds this process in the variables of the scheduler
    bind = config.bind
    if config.num_processes:
        place = {
            "coordinator_address": config.coordinator,
            "num_processes": config.num_processes,
            "process_id": config.process_id,
            "cluster_detection_method": "deactivate",
        }
        # JAX's default is to listen on every address of the machine, without authentication.
        bind = bind or config.coordinator

    # JAX's own timeout aborts the process with a stack trace, so this timer is shorter.
    timer = threading.Timer(config.join_seconds, _exit_unjoined, [config])
    timer.daemon = True
    timer.start()
    try:
        jax.distributed.initialize(
            **place,
            coordinator_bind_address=bind or None,
            initialization_timeout=2 * config.join_seconds,
            heartbeat_timeout_seconds=config.heartbeat_seconds + MARGIN,
            shutdown_timeout_seconds=SAMPLING,
        )
    except (jax.errors.JaxRuntimeError, RuntimeError, ValueError) as e:
        raise UserError(f"cannot join the other processes: {one_line(e, 200)}") from None
    finally:
        timer.cancel()


def _stop_with_launcher() -> None:
    """Request a stop when the launcher exits, which closes standard input; after `GRACE` seconds, exit without saving.

    `jaxgpt launch` writes nothing to the standard input of its processes.
    """
    while os.read(0, 1):
        pass
    os.kill(os.getpid(), signal.SIGTERM)
    time.sleep(GRACE)
    os._exit(FAILED)
