"""The training loop: feed the devices, read the metrics of earlier steps, evaluate, save checkpoints, and stop cleanly."""

from __future__ import annotations

import math
import os
import time
from collections import deque
from collections.abc import Callable, Iterator
from contextlib import nullcontext
from dataclasses import asdict
from functools import partial
from pathlib import Path
from typing import Any, NamedTuple

import jax
import numpy as np

from jaxgpt.checkpoint.run import Run
from jaxgpt.checkpoint.store import Info, Saver, kept_checkpoint_message, restore, val_losses
from jaxgpt.checkpoint.versions import versions
from jaxgpt.config import Config
from jaxgpt.data import Batches, Data
from jaxgpt.errors import TrainingFailed
from jaxgpt.parallel.chips import peak_flops
from jaxgpt.parallel.processes import Poll, leader, on_leader
from jaxgpt.signals import STOPPING, Stop, stop_on_signal
from jaxgpt.train.step import TrainState
from jaxgpt.trainer.clock import Clock
from jaxgpt.trainer.divergence import first_non_finite
from jaxgpt.trainer.evaluation import Evaluation, eval_params, evaluate
from jaxgpt.trainer.metrics import MetricsFile, flops_per_token
from jaxgpt.trainer.prefetch import prefetched
from jaxgpt.trainer.program import Program, compiling, explain_failure
from jaxgpt.trainer.resume import tokens_seen

LAG = 2  # calls in flight before the metrics of the oldest are read
SAVING = "saving a checkpoint"
SAVE, STOP = 1, 2  # what a process can request between two steps; the largest request of all processes wins


class Reporter:
    """Receives the events of a run. The methods do nothing: a subclass overrides those it is interested in."""

    def stage(self, name: str, done: int = 0, total: int = 0) -> None:
        """Called when work other than training steps starts ("evaluating") or advances; with "" when it ends."""

    def compiled(self, seconds: float) -> None:
        """Called when the train step is compiled and the state is ready, with the seconds since the start."""

    def progress(self, metrics: dict[str, float]) -> None:
        """Called for every step, once its metrics have been read.

        Args:
            metrics: named as in metrics.jsonl, but `tokens_per_second` and `mfu` are of the recent steps; and `seconds_left`.
                They are missing while they are unknown.
        """

    def evaluated(self, step: int, result: Evaluation) -> None:
        """Called after an evaluation."""

    def note(self, text: str) -> None:
        """Called with a line for the user."""


class Outcome(NamedTuple):
    """How a run ended.

    Attributes:
        state: the final state.
        evaluation: the last evaluation, if any.
        interrupted: whether the run stopped before the end of its last step and evaluation.
    """

    state: TrainState
    evaluation: Evaluation | None
    interrupted: bool


def fit(
    program: Program,
    data: Data,
    run: Run,
    reporter: Reporter,
    resume_step: int | None,
    start: TrainState | None,
    until: int | None = None,
) -> Outcome:
    """Train to the last step of the config, from a checkpoint of the run or from step 0.

    Args:
        program: the compiled functions of the config.
        data: the ids to train and evaluate on.
        run: the run directory, with its config.json and tokenizer.json.
        reporter: receives the events of the run.
        resume_step: the checkpoint to resume from (see `checkpoint.store.latest_valid`); None: start at step 0.
        start: the state at step 0; None: random weights.
        until: stop and save at this step, as on a signal; None: train to the end.

    Raises:
        UserError: the checkpoint cannot be read, or an id is outside the vocabulary.
        TrainingFailed: the loss or gradient is not finite, the devices are out of memory, or a file cannot be written. The
            last good checkpoint is kept.
    """
    began = time.perf_counter()
    layout = program.layout
    train = layout.config.train
    seen = 0 if resume_step is None else on_leader(lambda: tokens_seen(run, resume_step))
    unfinished = (resume_step or 0) < (until or train.steps)
    with stop_on_signal(STOPPING if leader() else "") as stop:
        reporter.stage("compiling" if unfinished else "reading the checkpoint")
        with compiling(program) if unfinished else nullcontext():
            from orbax.checkpoint import v1  # noqa: F401 (takes a second, which compiling takes as well)

            if resume_step is not None:
                state = program.from_checkpoint(restore(run.checkpoints, resume_step, layout.abstract_checkpoint))
            else:
                state = program.init() if start is None else start
        reporter.stage("")
        if unfinished:
            reporter.compiled(time.perf_counter() - began)
        try:
            metrics = MetricsFile(run.metrics if leader() else Path(os.devnull), resume_step=resume_step)
            try:
                with Saver(run.checkpoints, train) as checkpoints:
                    loop = _Loop(program, data, reporter, checkpoints, metrics, stop, resume_step, seen)
                    return loop.run(state, until or train.steps)
            finally:
                metrics.close()
        except OSError as e:
            why = f"{e.filename or run.path}: {e.strerror or e}"
            raise TrainingFailed(f"{why}: stopped, {kept_checkpoint_message(run.checkpoints)}") from None
        except jax.errors.JaxRuntimeError as e:
            if "RESOURCE_EXHAUSTED" not in str(e):
                raise
            why = explain_failure(e, layout.mesh, train.microbatch)
            raise TrainingFailed(f"{why}: stopped, {kept_checkpoint_message(run.checkpoints)}") from None
        except TrainingFailed as e:
            advice = " (a lower optim.learning_rate may help)" if isinstance(e, _Diverged) else ""
            raise TrainingFailed(f"{e}: stopped, {kept_checkpoint_message(run.checkpoints)}{advice}") from None


