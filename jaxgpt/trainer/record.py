"""Recorder: check and write the metrics of each step, and write checkpoints."""

from __future__ import annotations

import math
import time
from collections import deque
from collections.abc import Callable, Iterator, Mapping, Sequence
from concurrent.futures import Future
from contextlib import contextmanager, suppress
from dataclasses import asdict
from typing import Any

import jax

from jaxgpt.checkpoint.data import about_data
from jaxgpt.checkpoint.run import Run, delete_replaced, write_settings
from jaxgpt.checkpoint.store import Info, Saver
from jaxgpt.config import Config, changes
from jaxgpt.counts import flops_per_token
from jaxgpt.data import Data
from jaxgpt.directories import REPLACED
from jaxgpt.errors import TrainingFailed, UserError, WriteFailed, one_line
from jaxgpt.parallel.chips import peak_flops
from jaxgpt.parallel.processes import Poll, SharedError, is_leader, on_leader, process_count
from jaxgpt.provenance import provenance, versions
from jaxgpt.runtime import debugs_nans
from jaxgpt.trainer.evaluation import Result
from jaxgpt.trainer.events import Listener, Tolerant
from jaxgpt.trainer.failures import Diverged, first_non_finite
from jaxgpt.trainer.metrics import MetricsFile, numbers
from jaxgpt.trainer.program import Program
from jaxgpt.trainer.start import out_of_patience

SAVE, STOP = 1, 2  # requests between two calls; the maximum over processes is used
LAG = 2  # number of later calls dispatched before blocking on the metrics of a call
WINDOW = 10.0  # averaging window of the speed in seconds; minimum one call


