"""Train a run: devices -> settings -> weights -> data -> program -> state -> loop -> outcome."""

from __future__ import annotations

import time
from collections.abc import Callable, Iterator, Mapping, Sequence
from concurrent.futures import Future, ThreadPoolExecutor
from contextlib import contextmanager
from dataclasses import dataclass
from pathlib import Path
from typing import Any

from jax.stages import Compiled

from jaxgpt.atomic import check_renames
from jaxgpt.checkpoint.info import Info
from jaxgpt.checkpoint.paths import check_backslash, other_files
from jaxgpt.checkpoint.replacement import replaced_note
from jaxgpt.checkpoint.run import Run, write_settings
from jaxgpt.checkpoint.space import check_space
from jaxgpt.checkpoint.store import Saver
from jaxgpt.data import Data
from jaxgpt.heap import trim_memory
from jaxgpt.parallel.host import keep_memory, room_for_temporaries, use_cores
from jaxgpt.parallel.processes import is_leader, on_leader, process_count, same_on_all
from jaxgpt.signals import STOPPING, stop_on_signal
from jaxgpt.train.step import TrainState
from jaxgpt.trainer.calls import is_evaluated, is_saved, plan_calls
from jaxgpt.trainer.evaluation import ValidationLoss
from jaxgpt.trainer.evaluators import Evaluator, Watch, run_evaluators
from jaxgpt.trainer.events import Listener, Listeners, Outcome, StageProgress, Tolerant
from jaxgpt.trainer.failures import compile_lowered, evaluating, failures
from jaxgpt.trainer.feed import Feed, batches_of
from jaxgpt.trainer.metrics import MetricsFile
from jaxgpt.trainer.monitor import Monitor, monitored
from jaxgpt.trainer.opening import newest_checkpoint, open_for_training
from jaxgpt.trainer.phases import with_mixtures
from jaxgpt.trainer.program import Program
from jaxgpt.trainer.record import Recorder
from jaxgpt.trainer.run_data import check_data, read_data, with_data_facts
from jaxgpt.trainer.saving import SAVE, STOP, Checkpoints
from jaxgpt.trainer.start import Start, check_directory
from jaxgpt.trainer.weights import InitialWeights, open_weights, starting_state


def train(start: Start, listener: Listener, until: int | None = None) -> Outcome:
    """Train until the last step, `until`, a signal, or early stopping (`train.patience`).

    Every process of a run must call this function with the same arguments.

    Args:
        start: settings, and the directory of a new run or the run to resume.
        listener: receiver of the events of the run; `Listeners(...)`: several.
        until: stop and save at this step, as on a signal; None: the last step.

    Raises:
        UserError: if settings, data, weights or the run are invalid or inconsistent, or the train step cannot be compiled.
        TrainingFailed: if loss or gradients diverge, memory is exhausted, the data become unreadable, or writing fails.
    """
    try:
        outcome = run_loop(start, listener, until)
    except BaseException as error:
        Listeners(listener).failed(error)
        raise
    listener.finished(outcome)
    return outcome


def run_loop(start: Start, listener: Listener, until: int | None) -> Outcome:
    """Run the training loop. Arguments, results and errors as for `train`."""
    # The devices, which must be set before JAX first uses one.
    use_cores(start.config.mesh, process_count(), start.config.model)
    keep_memory(start.config)

    # Settings, and the checkpoint to continue from.
    config = same_on_all(lambda: start.config, lambda _: start.facts())
    on_leader(lambda: check_directory(start))
    resumed_from = newest_checkpoint(start, listener.note)
    first_step = resumed_from.step if resumed_from else 0
    config = with_mixtures(config, resumed_from)
    on_leader(lambda: check_data(start, config, resumed_from))

    # Weights, data and program.
    weights = same_on_all(lambda: open_weights(start), InitialWeights.facts)
    config, data = read_data(start, config, weights.tokenizer, resumed_from, StageProgress(listener, "tokenizing"))
    config = with_data_facts(config, data, resumed_from)
    program = start.build(config, frozen=weights.frozen)
    about = weights.about() | {"given": start.given_parts(program)}

    with (
        opened_run(start, program, data, resumed_from, about, listener) as run,
        guarded(run, program, listener) as monitor,
    ):
        # State, while the step is compiled. The settings of the run are replaced only after they could be compiled and saved.
        listeners = Listeners(monitor, listener)
        listeners.started(program, data, run, first_step)
        monitor.stage("preparing batches")
        feed = start.feed(program, data, resumed_from)
        if getattr(feed, "interrupted", False):  # by a signal
            until = first_step
        with compiling(program, feed, listeners) as compiled:
            state = starting_state(program, run, resumed_from, weights)
        if start.resumed is not None:
            on_leader(lambda: write_settings(run, program.config, data.tokenizer))

        # Metrics, checkpoints and evaluations.
        saver = Saver(run.checkpoints, config.train, Tolerant(listeners).note)
        record = Recorder(program, MetricsFile(run.metrics, resumed_from), listeners, resumed_from)
        checkpoints = Checkpoints(record, saver, data, resumed_from, about)
        evaluate = Evaluate(start.evaluators or (ValidationLoss(),), record, checkpoints, data, monitor)
        record.started(resumed_from)

        plan = plan_calls(resumed_from, until, config.train, feed.reads_state)
        calls = batches_of(program, feed, plan, record.waiting(monitor.wait))
        room = room_for_temporaries(program.mesh, compiled.result())
        with room, calls as prepared, checkpoints.closing(lambda: state):
            for steps, batches in prepared:
                request = checkpoints.ask(monitor.stop.requested)
                if request == STOP or checkpoints.out_of_patience():
                    break
                if request == SAVE and steps.start > first_step:
                    checkpoints.save(state, temporary=True)
                if steps:
                    saver.check()  # error if the last checkpoint could not be written
                    state, metrics = program.step(state, batches(state))
                    record.steps(steps, metrics)  # with a blocking read of the metrics from two calls ago
                    if steps.start == first_step:
                        checkpoints.delete_replaced()
                if is_evaluated(steps.stop, config.train):
                    if not evaluate(state):  # interrupted
                        break
                elif is_saved(steps.stop, config.train):
                    checkpoints.save(state)
    return Outcome(state, record.done, record.result, checkpoints.is_stopped())