class _Diverged(TrainingFailed):
    """Loss or gradients diverged."""


class _Loop:
    def __init__(
        self,
        program: Program,
        data: Data,
        reporter: Reporter,
        checkpoints: Saver,
        metrics: MetricsFile,
        stop: Stop,
        resume_step: int | None,
        tokens_seen: int,
    ) -> None:
        self.program, self.data, self.reporter = program, data, reporter
        self.checkpoints, self.metrics, self.stop = checkpoints, metrics, stop
        self.layout = program.layout
        self.config: Config = program.layout.config
        self.about = {"config": asdict(self.config), "versions": versions(), "data": data.fingerprint}
        if program.base is not None:
            self.about["base"] = program.base.checksum
        self.first, self.tokens_seen = resume_step or 0, tokens_seen
        windows_seen = tokens_seen // self.config.model.block_size
        self.batches = Batches.of(self.config, data.train, windows_seen - self.first * self.config.train.batch_size)
        # First steps of the calls in flight, and the functions that wait for their metrics.
        self.pending: deque[tuple[int, Callable[[], list[dict[str, Any]]]]] = deque()
        self.evaluation: Evaluation | None = None
        self.saved = resume_step
        flops = flops_per_token(self.config.model, self.layout.abstract_weights, self.config.lora)
        peak = peak_flops(self.layout.mesh, self.config.train.compute_dtype)
        self.clock = Clock(metrics.elapsed_seconds, flops / peak if peak else 0.0)
        self.poll = Poll(program.layout.mesh, LAG)

    def run(self, state: TrainState, until: int) -> Outcome:
        train = self.config.train
        first, evaluated = self.first, True
        if (
            first
            and self._is_evaluated(first)
            and on_leader(lambda: first not in val_losses(self.checkpoints.directory))
        ):
            evaluated = self._evaluate(state, first)  # the run was stopped during this evaluation
        with prefetched(self._batches, self._calls(first, min(until, train.steps))) as prepared:
            for steps, batches in prepared:
                request = self.poll.ask(self._request())
                if request == STOP:
                    break
                if request == SAVE and steps.start > first and self.saved != steps.start:
                    self._save(state, steps.start, None, temporary=True)
                state, metrics = self.program.steps(state, batches, len(steps))
                self.pending.append((steps.start, metrics))
                self._read(LAG if steps.start > first else 0)
                done = steps.stop
                if self._is_evaluated(done):
                    evaluated = self._evaluate(state, done)
                elif train.checkpoint_every and done % train.checkpoint_every == 0:
                    self._save(state, done, None)
        done = int(state.step)
        self._read(0)
        if self.saved != done:
            self._save(state, done, None, temporary=True)
        self.reporter.stage(SAVING)
        self.checkpoints.wait()
        self.reporter.stage("")
        return Outcome(state, self.evaluation, interrupted=done < train.steps or not evaluated)

    def _batches(self, steps: range) -> jax.Array:
        """Read the batches of a call and put them on the devices."""
        return self.program.put_batches([self.batches.at(step) for step in steps])

    def _calls(self, first: int, end: int) -> Iterator[range]:
        """Yield the steps of each call, which ends at the next evaluation or checkpoint at the latest.

        The first step is a call of its own, and is waited for: its overhead does not count in the speed.
        """
        train = self.config.train
        done, most = first, 1
        while done < end:
            stops = [(done // every + 1) * every for every in (train.eval_every, train.checkpoint_every) if every]
            before, done = done, min([done + most, end, *stops])
            yield range(before, done)
            most = train.steps_per_call

    def _request(self) -> int:
        """Return what this process requests before the next step; 0: nothing."""
        if self.stop.requested:
            return STOP
        seconds = self.config.train.checkpoint_seconds
        return SAVE if seconds and self.clock.since_save() > seconds else 0

    def _is_evaluated(self, done: int) -> bool:
        return done % self.config.train.eval_every == 0 or done == self.config.train.steps

    def _read(self, leave: int) -> None:
        """Read the metrics of all calls but the last `leave`."""
        while len(self.pending) > leave:
            first, read = self.pending.popleft()
            steps = read()
            self.clock.call_ended(len(steps) * self._tokens_per_step)
            for ahead, arrays in enumerate(steps):
                self._log(first + ahead, arrays)

    def _log(self, step: int, arrays: dict[str, Any]) -> None:
        train = self.config.train
        squared_norms = arrays.pop("grad_squares")
        metrics = {name: float(value) for name, value in arrays.items()}
        self._check(step, metrics, squared_norms)
        self.clock.count(self._tokens_per_step)
        if step % train.log_every == 0 or step == train.steps - 1:
            line = {"step": step} | metrics | self.clock.metrics(self._tokens(step + 1))
            self.metrics.write(**line)
        tokens_left = (train.steps - step - 1) * self._tokens_per_step
        self.reporter.progress({"step": step} | metrics | self.clock.recent(tokens_left))

    def _check(self, step: int, metrics: dict[str, float], squared_norms: np.ndarray) -> None:
        """Check that training can continue after a step, and report a skipped update.

        Raises:
            TrainingFailed: it cannot: loss or gradient are not finite, or too many updates in a row were skipped.
        """
        optim = self.config.optim
        wrong = next((f"{n} is {metrics[n]}" for n in ("loss", "grad_norm") if not math.isfinite(metrics[n])), "")
        skipped = int(metrics.pop("skipped_in_a_row", 0))
        if skipped:
            what = wrong or f"loss {metrics['loss']:.4g} or grad_norm {metrics['grad_norm']:.4g} is a spike"
            self.reporter.note(f"step {step}: {what}; update skipped ({skipped} in a row)")
        limit = skipped >= optim.skip_limit
        if (wrong and optim.not_finite == "stop") or limit:
            message = f"{wrong or 'a spike'} at step {step}" + (
                f" after {skipped} skipped updates in a row" if limit else ""
            )
            where = first_non_finite(self.config.model, self.layout.abstract_state.params, squared_norms)
            raise _Diverged(f"{message}, {where}" if where else message)

    @property
    def _tokens_per_step(self) -> int:
        return self.config.train.batch_size * self.config.model.block_size

    def _tokens(self, done: int) -> int:
        """Count the tokens trained on in total, also if a run was resumed with another batch size."""
        return self.tokens_seen + (done - self.first) * self._tokens_per_step

    def _evaluate(self, state: TrainState, done: int) -> bool:
        """Evaluate, write the result and save a checkpoint; return False if the run was stopped meanwhile."""
        self._read(0)
        with self.clock.paused() as seconds:
            params = eval_params(state, self.config)
            whole = done == self.config.train.steps
            stage = partial(self.reporter.stage, "evaluating")
            stage()
            stopped = lambda: self.poll.ask(self._request()) == STOP  # noqa: E731
            result = evaluate(self.program, params, self.data.val, stopped, whole, stage)
            self.reporter.stage("")
            if result is None:
                return False
            if not math.isfinite(result.loss):
                raise _Diverged(f"validation loss is {result.loss} at step {done}")
            self.evaluation = result
            values = {"val_loss": result.loss, "val_stderr": result.stderr, "val_windows": result.windows}
            self.metrics.write(step=done, **values, val_seconds=seconds())
            self.reporter.evaluated(done, result)
            if self.saved == done:
                self.checkpoints.note_val_loss(done, result.ranking)
            else:
                self._save(state, done, result.ranking)
        return True

    def _save(self, state: TrainState, done: int, val_loss: float | None, *, temporary: bool = False) -> None:
        self._read(0)  # a state is saved only after the metrics of all its steps are checked
        info = Info(done, val_loss, self._tokens(done), temporary, self.about)
        self.reporter.stage(
            SAVING
        )  # waits for the previous checkpoint and a copy of the state; written in the background
        self.checkpoints.save(self.program.to_checkpoint(state), info)
        self.reporter.stage("")
        self.saved = done
        self.clock.saved()
        self.poll.forget()
