"""jaxgpt train: start a run, fine-tune weights, repeat a run with the same settings, or resume a run."""

from __future__ import annotations

from collections.abc import Sequence
from typing import TYPE_CHECKING

from jaxgpt.cli.failure import is_reported
from jaxgpt.cli.options import NO_SETTINGS, Count, GivenSettings
from jaxgpt.cli.resume_settings import ignored_settings, resumed_config
from jaxgpt.cli.settings import named_config
from jaxgpt.cli.train_settings import TrainOptions, new_config
from jaxgpt.cli.train_tasks import TrainTasks
from jaxgpt.config import DistributedConfig
from jaxgpt.early_end import set_advice
from jaxgpt.errors import UNFINISHED, TrainingFailed, one_line
from jaxgpt.exception_notes import own_notes

if TYPE_CHECKING:
    from jaxgpt.checkpoint.run import Run
    from jaxgpt.cli.run_printer import RunPrinter
    from jaxgpt.trainer.events import Listener, Outcome
    from jaxgpt.trainer.start import Start

REFERENCE_STAGE = "computing log probabilities of the reference"


def train(
    target: str = "",
    /,
    *,
    out: str = "",
    resume: bool = False,
    overwrite: bool = False,
    init_from: str = "",
    keep_optimizer: bool = False,
    track: tuple[str, ...] = (),
    profile: Count = 0,
    tasks: str = "",
    tasks_every: Count = 0,
    tasks_limit: Count = 0,
    tasks_path: str = "",
    distributed: DistributedConfig = DistributedConfig(),
    settings: GivenSettings = NO_SETTINGS,
) -> int:
    """Train with the settings of a preset (default: python-char), a run or a file; or resume a run.

    jaxgpt train shakespeare --train.steps 1000 --out runs/long
    jaxgpt train shakespeare --data.path my.txt --optim.learning-rate 1e-3
    jaxgpt train finetune --init-from runs/gpt2 --data.path my.txt --lora.rank 8
    jaxgpt train gpt2 --data.mix web=0.7 code=0.3 --data.documents pack
    jaxgpt train runs/long --out runs/again --train.seed 2
    jaxgpt train runs/long --resume --train.steps 2000
    jaxgpt train gpt2 --data.path web --tasks hellaswag --tasks-every 1000 --tasks-limit 200
    jaxgpt train runs/long --out runs/anneal --init-from runs/long --keep-optimizer --data.mix web=0.3 books=0.7

    Args:
        target: preset, run, or JSON file of settings, such as the config.json of a run
        out: run directory; empty: a new directory under runs/
        resume: resume the target run or the run in --out; with a preset or file, start a new run if --out has no run
        overwrite: replace the run in --out, which is deleted after the first step of the new run
        init_from: initialize the weights from this run or RUN/checkpoints/STEP; empty: as in the target, or randomly
        keep_optimizer: also start from the optimizer state (by default, of the last checkpoint), with a new schedule
        profile: write a profiler trace of this number of steps to RUN/profile, after 5 steps (more with --train.steps-per-call)
        track: start jaxgpt follow for these trackers: tensorboard, wandb, mlflow, trackio
        tasks: also evaluate these tasks of lm-evaluation-harness: names or YAML files, separated by commas
        tasks_every: steps between evaluations of tasks, a multiple of train.eval_every; 0: only after the last step
        tasks_limit: number of samples of each task; 0: all
        tasks_path: directory with YAML files of further tasks
    """
    options = TrainOptions(target, named_config(target), out, resume, overwrite, init_from, keep_optimizer, settings)
    options.check()
    train_tasks = TrainTasks(tasks, tasks_every, tasks_limit, tasks_path)
    train_tasks.check()

    from jaxgpt.cli.run_printer import RunPrinter
    from jaxgpt.follow.trackers import tracker_of
    from jaxgpt.parallel.join import joined
    from jaxgpt.post.start import own_code

    for name in track:
        tracker_of(name)  # an error if the tracker is unknown or not installed
    set_advice(lambda: "nothing has been written yet")
    with joined(distributed, is_reported), RunPrinter() as printer:
        start = _start(options, printer)
        if start is None:  # the run is finished
            return 0

        # The command that resumes the run needs the options that the run does not record.
        if own_code(start.config.post):
            printer.resume_options += [f"--post.reward={word}" for word in options.named_rewards]
        if tasks:
            printer.note("loading the tasks")
            start = train_tasks.added_to(start)
            printer.resume_options += train_tasks.words()
        outcome = _train(start, _listener(start, printer, track, profile), printer)
    return UNFINISHED if outcome.stopped else 0


