"""Coordination of the processes of a run.

Every process runs the same program, and calls communicating functions in the same order, after `use_cores`. Process 0, the
leader, creates or opens the run, writes metrics and prints. A single process is its own leader.
"""

from __future__ import annotations

import json
import re
from collections import Counter, deque
from collections.abc import Callable, Mapping, Sequence
from typing import Any, NamedTuple, TypeVar, cast

import jax
import jax.numpy as jnp
import numpy as np
from jax.experimental import multihost_utils
from jax.sharding import Mesh, NamedSharding, PartitionSpec

from jaxgpt.errors import UserError
from jaxgpt.parallel.mesh import block_on_cpu_mesh
from jaxgpt.parallel.rules import replicated

T = TypeVar("T")

# This pattern matches error messages of JAX, gloo and Orbax after the connection to another process breaks.
BROKEN = re.compile("Gloo|Connection|Socket closed|UNAVAILABLE|[Cc]oordination service|heartbeat|timed out|[Bb]arrier")

# `jax.process_count()` and `jax.process_index()` would start the backend.
_count = 1  # number of processes
_index = 0  # index of this process


class SharedError(UserError):
    """A `UserError` that every process raises at the same call, so that all can still save the run."""


def set_place(count: int, index: int) -> None:
    """Set the number of processes, and the index of this process."""
    global _count, _index
    _count = count
    _index = index


def process_count() -> int:
    """Return the number of processes of the run."""
    return _count


def process_index() -> int:
    """Return the index of this process."""
    return _index


def is_leader() -> bool:
    """Return whether this is process 0."""
    return _index == 0


def on_leader(make: Callable[[], T]) -> T:
    """Call a function in process 0 only, and return its result, a JSON value, in every process.

    Raises:
        UserError: in every process, if `make` raises it in process 0.
    """
    if _count == 1:
        return make()
    own = _attempt(make) if is_leader() else Attempt()
    of_leader, *_ = _exchange(own)
    if of_leader.error is not None:
        raise SharedError(of_leader.error)
    return cast(T, of_leader.value)


def from_all(make: Callable[[], T]) -> list[T]:
    """Call a function in every process, and return all results, JSON values, in the order of the processes.

    Raises:
        UserError: in every process, if `make` raises it in any process.
    """
    if _count == 1:
        return [make()]
    return _values(_exchange(_attempt(make)))


def same_on_all(make: Callable[[], T], facts: Callable[[T], Mapping[str, Any]]) -> T:
    """Call a function in every process and return its result; the `facts` of all results must be equal.

    Raises:
        UserError: in every process, if `make` raises it in any process, or a fact differs; the message has both values.
    """
    if _count == 1:
        return make()
    # A process whose `make` fails exchanges the error in place of the facts, so no process waits for it.
    own = _attempt(make)
    described = own
    if own.error is None:
        described = _attempt(lambda: {name: repr(value) for name, value in facts(own.value).items()})
    found = _values(_exchange(described))

    leader = found[0]
    for n, other in enumerate(found):
        for name in leader | other:
            here = leader.get(name, "missing")
            there = other.get(name, "missing")
            if here != there:
                difference = f"{name} is {here} in process 0, {there} in process {n}"
                raise SharedError(
                    f"the processes disagree: {difference}; start all with the same command, code and data"
                )
    return cast(T, own.value)


def is_peer_failure(error: Exception) -> bool:
    """Return whether an error looks like a broken connection to another process."""
    if _count == 1 or isinstance(error, UserError):
        return False
    if isinstance(error, OSError) and error.errno:  # an error of this process, such as an unreadable file
        return False
    return BROKEN.search(str(error)) is not None


class Poll:
    """Exchange requests between processes, without blocking on the latest exchange, except on CPU meshes.

    Requests are small integers; the answer is their maximum over processes. All processes receive it from the same call of
    `ask`, `lag` calls after the requests, so they act on it at the same step. A single process receives its own request
    immediately; on CPU meshes, the lag is 0. JAX's `reached_preemption_sync_point` reacts to SIGTERM only: neither to
    Ctrl-C nor to a timer.
    """

    def __init__(self, mesh: Mesh, lag: int) -> None:
        self.mesh = mesh
        # On CPUs, each exchange blocks anyway. Without a lag, a process with hanging data can still stop all processes.
        self.lag = 0 if mesh.devices.flat[0].platform == "cpu" else lag
        self._largest = jax.jit(jnp.max, out_shardings=replicated(mesh))
        self._answers: deque[jax.Array] = deque()

    def ask(self, request: int) -> int:
        """Send a request; return the largest request from `lag` calls ago (initially and after `forget`, 0)."""
        if _count == 1:
            return request
        sharding = NamedSharding(self.mesh, PartitionSpec(self.mesh.axis_names))
        copies = np.full(self.mesh.devices.size, request, np.int32)
        requests = jax.make_array_from_callback(copies.shape, sharding, lambda index: copies[index])
        answer = block_on_cpu_mesh(self.mesh, self._largest(requests))
        self._answers.append(answer)
        if len(self._answers) <= self.lag:
            return 0
        return int(self._answers.popleft())

    def forget(self) -> None:
        """Drop the pending answers, after their requests have been fulfilled."""
        self._answers.clear()


class Attempt(NamedTuple):
    """A call of a function in one process: its result, or the message of its `UserError`."""

    value: Any = None
    error: str | None = None


def _attempt(make: Callable[[], Any]) -> Attempt:
    try:
        return Attempt(value=make())
    except UserError as e:
        return Attempt(error=str(e))


def _values(attempts: Sequence[Attempt]) -> list[Any]:
    """Return the results of all processes; raise `SharedError` if a process has an error."""
    errors = {n: attempt.error for n, attempt in enumerate(attempts) if attempt.error is not None}
    if errors:
        n, error = next(iter(errors.items()))
        is_everywhere = len(errors) == len(attempts) and len(set(errors.values())) == 1
        raise SharedError(error if is_everywhere else f"process {n}: {error}")
    return [attempt.value for attempt in attempts]


def _exchange(own: Attempt) -> list[Attempt]:
    """Return the attempts of all processes, in order; their results are JSON values."""
    devices = Counter(device.process_index for device in jax.devices())
    if len(set(devices.values())) > 1:  # `process_allgather` needs the same number of devices in each process
        raise SharedError(
            f"the processes have {sorted(devices.values())} devices: start all with the same number (CPUs: JAX_NUM_CPU_DEVICES)"
        )

    data = np.frombuffer(json.dumps(own).encode(), np.uint8)
    sizes = multihost_utils.process_allgather(np.int32(data.size))
    # Sizes are rounded up to a power of 2, so that few shapes are compiled.
    largest = int(sizes.max())
    padded = np.zeros(1 << (largest - 1).bit_length(), np.uint8)
    padded[: data.size] = data
    rows = multihost_utils.process_allgather(padded)
    return [Attempt(*json.loads(row[:size].tobytes())) for row, size in zip(rows, sizes, strict=True)]
