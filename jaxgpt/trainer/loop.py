"""The host's side of training: feed the device, read what it measured a little later, evaluate, save, stop well."""

from __future__ import annotations

import math
import os
import time
from collections import deque
from collections.abc import Callable
from contextlib import nullcontext
from dataclasses import asdict
from functools import partial
from pathlib import Path
from typing import TYPE_CHECKING, Any, NamedTuple

import jax
import numpy as np

from jaxgpt.checkpoint.index import kept, val_losses
from jaxgpt.checkpoint.run import Run
from jaxgpt.checkpoint.versions import versions
from jaxgpt.config import Config
from jaxgpt.data import Batches, Dataset
from jaxgpt.errors import TrainingFailed
from jaxgpt.parallel.processes import Poll, decide, leader
from jaxgpt.train.step import TrainState
from jaxgpt.trainer.clock import Clock
from jaxgpt.trainer.divergence import first_non_finite
from jaxgpt.trainer.evaluation import Evaluation, eval_params, evaluate
from jaxgpt.trainer.metrics import MetricsFile
from jaxgpt.trainer.program import Program, compiling, explain_failure
from jaxgpt.trainer.resume import tokens_seen
from jaxgpt.trainer.signals import Stop, stop_on_signal
from jaxgpt.trainer.state import from_checkpoint, to_checkpoint

if TYPE_CHECKING:
    from jaxgpt.checkpoint.store import Checkpoints

LAG = 2  # calls that may be under way before the oldest one's figures are read
SAVING = "saving a checkpoint"
SAVE, STOP = 1, 2  # what a process may wish between two steps; the stronger wish of all wins


class Reporter:
    """Receives the events of a run. The methods do nothing: a subclass overrides those it is interested in."""

    def stage(self, name: str, done: int = 0, total: int = 0) -> None:
        """Called when something other than training steps begins ("evaluating") or advances; "" when it has ended."""

    def compiled(self, seconds: float) -> None:
        """Called when the train step has been compiled and the state is there; with the seconds since the start."""

    def progress(self, figures: dict[str, float]) -> None:
        """Called for every step, once its metrics have been read.

        Args:
            figures: named as in metrics.jsonl, but `tokens_per_second` is the speed of the last seconds; and
                `seconds_left`. Both are missing as long as they are unknown.
        """

    def evaluated(self, step: int, result: Evaluation) -> None:
        """Called after an evaluation."""

    def note(self, text: str) -> None:
        """Called with a line that the user should see."""

    def signaled(self, number: int, again: bool) -> None:
        """Called in another thread when SIGINT or SIGTERM arrives; `again`: for the second time or more."""


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


def fit(
    program: Program,
    data: Dataset,
    run: Run,
    reporter: Reporter,
    resume_step: int | None,
    start: TrainState | None,
    until: int | None = None,
) -> Outcome:
    """Train to the last step of the config, from a checkpoint of the run or from the beginning.

    Args:
        program: what to run.
        data: what to run it on.
        run: where it is kept; config.json and tokenizer.json are there already.
        reporter: who is told.
        resume_step: the checkpoint to go on from (`checkpoint.index.latest_valid` finds it); None: start at step 0.
        start: the state to start with at step 0, instead of fresh weights.
        until: stop and save at this step, as if somebody had asked for it; None: go to the end.

    Raises:
        UserError: the checkpoint cannot be read.
        TrainingFailed: the loss or the gradient is no longer finite, the devices' memory is not enough, or nothing can be
            written. The last good checkpoint stays.
    """
    began = time.perf_counter()
    layout = program.layout
    train = layout.config.train
    seen = 0 if resume_step is None else decide(lambda: tokens_seen(run, resume_step, layout.config))
    unfinished = (resume_step or 0) < (until or train.steps)
    with stop_on_signal(reporter.signaled) as stop:
        reporter.stage("compiling" if unfinished else "reading the checkpoint")
        with compiling(program) if unfinished else nullcontext():
            from jaxgpt.checkpoint.store import Checkpoints, Keep, restore_state  # Orbax is long to import

            if resume_step is not None:
                state = from_checkpoint(layout, restore_state(run.checkpoints, resume_step, layout.checkpoint))
            else:
                state = program.init() if start is None else start
        reporter.stage("")
        if unfinished:
            reporter.compiled(time.perf_counter() - began)
        try:
            metrics = MetricsFile(run.metrics if leader() else Path(os.devnull), resume_step=resume_step)
            try:
                keep = Keep(train.keep_last, train.keep_best, train.keep_every)
                with Checkpoints(run.checkpoints, keep) as checkpoints:
                    loop = _Loop(program, data, reporter, checkpoints, metrics, stop, resume_step, seen)
                    return loop.run(state, until or train.steps)
            finally:
                metrics.close()
        except OSError as e:
            why = f"{e.filename or run.path}: {e.strerror or e}"
            raise TrainingFailed(f"{why}: stopped, {kept(run.checkpoints)}") from None
        except jax.errors.JaxRuntimeError as e:
            if "RESOURCE_EXHAUSTED" not in str(e):
                raise
            why = explain_failure(e, layout.mesh, train.microbatch)
            raise TrainingFailed(f"{why}: stopped, {kept(run.checkpoints)}") from None
        except TrainingFailed as e:
            advice = " (a lower optim.learning_rate may help)" if isinstance(e, _Diverged) else ""
            raise TrainingFailed(f"{e}: stopped, {kept(run.checkpoints)}{advice}") from None


