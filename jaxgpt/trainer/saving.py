"""Checkpoints of a run: after evaluations, on request, when due, and at its end, even after an error."""

from __future__ import annotations

import math
import time
from collections.abc import Callable, Iterator
from contextlib import contextmanager
from dataclasses import asdict
from enum import IntEnum
from typing import Any

import jax

from jaxgpt.checkpoint.data_record import about_data
from jaxgpt.checkpoint.info import About, Info
from jaxgpt.checkpoint.replacement import delete_replaced
from jaxgpt.checkpoint.run import Run, write_settings
from jaxgpt.checkpoint.saver import Saver
from jaxgpt.data import Data
from jaxgpt.directories import REPLACED
from jaxgpt.errors import TrainingFailed, UserError, WriteFailed, one_line
from jaxgpt.exception_notes import add_own_note
from jaxgpt.parallel.processes import Poll, SharedError, is_leader, on_leader, process_count
from jaxgpt.provenance import versions
from jaxgpt.runtime import debugs_nans
from jaxgpt.trainer.best import best_before, is_out_of_patience
from jaxgpt.trainer.divergence import Diverged
from jaxgpt.trainer.given import RunParts
from jaxgpt.trainer.record import LAG, Recorder


class RunRequest(IntEnum):
    """A request between two calls; the maximum over processes is used."""

    NONE = 0
    SAVE = 1
    STOP = 2


