"""Training steps on random ids for measurements, and the stopwatch that times them."""

from __future__ import annotations

import time
from collections import deque
from collections.abc import Callable
from typing import Any

import jax
import numpy as np

from jaxgpt.data import Batches
from jaxgpt.data.tokens import Tokens
from jaxgpt.data_files import has_documents
from jaxgpt.trainer.program import Program
from jaxgpt.trainer.record import LAG

Step = Callable[[Any, Any], tuple[Any, Any]]  # (state, batch) -> (state, metrics)


class Stopwatch:
    """A stopwatch: each call returns the seconds since the previous call, or since its creation."""

    def __init__(self) -> None:
        self._last = time.perf_counter()

    def __call__(self) -> float:
        last = self._last
        self._last = time.perf_counter()
        return self._last - last


class TrainingSteps:
    """Training steps on random ids, dispatched ahead of the devices as in the training loop.

    Attributes:
        state: the train state after the last dispatched step.
        input_seconds: seconds per step to prepare a batch and put it on the devices, for each call.
        per_call: default and maximum number of steps of a call, `train.steps_per_call`.
    """

    def __init__(self, program: Program, state: Any) -> None:
        config = program.config
        T = config.window
        V = config.model.vocab_size
        ids = np.random.default_rng(0).integers(0, V, max(1 << 20, 4 * T), np.int32)
        self.state = state
        self.input_seconds: list[float] = []
        self.per_call = config.train.steps_per_call
        self._program = program
        self._batches = Batches.of(config, Tokens([ids], end_ids=(0,) if has_documents(config) else ()))
        self._next = 0  # number of the next step

    def batch(self, steps: int) -> Any:
        """Return the batches of the next call, for 1 to `per_call` steps, as `Program.step` takes them."""
        numbers = range(self._next, self._next + steps)
        return self._program.batches.put_for_call([self._batches.at(number) for number in numbers])

    def run(self, calls: int, steps: int | None = None, take: Step | None = None) -> list[float]:
        """Run a number of calls; return the seconds per step of each call.

        With more than `LAG + 1` calls, the first call and the last `LAG` calls are omitted.

        Args:
            calls: number of calls.
            steps: steps of a call; None: `per_call`.
            take: function that takes the steps of a call; None: the program's own step.
        """
        if steps is None:
            steps = self.per_call
        if take is None:
            take = self._program.step
        pending: deque[Any] = deque()  # metrics of the calls in flight
        times: list[float] = []
        clock = Stopwatch()
        for call in range(calls):
            host_clock = Stopwatch()
            batch = self.batch(steps)
            self.input_seconds.append(host_clock() / steps)

            self.state, metrics = take(self.state, batch)
            self._next += steps
            pending.append(metrics)
            if call >= LAG:
                jax.block_until_ready(pending.popleft())
                times.append(clock() / steps)
        for metrics in pending:
            jax.block_until_ready(metrics)
            times.append(clock() / steps)

        # Omit the first call, which started on idle devices, and the last calls, which may end before the host blocks on them.
        return times[1 : len(times) - LAG] if len(times) > LAG + 1 else times
