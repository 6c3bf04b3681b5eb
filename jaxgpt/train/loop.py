"""The host's side of training: feed the device, read what it measured a little later, evaluate, save, stop well."""

from __future__ import annotations

import math
import platform
import signal
import time
from collections import deque
from collections.abc import Iterator
from contextlib import contextmanager
from dataclasses import asdict, dataclass
from typing import Any, NamedTuple, Protocol

import flax
import jax

import jaxgpt
from jaxgpt.config import Config
from jaxgpt.data import Dataset, Windows
from jaxgpt.train.build import Program
from jaxgpt.train.checkpoint import Checkpoints, choose, restore_state, steps
from jaxgpt.train.evaluate import Evaluation, eval_params, evaluate
from jaxgpt.train.metrics import MetricsFile
from jaxgpt.train.run import Run
from jaxgpt.train.step import TrainState

LAG = 2  # steps that may be under way before the oldest one's figures are read


class TrainingFailed(RuntimeError):
    """The work failed, through no fault of the command: one line."""


class Reporter(Protocol):
    """Who is told how it goes. Figures are named as in metrics.jsonl."""

    def progress(self, figures: dict[str, float]) -> None: ...
    def evaluated(self, step: int, result: Evaluation) -> None: ...


class Outcome(NamedTuple):
    """How a run ended.

    Attributes:
        state: at the end.
        evaluation: the last one, if there was any.
        interrupted: whether it was asked to stop before its last step.
    """

    state: TrainState
    evaluation: Evaluation | None
    interrupted: bool


@dataclass
class Stop:
    """Whether somebody asked to stop."""

    requested: bool = False


@contextmanager
def stop_on_signal() -> Iterator[Stop]:
    """Within this, a first SIGINT or SIGTERM asks to stop at the end of the step; a second one ends at once."""
    stop = Stop()

    def handle(number: int, _: Any) -> None:
        if stop.requested:
            raise KeyboardInterrupt
        stop.requested = True

    before = {number: signal.signal(number, handle) for number in (signal.SIGINT, signal.SIGTERM)}
    try:
        yield stop
    finally:
        for number, handler in before.items():
            signal.signal(number, handler)


def fit(
    program: Program, data: Dataset, run: Run, reporter: Reporter, resume: bool, start: TrainState | None
) -> Outcome:
    """Train to the last step of the config, from the run's last checkpoint if `resume`.

    Args:
        program: what to run.
        data: what to run it on.
        run: where it is kept; config.json and tokenizer.json are there already.
        reporter: who is told.
        resume: go on from the last whole checkpoint.
        start: the state to begin with, instead of fresh weights.

    Raises:
        UserError: there is nothing to go on from: never a silent start from the beginning.
        TrainingFailed: the loss or the gradient is no longer finite. The last good checkpoint stays.
    """
    last = choose(run.checkpoints, "last") if resume else None
    if last is not None:
        state = program.from_checkpoint(restore_state(run.checkpoints, last, program.abstract_checkpoint))
    else:
        state = program.init() if start is None else start
    metrics = MetricsFile(run.metrics, resume_step=last)
    try:
        with Checkpoints(run.checkpoints) as checkpoints, stop_on_signal() as stop:
            return _Loop(program, data, run, reporter, checkpoints, metrics, stop).run(state)
    finally:
        metrics.close()


