"""Coordination of the processes of one run.

Every process runs the same program and calls these functions in the same order. Process 0, the leader, makes the decisions,
writes metrics and prints. A single process is its own leader, and communicates with none.
"""

from __future__ import annotations

import contextlib
import itertools
import json
import time
from collections import deque
from collections.abc import Callable, Mapping
from functools import cached_property
from typing import Any, TypeVar

import jax
import jax.numpy as jnp
import numpy as np
from jax._src import distributed  # whose client Orbax uses, too
from jax.experimental import multihost_utils
from jax.sharding import Mesh, NamedSharding, PartitionSpec

from jaxgpt.config import UserError
from jaxgpt.errors import short_repr
from jaxgpt.parallel.mesh import block_on_cpu_mesh, replicated

T = TypeVar("T")

PATIENCE = 24 * 3600 * 1000  # milliseconds to wait for a live process, which may be reading terabytes
# Parts of the errors of JAX, gloo and Orbax when the connection to another process breaks.
BROKEN = (
    "Gloo",
    "Connection",
    "Socket closed",
    "UNAVAILABLE",
    "oordination service",
    "heartbeat",
    "timed out",
    "arrier",
)

_rounds = itertools.count()


def count() -> int:
    """Return the number of processes of the run."""
    return distributed.global_state.num_processes or 1


def leader() -> bool:
    """Return whether this is process 0."""
    return not distributed.global_state.process_id


def on_leader(make: Callable[[], T]) -> T:
    """Call a function in process 0 only, and return its result, a JSON value, in every process.

    Raises:
        UserError: in every process, the error of process 0.
    """
    if count() == 1:
        return make()
    key = f"jaxgpt/decision/{next(_rounds)}"
    if leader():
        said = _outcome(make)
        _client().key_value_set(key, json.dumps(said))
    else:
        said = json.loads(_client().blocking_key_value_get(key, PATIENCE))
    if "error" in said:
        raise UserError(said["error"])
    value: T = said["value"]
    return value


def assert_same_on_all(make: Callable[[], T], facts: Callable[[T], Mapping[str, Any]]) -> T:
    """Call a function in every process, and check that facts about the results are the same in all of them.

    Returns:
        The result of this process.

    Raises:
        UserError: in every process, the error of one of them, or the first fact that differs, with both values.
    """
    if count() == 1:
        return make()
    made: list[T] = []

    def tell() -> dict[str, str]:
        made.append(make())
        return {name: short_repr(value) for name, value in facts(made[0]).items()}

    prefix = f"jaxgpt/facts/{next(_rounds)}"
    _client().key_value_set(f"{prefix}/{distributed.global_state.process_id}", json.dumps(_outcome(tell)))

    def compare() -> None:
        reports = [json.loads(_client().blocking_key_value_get(f"{prefix}/{n}", PATIENCE)) for n in range(count())]
        if errors := [(n, each["error"]) for n, each in enumerate(reports) if "error" in each]:
            same = len(errors) == len(reports) and len({error for _, error in errors}) == 1
            raise UserError(errors[0][1] if same else f"process {errors[0][0]}: {errors[0][1]}")
        if difference := first_difference([each["value"] for each in reports]):
            raise UserError(f"the processes disagree: {difference}; start all with one command, one code, one data")

    on_leader(compare)
    return made[0]


def first_difference(reports: list[dict[str, str]]) -> str:
    """Name the first fact that differs between process 0 and another one, with both values; "" if none does."""
    for n, other in enumerate(reports):
        for name in reports[0] | other:
            here, there = reports[0].get(name, "missing"), other.get(name, "missing")
            if here != there:
                return f"{name} is {here} in process 0, {there} in process {n}"
    return ""


def is_peer_failure(error: Exception) -> bool:
    """Return whether an error looks like a broken connection to another process; never in a single process."""
    known = isinstance(error, UserError) or (isinstance(error, OSError) and error.errno)
    return count() > 1 and not known and any(word in str(error) for word in BROKEN)


def say_goodbye(seconds: float) -> None:
    """Tell the other processes that this one leaves. Process 0, which relays messages, waits for them up to a time limit."""
    client, me, end = _client(), distributed.global_state.process_id, time.monotonic() + seconds
    if client is None:
        return
    with contextlib.suppress(jax.errors.JaxRuntimeError):  # they have left already, or are too late
        if not leader():
            client.key_value_set(f"jaxgpt/left/{me}", "")
            return
        for n in range(1, count()):
            client.blocking_key_value_get(f"jaxgpt/left/{n}", max(int(1000 * (end - time.monotonic())), 1))


def collected(tree: Any) -> Any:
    """Gather arrays that are split over the devices of all processes, on each host. Every process must call it."""
    return tree if count() == 1 else multihost_utils.process_allgather(tree, tiled=True)


class Poll:
    """Exchange requests between processes without waiting for the devices.

    Requests are small numbers, and the largest wins. All processes receive the same answer from the same call of `ask`, `lag`
    calls later, so they act on it at the same step. A single process receives its own request at once.
    """

    def __init__(self, mesh: Mesh, lag: int) -> None:
        self.mesh, self.lag = mesh, lag
        self._answers: deque[jax.Array] = deque()

    @cached_property
    def _largest(self) -> Any:
        return jax.jit(jnp.max, out_shardings=replicated(self.mesh))

    def ask(self, request: int) -> int:
        """Send this process's request, and return the largest of all of `lag` calls ago; 0 if there is none yet."""
        if count() == 1:
            return request
        n = self.mesh.devices.size
        place = NamedSharding(self.mesh, PartitionSpec(self.mesh.axis_names))
        requests = jax.make_array_from_callback((n,), place, lambda index: np.full(n, request, np.int32)[index])
        self._answers.append(block_on_cpu_mesh(self.mesh, self._largest(requests)))
        return int(self._answers.popleft()) if len(self._answers) > self.lag else 0

    def forget(self) -> None:
        """Drop the pending answers, whose requests have been fulfilled."""
        self._answers.clear()


def _client() -> Any:
    return distributed.global_state.client


def _outcome(make: Callable[[], Any]) -> dict[str, Any]:
    try:
        return {"value": make()}
    except UserError as e:
        return {"error": str(e)}
