"""Train a run: config -> devices -> weights -> data -> program -> state -> loop."""

from __future__ import annotations

import time
from collections.abc import Callable, Iterator
from concurrent.futures import ThreadPoolExecutor
from contextlib import contextmanager
from functools import partial
from typing import Any, NamedTuple

from jaxgpt.checkpoint.store import Info, Saver
from jaxgpt.config import TrainConfig
from jaxgpt.data import Batches, Data, open_data
from jaxgpt.parallel.host import keep_memory, use_cores
from jaxgpt.parallel.processes import is_leader, on_leader, process_count, same_on_all
from jaxgpt.signals import STOPPING, stop_on_signal
from jaxgpt.train.step import TrainState
from jaxgpt.trainer.evaluation import Evaluation, evaluate
from jaxgpt.trainer.failures import compile_lowered, failures
from jaxgpt.trainer.metrics import MetricsFile
from jaxgpt.trainer.prefetch import prefetched
from jaxgpt.trainer.program import Program
from jaxgpt.trainer.record import SAVE, STOP, Record
from jaxgpt.trainer.report import Report
from jaxgpt.trainer.start import Start, Weights, check, completed, open_for_training, read_weights


class Outcome(NamedTuple):
    """Result of a run.

    Attributes:
        state: the final state.
        step: steps taken, including steps before a resume.
        evaluation: the last evaluation since the start or resume; None: no evaluation.
        stopped: whether the run ended before its last step and evaluation, unless ended by `train.patience`.
    """

    state: TrainState
    step: int
    evaluation: Evaluation | None
    stopped: bool


def train(start: Start, report: Report, until: int | None = None) -> Outcome:
    """Train until the last step, `until`, a signal, or early stopping (`train.patience`).

    Every process of a run must call this function with the same arguments.

    Args:
        start: settings, and the directory of a new run or the run to resume.
        report: receiver of the events of the run.
        until: stop and save at this step, as on a signal; None: the last step.

    Raises:
        UserError: if settings, data, weights or the run are invalid or inconsistent, or the train step cannot be compiled.
        TrainingFailed: if loss or gradients diverge, memory is exhausted, the data become unreadable, or writing fails.
    """
    use_cores(start.config.mesh, process_count(), start.config.model)  # before JAX's first use of a device
    keep_memory(start.config)
    config = same_on_all(lambda: start.config, lambda _: start.facts())
    on_leader(lambda: check(start))
    weights = same_on_all(lambda: read_weights(start), Weights.facts)
    reading = partial(report.stage, "tokenizing")
    data = same_on_all(lambda: start.data or open_data(config, weights.tokenizer, reading), Data.facts)
    config = completed(config, data, start.run)
    program = start.build(config, base=weights.base)
    settings, end = config.train, config.train.steps if until is None else min(until, config.train.steps)

    with (
        open_for_training(start, program, data, report.note) as (run, last),
        stop_on_signal(STOPPING if is_leader() else "") as stop,
        failures(run, program),
    ):
        first, evaluation = last.step if last else 0, None
        report.started(program, data, run, first)
        with compiling(program, report):
            state = program.restore(run.checkpoints, first) if last else program.init(weights.params)
        weights = Weights()  # release of the host copies of the weights
        calls = prefetched(batches_of(program, data, last), plan_calls(first, end, settings, last))
        saver, file = Saver(run.checkpoints, settings), MetricsFile(run.metrics, last)
        record = Record(program, data, saver, file, report, last)
        with saver, file, calls as prepared, record.closing(lambda: state):
            for steps, batches in prepared:
                request = record.ask(stop.requested)
                if request == STOP or record.out_of_patience():
                    break
                if request == SAVE and steps.start > first:
                    record.save(state, temporary=True)
                if steps:
                    state, metrics = program.step(state, batches)
                    record.steps(steps, metrics)  # with a blocking read of the metrics from two calls ago
                if is_evaluated(steps.stop, settings):
                    record.read()  # error if the run has diverged
                    all_windows, progress = steps.stop == settings.steps, partial(report.stage, "evaluating")
                    params, interrupted = state.eval_params, lambda: record.ask(stop.requested) == STOP
                    result = evaluate(program, params, data.val, interrupted, all_windows, progress)
                    if result is None:
                        break
                    evaluation = record.evaluation(state, result)
                elif settings.checkpoint_every and steps.stop % settings.checkpoint_every == 0:
                    record.save(state)
    stopped = record.evaluated != settings.steps and not record.out_of_patience()
    return Outcome(state, record.done, evaluation, stopped)


@contextmanager
def compiling(program: Program, report: Report) -> Iterator[None]:
    """Compile the train step in a thread while the `with` block initializes or restores the state.

    On exit, the context waits for the compiler, and raises its error unless the block has raised an error.
    """
    began = time.perf_counter()
    report.stage("compiling")
    batches = program.batch(program.config.train.steps_per_call)
    state, *_ = program.abstract_state, program.abstract_frozen, program._numbers  # cached for the other thread
    with ThreadPoolExecutor(1) as pool:
        compiled = pool.submit(lambda: compile_lowered(program, program.lower(state, batches)))
        yield
        compiled.result()
    report.stage("")
    report.compiled(time.perf_counter() - began)


def batches_of(program: Program, data: Data, last: Info | None) -> Callable[[range], Any]:
    """Return a function from a range of steps to their batches on the devices; None for an empty range.

    A run resumed with a different batch size continues after the windows that it has used.
    """
    config = program.config
    used = last.tokens // config.window - last.step * config.train.batch_size if last else 0
    batches = Batches.of(config, data.train, used)
    return lambda steps: program.put_batches([batches.at(step) for step in steps]) if steps else None


def plan_calls(first: int, end: int, train: TrainConfig, last: Info | None) -> Iterator[range]:
    """Yield the steps of each call: up to `train.steps_per_call`, ending at evaluations and checkpoints.

    The first step is a separate call, so that the measured speed excludes its overhead. An empty range comes first if
    the `last` checkpoint still needs its evaluation, for example after a stop during the evaluation.
    """
    if first and last and last.val_loss is None and is_evaluated(first, train):
        yield range(first, first)
    done, most = first, 1
    while done < end:
        ends = [(done // every + 1) * every for every in (train.eval_every, train.checkpoint_every) if every]
        before, done = done, min(done + most, end, *ends)
        yield range(before, done)
        most = train.steps_per_call


def is_evaluated(done: int, train: TrainConfig) -> bool:
    """Return whether the model is evaluated after `done` steps."""
    return done % train.eval_every == 0 or done == train.steps