class _Diverged(TrainingFailed):
    """The figures are no longer those of training."""


class _Loop:
    def __init__(
        self,
        program: Program,
        data: Dataset,
        reporter: Reporter,
        checkpoints: Checkpoints,
        metrics: MetricsFile,
        stop: Stop,
        resume_step: int | None,
        tokens_seen: int,
    ) -> None:
        self.program, self.data, self.reporter = program, data, reporter
        self.checkpoints, self.metrics, self.stop = checkpoints, metrics, stop
        self.layout = program.layout
        self.config: Config = program.layout.config
        self.batches = Batches.of(self.config, data.train)
        self.metadata = {"config": asdict(self.config), "versions": versions(), "data": data.fingerprint}
        self.first, self.tokens_seen = resume_step or 0, tokens_seen
        # Calls whose figures are still on the device, by their first steps. They are waited for after the first call and
        # before an evaluation.
        self.pending: deque[tuple[int, Callable[[], list[dict[str, Any]]]]] = deque()
        self.evaluation: Evaluation | None = None
        self.saved = resume_step
        self.clock = Clock(metrics.elapsed_seconds)
        self.poll = Poll(program.layout.mesh, LAG)

    def run(self, state: TrainState, until: int) -> Outcome:
        train = self.config.train
        first = self.first
        if first and self._is_evaluated(first) and decide(lambda: first not in val_losses(self.checkpoints.directory)):
            self._evaluate(state, first)  # the run was stopped while it was at it
        done, end = first, min(until, train.steps)
        while done < end:
            wish = self.poll.ask(self._wish())
            if wish == STOP:
                break
            if wish == SAVE and done > first and self.saved != done:
                self._save(state, done, None, temporary=True)
            # The first step is a call of its own, and is waited for: what only it takes is no part of the speed.
            n = 1 if done == first else self._steps_ahead(done, end)
            batches = self.program.put_steps([self.batches.at(step) for step in range(done, done + n)])
            state, figures = self.program.steps(state, batches, n)
            self.pending.append((done, figures))
            self._read(LAG if done > first else 0)
            done += n
            if self._is_evaluated(done):
                self._evaluate(state, done)
            elif train.checkpoint_every and done % train.checkpoint_every == 0:
                self._save(state, done, None)
        done = int(state.step)
        self._read(0)
        if self.saved != done:
            self._save(state, done, None, temporary=True)
        self.reporter.stage(SAVING)
        self.checkpoints.wait()
        self.reporter.stage("")
        return Outcome(state, self.evaluation, interrupted=done < train.steps)

    def _steps_ahead(self, done: int, end: int) -> int:
        """How many updates the next call makes: up to the next evaluation or checkpoint."""
        train = self.config.train
        stops = [end, *((done // every + 1) * every for every in (train.eval_every, train.checkpoint_every) if every)]
        return min(train.steps_per_call, min(stops) - done)

    def _wish(self) -> int:
        """What this process would like to do before the next step."""
        if self.stop.requested:
            return STOP
        seconds = self.config.train.checkpoint_seconds
        return SAVE if seconds and self.clock.since_save() > seconds else 0

    def _is_evaluated(self, done: int) -> bool:
        return done % self.config.train.eval_every == 0 or done == self.config.train.steps

    def _read(self, leave: int) -> None:
        """Take in the figures of all calls but the last `leave`."""
        while len(self.pending) > leave:
            first, figures = self.pending.popleft()
            of_steps = figures()
            self.clock.call_ended(len(of_steps) * self._tokens_per_step)
            for ahead, of_step in enumerate(of_steps):
                self._note(first + ahead, of_step)

    def _note(self, step: int, of_step: dict[str, Any]) -> None:
        train = self.config.train
        squares = of_step.pop("grad_squares")
        figures = {name: float(value) for name, value in of_step.items()}
        self._check(step, figures, squares)
        self.clock.count(self._tokens_per_step)
        if step % train.log_every == 0 or step == train.steps - 1:
            line = {"step": step} | figures | self.clock.figures(self._tokens(step + 1))
            self.metrics.write(**line)
        tokens_left = (train.steps - step - 1) * self._tokens_per_step
        self.reporter.progress({"step": step} | figures | self.clock.recent(tokens_left))

    def _check(self, step: int, figures: dict[str, float], squares: np.ndarray) -> None:
        """Whether training can go on after a step.

        Raises:
            TrainingFailed: it cannot.
        """
        optim = self.config.optim
        wrong = next((f"{n} is {figures[n]}" for n in ("loss", "grad_norm") if not math.isfinite(figures[n])), "")
        skipped = int(figures.pop("skipped_in_a_row", 0))
        if skipped:
            what = wrong or f"loss {figures['loss']:.4g} or grad_norm {figures['grad_norm']:.4g} is a spike"
            self.reporter.note(f"step {step}: {what}; its update is left out ({skipped} in a row)")
        limit = skipped >= optim.skip_limit
        if (wrong and optim.not_finite == "stop") or limit:
            told = f"{wrong or 'a spike'} at step {step}" + (
                f" after {skipped} updates left out in a row" if limit else ""
            )
            where = first_non_finite(self.layout.state.params, squares)
            raise _Diverged(f"{told}, {where}" if where else told)

    @property
    def _tokens_per_step(self) -> int:
        return self.config.train.batch_size * self.config.model.block_size

    def _tokens(self, done: int) -> int:
        """Tokens trained on in all, also where a run was resumed with another batch size."""
        return self.tokens_seen + (done - self.first) * self._tokens_per_step

    def _evaluate(self, state: TrainState, done: int) -> None:
        self._read(0)
        with self.clock.paused() as seconds:
            params = eval_params(state, self.config)
            whole = done == self.config.train.steps
            stage = partial(self.reporter.stage, "evaluating")
            stage()
            stopped = lambda: self.poll.ask(self._wish()) == STOP  # noqa: E731
            result = evaluate(self.program, params, self.data.val, stopped, whole, stage)
            self.reporter.stage("")
            if result is None:
                return
            if not math.isfinite(result.loss):
                raise _Diverged(f"validation loss is {result.loss} at step {done}")
            self.evaluation = result
            figures = {"val_loss": result.loss, "val_stderr": result.stderr, "val_windows": result.windows}
            self.metrics.write(step=done, **figures, val_seconds=seconds())
            self.reporter.evaluated(done, result)
            if self.saved == done:
                self.checkpoints.note_val_loss(done, result.ranking)
            else:
                self._save(state, done, result.ranking)

    def _save(self, state: TrainState, done: int, val_loss: float | None, *, temporary: bool = False) -> None:
        self._read(0)  # nothing is kept that is not known to be good
        metadata = self.metadata | {"tokens": self._tokens(done)}
        self.reporter.stage(SAVING)  # in the background, after the one before and a copy of the state
        self.checkpoints.save(to_checkpoint(self.layout, state), val_loss, metadata, temporary=temporary)
        self.reporter.stage("")
        self.saved = done
        self.clock.saved()
        self.poll.forget()