class Recorder:
    """Read the metrics of each step `LAG` calls late, check and write them, and write checkpoints.

    `last` is the checkpoint that training resumes from; None: train from step 0. `about`: facts for every checkpoint.

    Attributes:
        done: steps taken, including steps in flight.
        evaluated: step of the last evaluation since the start or resume, or of `last` if evaluated; 0: no evaluation.
        best: lowest ranking of the first evaluator and its step; infinite before the first evaluation.
    """

    def __init__(
        self,
        program: Program,
        data: Data,
        saver: Saver,
        file: MetricsFile,
        listener: Listener,
        last: Info | None,
        about: Mapping[str, Any],
    ) -> None:
        config = program.config
        self.program = program
        self.saver = saver
        self.file = file
        self.listener = listener
        self.poll = Poll(program.mesh, LAG)
        self.config = config
        self.tokenizer = data.tokenizer

        # The steps so far, and the best evaluation; after a change of data, losses are not comparable.
        self.first = last or Info(0)
        self.done = self.first.step
        self._saved = last.step if last else None
        self._checked = self.done  # steps whose metrics have been read and checked
        self.evaluated = self.done if self.first.val_loss is not None else 0
        self.best = (math.inf, self.done)
        if self.first.about.get("data", data.fingerprint) == data.fingerprint:
            self.best = tuple(self.first.about.get("best", self.best))

        # Facts for every checkpoint, and a line in the metrics about this process.
        self.about = {"config": asdict(config), "versions": versions(), **about_data(data), **about}
        changed = changes(last.config(), config) if last else {}
        file.write(step=self.done, **provenance(), changed=changed)

        # Speed and times.
        flops = flops_per_token(program.model, program.abstract_weights, config.window, config.lora)
        peak = peak_flops(program.mesh)
        self.speed = Speed(config, flops / peak if peak else 0.0)
        self._saved_at = time.perf_counter()
        self._began = self._saved_at - file.elapsed_seconds
        self._waited = 0.0  # seconds waited for data since the last line

        # Metrics of the calls in flight; then, of each step that has ended: step, metrics, speed, estimates of the time left.
        self._in_flight: deque[tuple[range, dict[str, jax.Array]]] = deque()
        self._ended: deque[tuple[int, dict[str, Any], dict[str, float], dict[str, float]]] = deque()

    def steps(self, steps: range, metrics: dict[str, jax.Array]) -> None:
        """Add the metrics of a call, and read the metrics of `LAG` calls ago; block on the first call.

        After the first call, an old run that the run replaces is deleted.
        """
        self._in_flight.append((steps, metrics))
        self.done = steps.stop
        self.saver.check()
        is_first = steps.start == self.first.step
        self.read(0 if is_first else LAG)
        if is_first and is_leader():
            self._delete_replaced()

    def _delete_replaced(self) -> None:
        """Delete the old run that the run replaces, if any; the speed excludes the time."""
        path = self.saver.directory.parent
        if not (path / REPLACED).exists():
            return
        began = time.perf_counter()
        self.listener.stage("deleting the replaced run")
        delete_replaced(path)
        self.listener.stage("")
        self.speed.exclude(time.perf_counter() - began)

    def read(self, leave: int = 0) -> None:
        """Read, check and write the metrics of all calls in flight except the last `leave`."""
        self._write_ended()
        while len(self._in_flight) > leave:
            steps, arrays = self._in_flight.popleft()
            per_step = metrics_of_steps(arrays, len(steps))  # blocking until the call has ended
            speed, left = self.speed.call_ended(steps.stop)
            self._ended.extend((step, values, speed, left) for step, values in zip(steps, per_step, strict=True))
            self._write_ended()

    def _write_ended(self) -> None:
        """Check and write the metrics of the steps that have ended. After an error of the listener, a second call continues."""
        train = self.config.train
        while self._ended:
            step, values, speed, left = self._ended[0]
            metrics = numbers({name: value for name, value in values.items() if name != "grad_squares"})
            self._check(step, metrics, values["grad_squares"])
            elapsed = time.perf_counter() - self._began
            line = {"step": step, **metrics, "tokens": self.tokens(step + 1), "elapsed_seconds": elapsed, **speed}
            if step % train.log_every == 0 or step == train.steps - 1:
                line |= self._host_metrics()
                self.file.write(**line)
            self._ended.popleft()
            self._checked = step + 1
            self.listener.progress(line | left)

    def waiting(self, wait: Callable[[Future[Any]], None]) -> Callable[[Future[Any]], None]:
        """Return a function that waits for data with `wait`, and counts the seconds for the next line of the metrics."""

        def timed(future: Future[Any]) -> None:
            began = time.perf_counter()
            wait(future)
            self._waited += time.perf_counter() - began

        return timed

    def _host_metrics(self) -> dict[str, float]:
        """Return the seconds waited for data since the last line, and the highest use of device memory, if known."""
        metrics = {"data_wait_seconds": self._waited}
        self._waited = 0.0
        memory = peak_memory()
        if memory:
            metrics["device_memory_bytes"] = memory
        return metrics

    def evaluation(self, state: Any, results: Sequence[Result], began: float) -> Result:
        """Write the metrics and checkpoint of an evaluation; the speed excludes evaluating and writing.

        Args:
            state: the evaluated state.
            results: results of the evaluators; the first ranks the checkpoint.
            began: time at which the evaluation began.

        Returns:
            The first result.
        """
        self.listener.stage("")

        # Write the metrics.
        metrics = {}
        for result in results:
            for name, value in result.metrics.items():
                metrics[name] = value if isinstance(value, (int, float)) else float(value)  # a NumPy or JAX scalar
        if not math.isfinite(metrics.get("val_loss", 0.0)):
            raise Diverged(f"validation loss is {metrics['val_loss']} at step {self.done}")
        self.file.write(step=self.done, **metrics, val_data=self.about["data"])
        for result in results:
            self.listener.evaluated(self.done, result)
        self.evaluated = self.done
        ranking = float(results[0].ranking)
        if math.isfinite(ranking):
            self.best = min(self.best, (ranking, self.done))
            self.save(state, ranking)
        else:
            self.listener.note(
                f"step {self.done}: the ranking of the evaluation is {ranking}: its checkpoint has no rank"
            )
            self.save(state)
        self.speed.exclude(time.perf_counter() - began)
        return results[0]

    def save(self, state: Any, val_loss: float | None = None, *, temporary: bool = False) -> None:
        """Check the metrics of all steps so far, then write a checkpoint in the background.

        If the checkpoint is already written, add the validation loss to it.
        """
        self.read()
        best = {"best": self.best} if math.isfinite(self.best[0]) else {}
        info = Info(self.done, val_loss, self.tokens(self.done), temporary, self.about | best)
        if self._saved != self.done:
            self._check_run()
            self.listener.stage("saving a checkpoint")  # blocking on the previous checkpoint and a copy of the state
            self.saver.save(self.program.to_checkpoint(state), info)
            self.listener.stage("")
            self._saved = self.done
            self._saved_at = time.perf_counter()
            self.poll.forget()
        elif val_loss is not None:  # for example, a resume after a stop during this evaluation
            self.saver.save_info(info)

    def _check_run(self) -> None:
        """Create the run again if its directory was renamed or deleted: otherwise, no command could read the checkpoint."""
        run = Run(self.saver.directory.parent)
        if not is_leader() or run.exists():
            return
        run.checkpoints.mkdir(parents=True, exist_ok=True)
        write_settings(run, self.config, self.tokenizer)
        self.file.reopen()
        self.listener.note(
            f"{run.path} was renamed or deleted: its checkpoints and metrics from step {self.done} on are in a new {run.path}"
        )

    @contextmanager
    def closing(self, state: Callable[[], Any]) -> Iterator[None]:
        """Context manager: save the last state at the end; also after an error of all processes, if the state is intact.

        The last line of the metrics file records how the run ended.

        Errors of evaluators, listeners and feeds, of reading data and of memory in an evaluation leave the state intact. After
        such an error, a note of the exception names the saved step.
        """
        try:
            with self._saving_last(state):
                yield
        except (Exception, SystemExit):
            with suppress(OSError):  # a full disk; the error of the run has precedence
                self.file.end(self._checked, "failed")
            raise
        self.file.end(self._checked, "stopped" if self.is_stopped() else "finished")

    @contextmanager
    def _saving_last(self, state: Callable[[], Any]) -> Iterator[None]:
        """Save the last state at the end, or after an error, as `closing`."""
        try:
            yield
        except (Exception, SystemExit) as e:
            if isinstance(e, FloatingPointError) and debugs_nans():  # from JAX, with the donated state of the step
                raise Diverged(f"{one_line(e, 200)} at step {self.done}") from None
            self._save_after(e, state())
            if isinstance(e, UserError):
                raise TrainingFailed(str(e)) from None
            raise
        self._save_last(state())

    def _save_last(self, state: Any) -> None:
        """Save a state, and wait until it is on disk."""
        self.save(state, temporary=True)
        self.listener.stage("saving a checkpoint")
        self.saver.wait()
        self.listener.stage("")

    def _save_after(self, error: BaseException, state: Any) -> None:
        """Save the state of the last complete step after an error, and add the result to the notes of the error.

        Nothing is saved if the run has diverged, the state was donated to the failed step, or a checkpoint cannot be written.
        A checkpoint needs all processes, so an error of this process alone saves nothing.
        """
        is_own = process_count() > 1 and not isinstance(error, SharedError)
        is_lost = isinstance(error, (Diverged, WriteFailed)) or is_own
        if is_lost or self.done == (self._saved or 0):
            return
        self.listener = Tolerant(self.listener)  # the error may be the listener's
        try:
            if any(leaf.is_deleted() for leaf in jax.tree.leaves(state)):
                raise RuntimeError("its arrays have been deleted")
            jax.block_until_ready(state)  # error if the step has failed on the device
            self._save_last(state)
            on_leader(lambda: None)  # the leader completes the checkpoint, and the error of each process names it
            if is_leader():
                delete_replaced(
                    self.saver.directory.parent
                )  # otherwise, the old run would be restored over the saved step
        except Exception as e:
            error.add_note(f"jaxgpt: step {self.done} could not be saved: {one_line(e, 200)}")
        else:
            error.add_note(f"jaxgpt: step {self.done} was saved in {self.saver.directory}")

    def out_of_patience(self) -> bool:
        """Return whether early stopping (`train.patience`) ends the run."""
        return out_of_patience(self.best, self.evaluated, self.config.train)

    def is_stopped(self) -> bool:
        """Return whether the run ends before its last step and evaluation, unless ended by `train.patience`."""
        return self.evaluated != self.config.train.steps and not self.out_of_patience()

    def ask(self, stop: bool) -> int:
        """Request to stop, or to save if due; return the maximum request of all processes (`Poll.ask`)."""
        seconds = self.config.train.checkpoint_seconds
        is_due = bool(seconds) and time.perf_counter() - self._saved_at > seconds
        request = 0
        if stop:
            request = STOP
        elif is_due:
            request = SAVE
        return self.poll.ask(request)

    def tokens(self, done: int) -> int:
        """Return the number of tokens in the windows of `done` steps, even if a resume changed the batch size."""
        return self.first.tokens + (done - self.first.step) * self.speed.tokens_per_step

    def _check(self, step: int, metrics: dict[str, float], squared_norms: Any) -> None:
        """Check the metrics of a step, and report a skipped update.

        Raises:
            Diverged: if the loss or gradient is non-finite and `optim.not_finite` is stop, or `optim.skip_limit` updates in a
                row were skipped.
        """
        optim = self.config.optim
        skipped = int(metrics.pop("skipped_in_a_row", 0))
        not_finite = [name for name in ("loss", "grad_norm") if not math.isfinite(metrics[name])]
        wrong = f"{not_finite[0]} is {metrics[not_finite[0]]}" if not_finite else ""
        if skipped:
            reason = wrong or f"loss {metrics['loss']:.4g} or grad_norm {metrics['grad_norm']:.4g} is a spike"
            self.listener.note(f"step {step}: {reason}; update skipped ({skipped} in a row)")
        too_many = skipped >= optim.skip_limit
        if (wrong and optim.not_finite == "stop") or too_many:
            after = f" after {skipped} skipped updates in a row" if too_many else ""
            event = f"{wrong or 'a spike'} at step {step}{after}"
            gradient = first_non_finite(self.config.model, self.program.abstract_state.params, squared_norms)
            raise Diverged(f"{event}, {gradient}" if gradient else event)


