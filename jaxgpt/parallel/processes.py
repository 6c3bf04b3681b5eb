"""Several processes as one run: who leads, and how they agree.

Every process runs the same program and comes to every question in the same order. Process 0 leads: it decides what only
one may decide, writes the figures and speaks. One process alone is its own leader, and nobody is asked.
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
from jaxgpt.errors import shown
from jaxgpt.parallel.mesh import everywhere, settle

T = TypeVar("T")

PATIENCE = 24 * 3600 * 1000  # milliseconds for an answer of a process that lives: it may be reading terabytes
# What errors of JAX, gloo and Orbax say when a connection to another process breaks.
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
    """Processes of the run."""
    return distributed.global_state.num_processes or 1


def leader() -> bool:
    """Whether this is process 0."""
    return not distributed.global_state.process_id


def decide(make: Callable[[], T]) -> T:
    """What process 0 makes of it, in every process; the others do not do it. It must be of JSON's types.

    Raises:
        UserError: what process 0 met.
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


def agree(make: Callable[[], T], facts: Callable[[T], Mapping[str, Any]]) -> T:
    """What this process makes of it, once every process has made it and all have the same facts of it.

    Raises:
        UserError: in every process, what one of them met, or the first fact in which they differ, with both values.
    """
    if count() == 1:
        return make()
    made: list[T] = []

    def tell() -> dict[str, str]:
        made.append(make())
        return {name: shown(value) for name, value in facts(made[0]).items()}

    prefix = f"jaxgpt/facts/{next(_rounds)}"
    _client().key_value_set(f"{prefix}/{distributed.global_state.process_id}", json.dumps(_outcome(tell)))

    def judge() -> None:
        told = [json.loads(_client().blocking_key_value_get(f"{prefix}/{n}", PATIENCE)) for n in range(count())]
        if errors := [(n, each["error"]) for n, each in enumerate(told) if "error" in each]:
            same = len(errors) == len(told) and len({error for _, error in errors}) == 1
            raise UserError(errors[0][1] if same else f"process {errors[0][0]}: {errors[0][1]}")
        if difference := first_difference([each["value"] for each in told]):
            raise UserError(f"the processes disagree: {difference}; start all with one command, one code, one data")

    decide(judge)
    return made[0]


def first_difference(told: list[dict[str, str]]) -> str:
    """The first fact of process 0 that another process has otherwise, with both values; "" where there is none."""
    for n, other in enumerate(told):
        for name in told[0] | other:
            here, there = told[0].get(name, "missing"), other.get(name, "missing")
            if here != there:
                return f"{name} is {here} in process 0, {there} in process {n}"
    return ""


def tells_of_loss(error: Exception) -> bool:
    """Whether it is what a broken connection to another process looks like; never where this process is alone."""
    known = isinstance(error, UserError) or (isinstance(error, OSError) and error.errno)
    return count() > 1 and not known and any(word in str(error) for word in BROKEN)


def say_goodbye(seconds: float) -> None:
    """Tell the others that this process leaves. Process 0, through which they talk, is the last, if they are in time."""
    client, me, end = _client(), distributed.global_state.process_id, time.monotonic() + seconds
    if client is None:
        return
    with contextlib.suppress(jax.errors.JaxRuntimeError):  # they are gone already, or are not in time
        if not leader():
            client.key_value_set(f"jaxgpt/left/{me}", "")
            return
        for n in range(1, count()):
            client.blocking_key_value_get(f"jaxgpt/left/{n}", max(int(1000 * (end - time.monotonic())), 1))


def collected(tree: Any) -> Any:
    """Arrays that are in parts on the devices of all processes, whole on each host. All have to ask for it."""
    return tree if count() == 1 else multihost_utils.process_allgather(tree, tiled=True)


class Poll:
    """The strongest wish of all processes, asked for without waiting for the devices: `ask` answers `lag` calls later.

    Wishes are small numbers, and the largest wins. All processes get the same answer from the same call, so they act on
    it at the same step. One process alone gets its own wish at once.
    """

    def __init__(self, mesh: Mesh, lag: int) -> None:
        self.mesh, self.lag = mesh, lag
        self._answers: deque[jax.Array] = deque()

    @cached_property
    def _strongest(self) -> Any:
        return jax.jit(jnp.max, out_shardings=everywhere(self.mesh))

    def ask(self, wish: int) -> int:
        """Tell this process's wish, and get everybody's strongest; 0 as long as there is no answer."""
        if count() == 1:
            return wish
        n = self.mesh.devices.size
        place = NamedSharding(self.mesh, PartitionSpec(self.mesh.axis_names))
        wishes = jax.make_array_from_callback((n,), place, lambda index: np.full(n, wish, np.int32)[index])
        self._answers.append(settle(self.mesh, self._strongest(wishes)))
        return int(self._answers.popleft()) if len(self._answers) > self.lag else 0

    def forget(self) -> None:
        """Drop the answers that are under way: what they ask for has been done."""
        self._answers.clear()


def _client() -> Any:
    return distributed.global_state.client


def _outcome(make: Callable[[], Any]) -> dict[str, Any]:
    try:
        return {"value": make()}
    except UserError as e:
        return {"error": str(e)}
