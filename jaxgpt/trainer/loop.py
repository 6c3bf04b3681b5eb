"""Train a run: devices -> settings -> weights -> data -> program -> state -> loop -> outcome."""

from __future__ import annotations

from collections.abc import Iterator
from contextlib import contextmanager

from jaxgpt.checkpoint.run import Run
from jaxgpt.checkpoint.saver import Saver
from jaxgpt.parallel.host import use_cores
from jaxgpt.parallel.processes import is_leader, on_leader, process_count, same_on_all
from jaxgpt.parallel.temporaries import keep_memory, room_for_temporaries
from jaxgpt.signals import STOPPING, stop_on_signal
from jaxgpt.trainer.calls import is_evaluated, is_saved, plan_calls
from jaxgpt.trainer.compilation import compiling
from jaxgpt.trainer.evaluation import ValidationLoss
from jaxgpt.trainer.events import Listener, Listeners, Outcome, StageProgress, StatusWithoutErrors
from jaxgpt.trainer.failures import failures
from jaxgpt.trainer.feed import batches_of, check_feed
from jaxgpt.trainer.metrics import MetricsFile
from jaxgpt.trainer.monitor import Monitor, monitored
from jaxgpt.trainer.opening import newest_checkpoint, opened_run, replace_settings
from jaxgpt.trainer.phases import with_mixtures
from jaxgpt.trainer.program import Program
from jaxgpt.trainer.record import Recorder
from jaxgpt.trainer.run_data import check_data, read_data, with_data_facts
from jaxgpt.trainer.run_evaluation import Evaluate
from jaxgpt.trainer.saving import Checkpoints, RunRequest
from jaxgpt.trainer.start import Start
from jaxgpt.trainer.starting_state import starting_state
from jaxgpt.trainer.weights import InitialWeights, open_weights


def train(start: Start, listener: Listener, until: int | None = None) -> Outcome:
    """Train until the last step, `until`, a signal, or early stopping (`train.patience`).

    Every process of a run must call this function with the same arguments.

    Args:
        start: settings, and the directory of a new run or the run to resume.
        listener: receiver of the events of the run; `Listeners(...)` passes them to several listeners.
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
    # Choose the devices. Their settings must precede JAX's first use of a device.
    use_cores(start.config.mesh, process_count(), start.config.model)
    keep_memory(start.config)

    # Read the settings, and the checkpoint to continue from.
    config = same_on_all(lambda: start.config, lambda _: start.facts())
    resumed_from = newest_checkpoint(start, listener.note)
    first_step = resumed_from.step if resumed_from else 0
    config = with_mixtures(config, resumed_from)
    on_leader(lambda: check_data(start, config, resumed_from))

    # Open the weights and the data, and build the program.
    weights = same_on_all(lambda: open_weights(start), InitialWeights.facts)
    config, data = read_data(start, config, weights.tokenizer, resumed_from, StageProgress(listener, "tokenizing"))
    config = with_data_facts(config, data, resumed_from)
    program = start.build(config, frozen=weights.frozen_argument)
    listener.opened(program, data, first_step)
    parts = start.parts(program, weights.checksums())

    opened = opened_run(start, program, data, resumed_from, parts, listener.note)
    with opened as run, guarded(run, program, listener) as monitor:
        # Prepare the state while the step is compiled. Until the step has been compiled, a resumed run keeps its earlier
        # settings on disk.
        listeners = Listeners(monitor, listener)
        listeners.started(program, data, run, first_step)
        monitor.stage("preparing batches")
        feed = check_feed(start.feed(program, data, resumed_from))
        with compiling(program, feed, listeners) as compiled:
            state = starting_state(program, run, resumed_from, weights)
        replace_settings(start, run, program, data)

        # Prepare metrics, checkpoints, evaluations and calls, then take the steps.
        saver = Saver(run.checkpoints, config.train, StatusWithoutErrors(listeners).note)
        record = Recorder(program, MetricsFile(run.metrics, resumed_from), listeners, resumed_from)
        checkpoints = Checkpoints(record, saver, data, resumed_from, parts)
        evaluate = Evaluate(start.evaluators or (ValidationLoss(),), record, checkpoints, data, monitor)
        record.started(resumed_from)
        plan = plan_calls(resumed_from, until, config.train, feed.reads_state)
        calls = batches_of(program, feed, plan, record.waiting(monitor.wait))
        room = room_for_temporaries(program.mesh, compiled.result())
        with room, calls as prepared, record.closing(checkpoints.is_stopped), checkpoints.closing(lambda: state):
            for steps, batches in prepared:
                request = checkpoints.ask(monitor.stop.requested)
                if request == RunRequest.STOP or checkpoints.is_out_of_patience():
                    break
                if request == RunRequest.SAVE and steps.start > first_step:
                    checkpoints.save(state, temporary=True)
                if steps:
                    saver.check()  # error if the last checkpoint could not be written
                    state, metrics = program.step(state, batches(state))
                    record.add(steps, metrics)  # with a blocking read of the metrics from two calls ago
                    if steps.start == first_step:
                        checkpoints.delete_replaced()
                if is_evaluated(steps.stop, config.train):
                    if not evaluate(state):  # interrupted
                        break
                elif is_saved(steps.stop, config.train):
                    checkpoints.save(state)
    return Outcome(state, record.step, record.result, checkpoints.is_stopped())


@contextmanager
def guarded(run: Run, program: Program, listener: Listener) -> Iterator[Monitor]:
    """Yield the monitor of a run; in the context, signals stop the run, and its failures are explained (`failures`)."""
    with (
        stop_on_signal(STOPPING if is_leader() else "") as stop,
        failures(run, program),
        monitored(stop, listener.note) as monitor,
    ):
        yield monitor
