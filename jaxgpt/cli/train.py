"""jaxgpt train: start a run, fine-tune weights, repeat a run with the same settings, or resume a run."""

from __future__ import annotations

from collections.abc import Mapping
from pathlib import Path
from typing import TYPE_CHECKING, Any

from jaxgpt.cli.options import NO_SETTINGS, Count, GivenSettings
from jaxgpt.cli.settings import (
    OF_POSITIONS,
    SIZES,
    differing,
    inherited_note,
    named_config,
    origin,
    positions_in,
    unset_of_chats,
    with_settings,
    with_weights,
)
from jaxgpt.config import Config, DistributedConfig, TrainConfig
from jaxgpt.errors import TrainingFailed, UserError, one_line
from jaxgpt.presets import PRESETS
from jaxgpt.signals import UNFINISHED

if TYPE_CHECKING:
    from jaxgpt.trainer.start import Start


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
        keep_optimizer: also start from the optimizer state, by default of the last checkpoint, with a new schedule
        profile: write a profiler trace of this number of steps, after the first 3, to the run directory
        track: start jaxgpt follow for these trackers: tensorboard, wandb, mlflow, trackio
        tasks: also evaluate these tasks of lm-evaluation-harness: names or YAML files, separated by commas
        tasks_every: steps between evaluations of tasks, a multiple of train.eval_every; 0: only after the last step
        tasks_limit: samples of each task; 0: all
        tasks_path: directory with YAML files of further tasks
    """
    base = named_config(target)
    given = target not in ("", *PRESETS)
    source = target if given and Path(target).is_dir() else ""  # the run to repeat or to resume
    if resume and overwrite:
        raise UserError("--resume and --overwrite are mutually exclusive: omit one of them")
    if resume and not (out or source):
        raise UserError("--resume needs a run directory: jaxgpt train --resume --out DIR")
    if source and not (out or resume):
        raise UserError(f"{source} is a run: repeat its settings with --out NEW, or resume it with --resume")
    if keep_optimizer and not init_from:
        raise UserError("--keep-optimizer needs the run with the optimizer state: add --init-from RUN")
    if source and resume and out and Path(out) != Path(source):
        raise UserError(f"--resume continues one run, not both {source} and --out {out}: omit one of them")

    of_tasks = {"--tasks-every": tasks_every, "--tasks-limit": tasks_limit, "--tasks-path": tasks_path}
    if not tasks:
        for option, value in of_tasks.items():
            if value:
                raise UserError(f"{option} has no effect without --tasks: omit it")

    from jaxgpt.bench.profile import Profile
    from jaxgpt.checkpoint.run import NotReplaced, Run, recover
    from jaxgpt.cli.run_printer import RunPrinter
    from jaxgpt.follow.listener import Follow
    from jaxgpt.follow.trackers import tracker_of
    from jaxgpt.parallel.join import joined
    from jaxgpt.post.rollouts import SampleFile
    from jaxgpt.post.start import own_code, parts_of
    from jaxgpt.trainer import loop
    from jaxgpt.trainer.events import EvaluationFile, Listeners
    from jaxgpt.trainer.start import Start, prune_finished, why_finished

    named_rewards = settings.get("post.reward", ())
    for name in track:
        tracker_of(name)
    with joined(distributed), RunPrinter() as printer:
        recover(Path(out or source))
        run = Run(Path(out or source))
        if resume and (run.exists() or not target):
            name = base.preset if target and not source else ""
            config = resumed(run.path, name, init_from, keep_optimizer, settings)
            unused = differing(base, config, settings) if given and not source else ""
            if unused:
                printer.note(f"{out} keeps its settings, and ignores these settings of {target}: {unused}")
            finished = why_finished(run, config)
            if finished:
                prune_finished(run)
                printer.note(finished)
                return 0
            start = Start(config, run=run, **parts_of(config, named_rewards, run, printer.note))
        else:
            if resume:
                printer.note(f"no run at {out} yet: starting a new run")
            weights = init_from or base.state_from or base.init_from
            if source:
                config = repeated(base, Path(source), init_from, keep_optimizer, settings)
                printer.note(f"using the settings of {source}, starting from {origin(config)}")
            elif weights:
                keep_state = keep_optimizer or bool(base.state_from and not init_from)
                inherited = [name for name in unset_of_chats(target) if f"data.{name}" not in settings]
                own: tuple[str, ...] = SIZES if given else ()
                if not init_from:  # a file with weights sets their positions
                    own += positions_in(target)
                config = with_weights(base, weights, settings, own, keep_state, inherited)
                used = inherited_note(config, inherited, weights)
                if used:
                    printer.note(used)
            else:
                config = started(base, settings)
            start = Start(config, out, overwrite, **parts_of(config, named_rewards, note=printer.note))
        # Options that no run records, for the command that resumes it.
        if own_code(start.config.post):
            printer.options += [f"--post.reward={word}" for word in named_rewards]
        if tasks:
            printer.note("loading the tasks")
            start = with_tasks(start, tasks, tasks_every, tasks_limit, tasks_path)
            printer.options += [f"--tasks={tasks}", *(f"{name}={value}" for name, value in of_tasks.items() if value)]

        listener = Listeners(printer, EvaluationFile(), Follow(*track, note=printer.note))
        if start.config.post.is_rollout:
            listener = Listeners(listener, SampleFile())
        if profile:
            listener = Listeners(listener, Profile(profile, printer.note))
        try:
            outcome = loop.train(start, listener)
        except NotReplaced:  # --resume would continue the old run
            raise
        except TrainingFailed as e:
            raise TrainingFailed(f"{e}; resume with: {printer.resume_command}") from None
        except Exception as e:
            kept = kept_notes(e)
            if not kept:
                raise
            resume_with = f"; resume with: {printer.resume_command}" if printer.has_steps else ""
            raise TrainingFailed(f"{type(e).__name__}: {one_line(e, 300)}: {kept}{resume_with}") from e
    return UNFINISHED if outcome.stopped else 0


def kept_notes(error: Exception) -> str:
    """Return the notes of an error in the user's own code about the last saved step, or "". JAX also adds notes to errors."""
    notes = [note for note in getattr(error, "__notes__", []) if note.startswith("jaxgpt: ")]
    return "; ".join(note.removeprefix("jaxgpt: ") for note in notes)