@contextmanager
def guarded(run: Run, program: Program, listener: Listener) -> Iterator[Monitor]:
    """Yield the monitor of a run; in the context, signals stop the run, and its failures are explained (`failures`)."""
    with (
        stop_on_signal(STOPPING if is_leader() else "") as stop,
        failures(run, program),
        monitored(stop, listener.note) as monitor,
    ):
        yield monitor


@dataclass(frozen=True)
class Evaluate:
    """Evaluates the state after a step: runs the evaluators, writes their metrics, and saves a checkpoint.

    Attributes:
        evaluators: the evaluators; the first ranks the checkpoints.
        record: receives the metrics.
        checkpoints: receives the state and its ranking.
        data: data of the run.
        monitor: waits for batches, and has the request to stop.
    """

    evaluators: Sequence[Evaluator]
    record: Recorder
    checkpoints: Checkpoints
    data: Data
    monitor: Monitor

    def __call__(self, state: TrainState) -> bool:
        """Evaluate and save a state; return False if the evaluation was interrupted, so that nothing is saved."""
        record = self.record
        record.read()  # error if the run has diverged
        began = time.perf_counter()
        watch = Watch(
            final=record.done == record.config.train.steps,
            step=record.done,
            data=self.data,
            interrupted=self._is_interrupted,
            progress=StageProgress(record.listener, "evaluating"),
            wait=self.monitor.wait,
        )
        with evaluating(record.program, record.done):
            results = run_evaluators(self.evaluators, record.program, state.eval_params, watch)
        if results is None:
            return False

        record.listener.stage("")
        record.evaluation(results, self.data.fingerprint)
        self.checkpoints.evaluation(state, float(results[0].ranking))
        trim_memory()  # otherwise the heap grows with every evaluation and checkpoint
        record.speed.exclude(time.perf_counter() - began)
        return True

    def _is_interrupted(self) -> bool:
        """Return whether any process has received a request to stop."""
        return self.checkpoints.ask(self.monitor.stop.requested) == STOP


@contextmanager
def opened_run(
    start: Start, program: Program, data: Data, resumed_from: Info | None, about: Mapping[str, Any], listener: Listener
) -> Iterator[Run]:
    """Create or open the run, like `open_for_training`, if its file system can store its checkpoints."""
    note = listener.note
    if start.resumed is None:
        on_leader(lambda: check_target(start, program, note))
    with open_for_training(start, program, data, resumed_from, about, note) as run:
        if start.resumed is not None:
            on_leader(lambda: check_storage(run, program, note))
        yield run


def check_target(start: Start, program: Program, note: Callable[[str], None]) -> None:
    """Check the space for a new run before its directory is created, and note that other files there are kept."""
    run = Run(Path(start.out or "runs"))  # without `out`, the directory of the run has no name yet
    check_space(run, program.abstract.state, program.config.train, note, start.overwrite)
    kept = replaced_note(run.path) if start.overwrite else ""
    if kept:
        note(f"{kept}, and is restored before {run.path} is replaced again")
    others = other_files(run.path) if start.out else []
    if others:
        more = f" and {len(others) - 1} more" if len(others) > 1 else ""
        note(f"keeping the files in {run.path} that are not part of a run: {others[0]}{more}")


def check_storage(run: Run, program: Program, note: Callable[[str], None]) -> None:
    """Check, before the first step of a resumed run, that its file system can store the next checkpoint."""
    check_backslash(run.path)
    check_renames(run.checkpoints, run.path)
    check_space(run, program.abstract.state, program.config.train, note)


@contextmanager
def compiling(program: Program, feed: Feed, listener: Listener) -> Iterator[Future[Compiled]]:
    """Compile the train step in a thread while the `with` block initializes or restores the state.

    On exit, the context waits for the compiler, and raises its error unless the block has raised an error.
    """
    began = time.perf_counter()
    listener.stage("compiling")
    batches = program.batch(program.config.train.steps_per_call, feed.spec)
    with ThreadPoolExecutor(1) as pool:
        compiled = pool.submit(lambda: compile_lowered(program, program.lower(program.abstract.state, batches)))
        yield compiled
        compiled.result()
    listener.stage("")
    listener.compiled(time.perf_counter() - began)