def _start(options: TrainOptions, printer: RunPrinter) -> Start | None:
    """Return the training job of the options with its objective, or None if the run to resume is finished."""
    from jaxgpt.checkpoint.replacement import recover
    from jaxgpt.checkpoint.run import Run
    from jaxgpt.post.start import with_objective
    from jaxgpt.trainer.events import StageProgress
    from jaxgpt.trainer.start import Start

    recover(options.directory)
    run = Run(options.directory)
    is_new = not options.resume
    if options.resume and options.target and not run.exists():
        printer.note(f"no run at {options.out} yet: starting a new run")
        is_new = True

    if is_new:
        start = Start(new_config(options, printer.note), options.out, options.overwrite)
    else:
        resumed = _resumed_start(options, run, printer)
        if resumed is None:
            return None
        start = resumed
    return with_objective(start, options.named_rewards, printer.note, StageProgress(printer, REFERENCE_STAGE))


def _resumed_start(options: TrainOptions, run: Run, printer: RunPrinter) -> Start | None:
    """Return the training job that continues a run, or None if the run is finished."""
    from jaxgpt.checkpoint.index import kept_checkpoint_message
    from jaxgpt.trainer.finished import prune_finished, why_finished
    from jaxgpt.trainer.start import Start

    set_advice(lambda: kept_checkpoint_message(run.checkpoints))
    config = resumed_config(options)
    if options.is_path and not options.source:
        ignored = ignored_settings(options.base, config, options.settings)
        if ignored:
            names = ", ".join(ignored)
            printer.note(f"{options.out} keeps its settings, and ignores these settings of {options.target}: {names}")
    finished = why_finished(run, config)
    if finished:
        prune_finished(run, printer.note)
        printer.draw_interrupted(run, config)
        printer.note(finished)
        return None
    return Start(config, run=run)


def _listener(start: Start, printer: RunPrinter, track: Sequence[str], profile: int) -> Listener:
    """Return the receivers of the events of a run: the terminal, files, trackers and a profile of `profile` steps."""
    from jaxgpt.bench.profile import Profile
    from jaxgpt.follow.listener import Follow
    from jaxgpt.post.sample_file import SampleFile
    from jaxgpt.trainer.evaluation_file import EvaluationFile
    from jaxgpt.trainer.events import Listeners

    listeners: list[Listener] = [printer, EvaluationFile(), Follow(*track, note=printer.note)]
    if start.config.post.is_rollout:
        listeners.append(SampleFile())
    if profile:
        listeners.append(Profile(profile, printer.note))
    return Listeners(*listeners)


def _train(start: Start, listener: Listener, printer: RunPrinter) -> Outcome:
    """Train; add the command that resumes the run to the message of a failure.

    Raises:
        TrainingFailed: if training fails. Errors without a note of the run, such as a `UserError` before the first step, are
            raised unchanged.
    """
    from jaxgpt.checkpoint.new_run import NotReplaced
    from jaxgpt.trainer import loop

    try:
        return loop.train(start, listener)
    except NotReplaced:  # --resume would continue the old run
        raise
    except TrainingFailed as e:
        raise TrainingFailed(f"{e}; resume with: {printer.resume_command}") from None
    except Exception as e:
        kept = "; ".join(own_notes(e))  # notes on the last saved step, or on the old run, which is kept
        if not kept:
            raise
        resume_with = f"; resume with: {printer.resume_command}" if printer.has_steps else ""
        raise TrainingFailed(f"{type(e).__name__}: {one_line(e, 300)}: {kept}{resume_with}") from e