class _Loop:
    def __init__(
        self,
        program: Program,
        data: Dataset,
        run: Run,
        reporter: Reporter,
        checkpoints: Checkpoints,
        metrics: MetricsFile,
        stop: Stop,
    ) -> None:
        self.program, self.data, self.directory, self.reporter = program, data, run, reporter
        self.checkpoints, self.metrics, self.stop = checkpoints, metrics, stop
        self.config: Config = program.config
        self.metadata = {"config": asdict(self.config), "versions": versions()}
        # Steps whose figures are still on the device. They are waited for after the first step and before an evaluation.
        self.pending: deque[tuple[int, dict[str, jax.Array]]] = deque()
        self.evaluation: Evaluation | None = None
        self.saved: int | None = None
        self.clock = _Clock()

    def run(self, state: TrainState) -> Outcome:
        train = self.config.train
        first = int(state.step)
        windows = Windows(
            self.data.train,
            self.config.model.block_size,
            train.seed,
            self.config.data.sampling,
            self.config.data.stride,
        )
        self.saved = first if first else None
        for step in range(first, train.steps):
            if self.stop.requested:
                break
            batch = windows.batch_at(step, train.batch_size)
            check_ids(batch, self.config.model.vocab_size, step)
            state, figures = self.program.step(state, self.program.put(batch))
            self.pending.append((step, figures))
            # The first step's figures are waited for: its compilation is no part of the speed.
            self._read(LAG if step > first else 0)
            done = step + 1
            if done % train.eval_every == 0 or done == train.steps:
                self._evaluate(state, done)
            elif train.checkpoint_every and done % train.checkpoint_every == 0:
                self._read(0)
                self._save(state, done, None)
        done = int(state.step)
        self._read(0)
        if self.saved != done:
            self._save(state, done, None)
        self.checkpoints.wait()
        return Outcome(state, self.evaluation, interrupted=done < train.steps)

    def _read(self, leave: int) -> None:
        """Take in the figures of all steps but the last `leave`."""
        train = self.config.train
        while len(self.pending) > leave:
            step, device_figures = self.pending.popleft()
            figures = {name: float(value) for name, value in jax.device_get(device_figures).items()}
            for name in ("loss", "grad_norm"):
                if not math.isfinite(figures[name]):
                    raise TrainingFailed(self._failure(name, figures[name], step))
            self.clock.count(self._tokens_per_step)
            if step % train.log_every == 0 or step == train.steps - 1:
                line = {"step": step} | figures | self.clock.figures(step + 1, self._tokens_per_step)
                self.metrics.write(**line)
                self.reporter.progress(line)

    @property
    def _tokens_per_step(self) -> int:
        return self.config.train.batch_size * self.config.model.block_size

    def _evaluate(self, state: TrainState, done: int) -> None:
        self._read(0)
        with self.clock.paused():
            params = eval_params(state, self.config)
            result = evaluate(self.program, params, self.data.val, lambda: self.stop.requested)
            if result is None:
                return
            if not math.isfinite(result.loss):
                raise TrainingFailed(self._failure("validation loss", result.loss, done))
            self.evaluation = result
            self.metrics.write(step=done, val_loss=result.loss, val_stderr=result.stderr)
            self.reporter.evaluated(done, result)
            self._save(state, done, result.loss)

    def _save(self, state: TrainState, done: int, val_loss: float | None) -> None:
        self.checkpoints.save(self.program.to_checkpoint(state), val_loss, self.metadata)
        self.saved = done

    def _failure(self, name: str, value: float, step: int) -> str:
        self.checkpoints.wait()
        kept = steps(self.directory.checkpoints)
        good = f"the checkpoint of step {kept[-1]} is kept" if kept else "there is no checkpoint yet"
        return f"{name} is {value} at step {step}: stopped, {good} (a lower optim.learning_rate may help)"


class _Clock:
    """Mean speed of training so far, without what evaluation and the first step (its compilation) took."""

    def __init__(self) -> None:
        self.started = time.perf_counter()
        self.since: float | None = None
        self.tokens = 0

    def count(self, tokens: int) -> None:
        if self.since is None:
            self.since = time.perf_counter()
        else:
            self.tokens += tokens

    def figures(self, steps_done: int, tokens_per_step: int) -> dict[str, float]:
        now = time.perf_counter()
        figures: dict[str, float] = {"tokens": steps_done * tokens_per_step, "elapsed_seconds": now - self.started}
        if self.tokens and self.since is not None:
            figures["tokens_per_second"] = self.tokens / (now - self.since)
        return figures

    @contextmanager
    def paused(self) -> Iterator[None]:
        before = time.perf_counter()
        yield
        if self.since is not None:
            self.since += time.perf_counter() - before


def check_ids(batch: Any, vocab_size: int, step: int) -> None:
    """Ids beyond the vocabulary would not fail on a device but be read as another id, or as NaN.

    Raises:
        TrainingFailed: with the id and the step.
    """
    if (highest := int(batch.max())) >= vocab_size:
        raise TrainingFailed(f"id {highest} in the batch of step {step} is beyond the vocabulary of {vocab_size}")


def versions() -> dict[str, str]:
    """What a checkpoint was made with."""
    return {
        "jaxgpt": jaxgpt.__version__,
        "jax": jax.__version__,
        "flax": flax.__version__,
        "python": platform.python_version(),
    }
