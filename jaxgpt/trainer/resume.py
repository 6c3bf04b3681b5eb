"""Resuming a run: the settings that may change, the checkpoint to continue from, and a check that the data is the same."""

from __future__ import annotations

from collections.abc import Callable
from pathlib import Path
from typing import NamedTuple

from jaxgpt.checkpoint.run import Run, remove_replaced
from jaxgpt.checkpoint.store import latest_valid, read_info, val_losses
from jaxgpt.config import Config, DataConfig, UserError, flat
from jaxgpt.data import Data
from jaxgpt.errors import short_repr


class ResumePoint(NamedTuple):
    """The point from which a run continues.

    Attributes:
        checkpoint: step of the last valid checkpoint; None: there is none yet, so it starts again from step 0.
        finished: whether nothing is left to do.
    """

    checkpoint: int | None
    finished: bool


def resumed_config(old: Config, new: Config) -> Config:
    """Check which settings of a run a command changes, and complete those it leaves to the tokenizer.

    Args:
        old: the run's settings, as in its config.json.
        new: the settings to continue with.

    Raises:
        UserError: a change of what the checkpoint holds, what the run is trained on, or how its checkpoints are compared.
    """
    new = new.with_model(vocab_size=new.model.vocab_size or old.model.vocab_size)
    kinds = {
        "model": "model",
        "data": "data",
        "lora": "adapters",
        "optim.name": "optimizer",
        "optim.ema_decay": "optimizer",
        "train.eval_windows": "validation windows, on which its checkpoints are compared",
    }
    free = set()
    if _sources(old.data) == _sources(new.data):
        free |= {"data.path", "data.mix"}  # `check_data` compares the content
    if old.optim.ema_decay and new.optim.ema_decay:
        free |= {"optim.ema_decay"}
    for name, was, now in changes(old, new):
        kind = kinds.get(name) or kinds.get(name.split(".")[0])
        if kind and name not in free:
            raise UserError(
                f"a resumed run keeps its {kind}: {name} is {short_repr(was)}, not {short_repr(now)}; leave out the flag, or "
                f"start a new run (--out)"
            )
    return new


def _sources(data: DataConfig) -> list[tuple[bool, bool, int]]:
    """Describe the sources of the data without their paths."""
    return [(bool(each.path), each.conversations, weight) for each, weight in data.sources or [(data, 1)]]


def changes(old: Config, new: Config) -> list[tuple[str, object, object]]:
    """List the settings that differ, each with its old and its new value."""
    before, after = flat(old), flat(new)
    return [(name, before[name], after[name]) for name in before if before[name] != after[name]]


def resume_point(run: Run, old: Config, new: Config, tell: Callable[[str], None]) -> ResumePoint:
    """Find the checkpoint to continue from, and report it with its step and every setting that changes.

    Args:
        run: whose only writer this process is.
        old: its settings so far.
        new: as `resumed_config` returned them.
        tell: called with each line.

    Raises:
        UserError: there are checkpoints, but no valid one; or a changed `train.steps` has been reached already.
    """
    remove_replaced(run)
    checkpoint = latest_valid(run.checkpoints, new, tell)
    step, steps = checkpoint or 0, new.train.steps
    if step >= steps != old.train.steps:
        raise UserError(
            f"train.steps {steps} has been reached: {run.path} is at step {step}/{old.train.steps}; set it higher, or "
            f"leave it out"
        )
    if step >= steps and (step != steps or step in val_losses(run.checkpoints)):
        tell(f"already at {step}/{steps}: {run.path} is finished; to train longer, set --train.steps higher")
        return ResumePoint(checkpoint, finished=True)
    if checkpoint is None:
        if new.preset == "finetune" and not new.init_from:  # begun by a version that did not note it
            raise UserError(f"{run.path} has no checkpoint yet: start it again with --init-from RUN --overwrite")
        tell(f"{run.path} has no checkpoint yet: starting again from step 0/{steps}")
    elif not (run.checkpoints / str(step) / "opt_state").is_dir():
        raise UserError(
            f"{run.path} holds a model without an optimizer state, which cannot be resumed; to train it: jaxgpt train "
            f"finetune --init-from {run.path} --data.path PATH"
        )
    else:
        tell(f"resuming from {run.checkpoints / str(step)} at step {step}/{steps}")
    if changed := [f"{name} {short_repr(was)} -> {short_repr(now)}" for name, was, now in changes(old, new)]:
        tell(f"changed settings: {', '.join(changed)}")
    if old.decay_steps != new.decay_steps and not (new.optim.decay_steps or new.optim.schedule == "constant"):
        tell(
            f"the learning rate now reaches its minimum at step {new.decay_steps} instead of {old.decay_steps}, as "
            f"optim.decay_steps is 0 (train.steps); to keep the old schedule: --optim.decay-steps {old.decay_steps}"
        )
    return ResumePoint(checkpoint, finished=False)


def check_paths(data: DataConfig) -> None:
    """Check that the data is where a run left it.

    Raises:
        UserError: it is not.
    """
    for each, _ in data.sources or [(data, 1)]:
        if each.path and not Path(each.path).exists():
            raise UserError(
                f"no such file or folder: {each.path}; if the data has been moved, give its new place with --data."
                f"{'mix' if data.mix else 'path'}"
            )


def check_data(run: Run, checkpoint: int, data: Data, moved: bool) -> None:
    """Check that the data is what a checkpoint was trained on, if the checkpoint says.

    Args:
        run: the run.
        checkpoint: its step.
        data: the data to continue with.
        moved: whether its path has changed.

    Raises:
        UserError: it is not; or the checkpoint does not say, and the path has changed.
    """
    trained_on = read_info(run.checkpoints / str(checkpoint)).about.get("data")
    if moved and not trained_on:
        raise UserError(
            f"the checkpoint of step {checkpoint} of {run.path} does not say what data it was trained on, so data at another "
            f"path cannot be checked: put the data back where it was"
        )
    if trained_on and trained_on != data.fingerprint:
        raise UserError(
            f"the data of {run.path} has changed since step {checkpoint}: {data.source}; restore it, or train on the new data "
            f"in a new run: jaxgpt train finetune --init-from {run.path} --data.path PATH"
        )


def tokens_seen(run: Run, checkpoint: int) -> int:
    """Return the number of tokens that a checkpoint was trained on."""
    return read_info(run.checkpoints / str(checkpoint)).tokens