class Checkpoints:
    """Writes the checkpoints of a run, each after the metrics of all steps so far have been checked.

    Args:
        record: recorder of the run; its listener receives the stages and notes.
        saver: writer of the checkpoints.
        data: data of the run.
        last: the checkpoint that training resumes from; None: train from step 0.
        parts: parts that a resumed run must receive again.

    Attributes:
        about: entries of `Info.about` that are equal in all checkpoints of this process.
        evaluated: step of the last evaluation since the start or resume, or of `last` if evaluated; 0: no evaluation.
        best: the best evaluation by the first evaluator.
    """

    def __init__(self, record: Recorder, saver: Saver, data: Data, last: Info | None, parts: RunParts) -> None:
        self.record = record
        self.saver = saver
        self.about: About = {
            "config": asdict(record.config),
            "versions": versions(),
            **about_data(data),
            **parts.about(),
        }
        self._tokenizer = data.tokenizer
        self._poll = Poll(record.program.mesh, LAG)
        self._run = Run(saver.directory.parent)
        self._saved = last.step if last else None
        self._saved_at = time.perf_counter()

        first = record.first
        self.evaluated = first.step if first.ranking is not None else 0
        self.best = best_before(first, data.fingerprint, parts.ranked_by)

    def evaluation(self, state: Any, ranking: float) -> None:
        """Save a state after its evaluation; the checkpoint with the lowest ranking is the best."""
        step = self.record.step
        self.evaluated = step
        best = self.best.after(step, ranking)
        if math.isfinite(ranking):
            self.best = best
            self.save(state, ranking)
            return

        self.record.listener.note(
            f"the ranking of the evaluation at step {step} is {ranking}, so its checkpoint has no rank"
        )
        self.save(state)
        # The checkpoint does not count this evaluation, because a resume from a checkpoint without rank repeats it.
        self.best = best

    def save(self, state: Any, ranking: float | None = None, *, temporary: bool = False) -> None:
        """Check the metrics of all steps so far, then write a checkpoint in the background.

        If the step already has a checkpoint, only add the ranking, if any, to the checkpoint.
        """
        record = self.record
        record.read()
        step = record.step
        info = Info(
            step=step,
            ranking=ranking,
            tokens=record.tokens(step),
            temporary=temporary,
            about=self.about | self.best.about(),
        )
        if self._saved != step:
            self._check_run()
            record.listener.stage("saving a checkpoint")  # blocking on the previous checkpoint and a copy of the state
            self.saver.save(record.program.to_checkpoint(state), info)
            record.listener.stage("")
            self._saved = step
            self._saved_at = time.perf_counter()
            self._poll.forget()
        elif ranking is not None:  # for example, a resume after a stop during this evaluation
            self.saver.save_info(info)

    def _check_run(self) -> None:
        """Create the run again if its directory was renamed or deleted: otherwise, no command could read the checkpoint."""
        run = self._run
        if not is_leader() or run.exists():
            return
        run.checkpoints.mkdir(parents=True, exist_ok=True)
        write_settings(run, self.record.config, self._tokenizer)
        self.record.file.reopen()
        self.record.listener.note(
            f"{run.path} was renamed or deleted: its checkpoints and metrics are in a new {run.path}, starting at step "
            f"{self.record.step}"
        )

    def delete_replaced(self) -> None:
        """Delete the old run that the run replaces, if any; the measured speed excludes the time of the deletion."""
        if not is_leader() or not (self._run.path / REPLACED).exists():
            return
        began = time.perf_counter()
        self.record.listener.stage("deleting the replaced run")
        delete_replaced(self._run.path)
        self.record.listener.stage("")
        self.record.speed.exclude(time.perf_counter() - began)

    @contextmanager
    def closing(self, state: Callable[[], Any]) -> Iterator[None]:
        """Context manager: save the last state at the end, or after an error in all processes; close the saver.

        Errors of evaluators, listeners and feeds, of reading data and of memory in an evaluation leave the state intact. After
        such an error, a note of the exception names the saved step. `state` returns the state after the last call.
        """
        with self.saver:
            try:
                yield
            except (Exception, SystemExit) as e:
                if isinstance(e, FloatingPointError) and debugs_nans():  # from JAX; the state was donated to the step
                    raise Diverged(f"{one_line(e, 200)} at step {self.record.step}") from None
                self._save_after(e, state())
                if isinstance(e, UserError):
                    raise TrainingFailed(str(e)) from None
                raise
            self._save_and_wait(state())

    def _save_and_wait(self, state: Any) -> None:
        """Save a state, and wait until it is on disk."""
        self.save(state, temporary=True)
        self.record.listener.stage("saving a checkpoint")
        self.saver.wait()
        self.record.listener.stage("")

    def _save_after(self, error: BaseException, state: Any) -> None:
        """Save the state of the last complete step after an error, and add the result to the notes of the error.

        Nothing is saved if the run has diverged, the state was donated to the failed step, or a checkpoint cannot be written.
        A checkpoint needs all processes, so after an error of this process alone, nothing is saved.
        """
        step = self.record.step
        is_of_this_process = process_count() > 1 and not isinstance(error, SharedError)
        if is_of_this_process or isinstance(error, (Diverged, WriteFailed)):
            return
        if step in (0, self._saved):
            return

        self.record.tolerate_listener()  # the error may be the listener's
        try:
            if any(leaf.is_deleted() for leaf in jax.tree.leaves(state)):
                raise RuntimeError("the arrays of the state have been deleted")
            jax.block_until_ready(state)  # error if the step has failed on the device
            self._save_and_wait(state)
            on_leader(lambda: None)  # wait until process 0 has completed the checkpoint
            if is_leader():
                # Otherwise, the old run would be restored over the saved step.
                delete_replaced(self._run.path)
        except Exception as e:
            add_own_note(error, f"step {step} could not be saved: {one_line(e, 200)}")
        else:
            add_own_note(error, f"step {step} was saved in {self.saver.directory}")

    def is_out_of_patience(self) -> bool:
        """Return whether early stopping (`train.patience`) ends the run."""
        return is_out_of_patience(self.best.since, self.record.config.train)

    def is_stopped(self) -> bool:
        """Return whether the run ends before its last step and evaluation; False after early stopping (`train.patience`)."""
        return self.evaluated != self.record.config.train.steps and not self.is_out_of_patience()

    def ask(self, stop: bool) -> RunRequest:
        """Request to stop, or to save if due; return the maximum request of all processes (`Poll.ask`)."""
        seconds = self.record.config.train.checkpoint_seconds
        is_due = bool(seconds) and time.perf_counter() - self._saved_at > seconds
        request = RunRequest.NONE
        if stop:
            request = RunRequest.STOP
        elif is_due:
            request = RunRequest.SAVE
        return RunRequest(self._poll.ask(request))