def metrics_of_steps(metrics: dict[str, jax.Array], n: int) -> list[dict[str, Any]]:
    """Block on the metrics of a call of n steps, and return the metrics of each step."""
    host = jax.device_get(metrics)
    if not host["loss"].ndim:
        return [host]
    return [{name: value[i] for name, value in host.items()} for i in range(n)]


def peak_memory() -> int:
    """Return the highest use of memory of a local device so far, in bytes; 0 if the platform does not measure it."""
    peaks = [0]
    for device in jax.local_devices():
        measured = device.memory_stats() or {}
        peaks.append(measured.get("peak_bytes_in_use", 0))
    return max(peaks)


class Speed:
    """Recent training speed, excluding evaluations and the first call.

    Args:
        config: settings of the run.
        mfu: MFU at one token per second; 0: unknown.
    """

    def __init__(self, config: Config, mfu: float = 0.0) -> None:
        self.steps = config.train.steps
        self.mfu = mfu
        self.tokens_per_step = config.train.batch_size * config.row_tokens
        self._began = 0.0  # end time of the first call
        self._first = 0  # steps done at that time
        self._excluded = 0.0  # excluded seconds
        self._calls: deque[tuple[float, int]] = deque()  # end of recent calls, minus excluded seconds; steps done

    def call_ended(self, done: int) -> tuple[dict[str, float], dict[str, float]]:
        """Record the end of a call, after `done` steps of the run.

        Returns two dictionaries: `tokens_per_second` and, if known, `mfu`; and `seconds_left` at the mean speed since
        the first call, including evaluations. Both dictionaries are empty for the first call.
        """
        now = time.perf_counter()
        self._calls.append((now - self._excluded, done))
        if len(self._calls) == 1:
            self._began = now
            self._first = done
            return {}, {}

        # The speed of the calls in the last `WINDOW` seconds.
        while len(self._calls) > 2 and self._calls[1][0] <= self._calls[-1][0] - WINDOW:
            self._calls.popleft()
        start, before = self._calls[0]
        end, after = self._calls[-1]
        speed = (after - before) * self.tokens_per_step / max(end - start, 1e-9)
        left = (now - self._began) / (done - self._first) * (self.steps - done)
        mfu = {"mfu": self.mfu * speed} if self.mfu else {}
        return {"tokens_per_second": speed} | mfu, {"seconds_left": left}

    def exclude(self, seconds: float) -> None:
        """Exclude the last `seconds`, for example of an evaluation, from the recent speed."""
        self._excluded += seconds