def with_tasks(start: Start, names: str, every: int, limit: int, path: str) -> Start:
    """Add tasks to the evaluators of a run, by default its validation loss. They are loaded before the run is created."""
    from jaxgpt.parallel.processes import process_count
    from jaxgpt.tasks.evaluator import TaskScores
    from jaxgpt.tasks.load import open_tasks, split_names
    from jaxgpt.trainer.evaluation import Every, ValidationLoss

    eval_every = start.config.train.eval_every
    if every % eval_every:
        raise UserError(f"--tasks-every {every} is not a multiple of train.eval_every {eval_every}: change one of them")
    if process_count() > 1:
        raise UserError("--tasks needs a run of one process: evaluate the checkpoints with jaxgpt eval RUN --tasks")
    scores = TaskScores(open_tasks(split_names(names), path), limit or None)
    evaluators = start.evaluators or (ValidationLoss(),)
    return start._replace(evaluators=(*evaluators, Every(scores, every)))


def started(base: Config, settings: Mapping[str, Any]) -> Config:
    """Return the settings of a run with random initial weights."""
    if base.preset == "finetune" or settings.get("lora.rank", base.lora.rank):
        name = "finetune" if base.preset == "finetune" else "--lora.rank"
        raise UserError(f"{name} needs the weights of a run: add --init-from RUN")
    objective = settings.get("post.objective", base.post.objective)
    if objective not in ("next-token", "distill"):
        raise UserError(f"post.objective {objective} needs the weights of a run: add --init-from RUN")

    # The prompt of a preset belongs to its text: with a different text, use the default prompt.
    preset = PRESETS.get(base.preset)
    has_own_text = bool({"data.path", "data.mix"} & settings.keys())
    if has_own_text and preset and preset.config.train.prompt == base.train.prompt:
        settings = {"train.prompt": TrainConfig.prompt, **settings}
    teacher = settings.get("post.reference", base.post.reference)
    if objective == "distill" and teacher:
        return distilled(base, teacher, settings)
    return with_settings(base, settings)


def distilled(base: Config, teacher: str, settings: Mapping[str, Any]) -> Config:
    """Return the settings of a student with random initial weights, and the vocabulary of its teacher."""
    from jaxgpt.checkpoint.run import open_run, parse_checkpoint
    from jaxgpt.post.start import with_reference

    path, _ = parse_checkpoint(teacher)
    run = open_run(path)
    if "data.tokenizer" in settings:
        raise UserError("post.objective distill uses the tokenizer of the teacher: omit data.tokenizer")
    tokenizer = str((path / "tokenizer.json").absolute())
    inherited = {"data.tokenizer": tokenizer, "model.vocab_size": run.config().model.vocab_size}
    config = with_settings(base, {**inherited, **settings})
    return with_reference(config, run.tokenizer())


def repeated(base: Config, source: Path, init_from: str, keep_optimizer: bool, settings: Mapping[str, Any]) -> Config:
    """Return the settings of a run that repeats `source`, from its initial weights or `init_from`."""
    from jaxgpt.checkpoint.run import Run

    if init_from:
        return with_weights(base, init_from, settings, SIZES, keep_optimizer)
    weights = base.state_from or base.init_from
    if weights:
        return with_weights(base, weights, settings, (*SIZES, *OF_POSITIONS), bool(base.state_from))
    if base.model.vocab_size == Run(source).tokenizer().vocab_size:
        base = base.with_model(vocab_size=0)  # 0: determined by the tokenizer of the new run
    return started(base, settings)


def resumed(path: Path, preset: str, init_from: str, keep_optimizer: bool, settings: Mapping[str, Any]) -> Config:
    """Return the settings of a run that continues from its last checkpoint."""
    from jaxgpt.checkpoint.run import open_run, parse_checkpoint

    run = open_run(path)
    old = run.config()
    run.tokenizer()  # integrity check of the tokenizer, even for a finished run
    if preset not in ("", old.preset):
        raise UserError(f"{path} is a run of {old.preset!r}, not {preset!r}: omit the preset, or change --out")

    # A resumed run keeps its initial weights, optimizer and adapters.
    weights, step = parse_checkpoint(init_from)
    used, used_step = parse_checkpoint(old.state_from or old.init_from)
    is_same = weights.resolve() == used.resolve() and step in ("best", used_step)
    if init_from and not is_same:
        raise UserError(f"--init-from {init_from}: {path} started from {origin(old)}; omit it, or start a new run")
    if keep_optimizer and not old.state_from:
        raise UserError(f"--keep-optimizer: {path} started with a new optimizer; omit it, or start a new run (--out)")
    wants_adapters = any(value for name, value in settings.items() if name.startswith("lora."))
    if wants_adapters and not old.lora.rank:
        new = f"jaxgpt train finetune --init-from {path} --lora.rank 8 --data.path PATH"
        raise UserError(f"{path} trains all weights, without adapters; to train adapters, start a new run: {new}")
    return with_settings(old, settings)
