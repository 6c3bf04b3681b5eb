"""Resume: check the data and the changed settings of a run, and return its last checkpoint."""

from __future__ import annotations

import math
from collections.abc import Callable

from jaxgpt.checkpoint.base import FrozenBase, check_base
from jaxgpt.checkpoint.run import Run, remove_replaced, write_settings
from jaxgpt.checkpoint.store import Info, checkpoints, find_damage, latest_valid
from jaxgpt.config import Config, DataConfig, TrainConfig, changes
from jaxgpt.data import Data
from jaxgpt.errors import UserError, short_repr
from jaxgpt.files import sole_writer


def check_resume(old: Config, new: Config, step: int = 0) -> None:
    """Check which settings of a run change, and that it has steps left if `train.steps` changes.

    Raises:
        UserError: if a setting must not change.
    """
    # Data may have moved: `reopen` compares their content.
    moved = ("data.path", "data.mix") if _sources(old.data) == _sources(new.data) else ()
    for name, (was, now) in changes(old, new).items():
        fixed = name.startswith(("model.", "data.", "lora.")) or name in ("optim.name", "train.eval_windows")
        if name == "optim.ema_decay":
            fixed = not (was and now)
        if fixed and name not in moved:
            raise UserError(
                f"a resumed run keeps {name}: {short_repr(was)}, not {short_repr(now)}; omit it, or start a new run (--out)"
            )
    if step >= new.train.steps != old.train.steps and not new.train.epochs:
        raise UserError(f"train.steps {new.train.steps} is not above the current step {step}; raise it, or omit it")


def why_finished(run: Run, config: Config) -> str:
    """Return why a run has nothing left to do, or "". The steps of `train.epochs` are known once the data have been read.

    Raises:
        UserError: if a setting must not change.
    """
    infos, train = checkpoints(run.checkpoints), config.train
    if not infos:
        return ""
    step = max(infos)
    last = infos[step]
    check_resume(last.config(), config, step)
    if train.epochs or last.val_loss is None or find_damage(run.checkpoints / str(step)):
        return ""
    if step >= train.steps:
        return (
            f"already at {train.steps}/{train.steps}: {run.path} is finished; to train longer, set --train.steps higher"
        )
    if out_of_patience(best_so_far(last, train), step, train):
        return (
            f"stopped early at {step}/{train.steps}: {run.path} is finished, with no lower validation loss in "
            f"{train.patience} evaluations; to train longer, set --train.patience or --train.steps higher"
        )
    return ""


def best_so_far(last: Info, train: TrainConfig) -> tuple[float, int]:
    """Return the lowest validation loss up to a checkpoint, and its step. A change of `train.steps` begins a new count."""
    if last.about.get("best") and last.config().train.steps == train.steps:
        loss, step = last.about["best"]
        return loss, step
    return math.inf, last.step


def out_of_patience(best: tuple[float, int], evaluated: int, train: TrainConfig) -> bool:
    """Return whether the last `train.patience` evaluations, up to step `evaluated`, have no lower loss than `best`."""
    return bool(train.patience) and evaluated - best[1] >= train.patience * train.eval_every


def check_resumable(run: Run) -> None:
    """Check what can be checked without reading the data.

    Raises:
        UserError: if another process writes the run, or it has no optimizer state.
    """
    with sole_writer(run.path):
        pass
    step = max(checkpoints(run.checkpoints), default=None)
    if step is not None and not (run.checkpoints / str(step) / "opt_state").is_dir():
        raise UserError(f"{run.path} has no optimizer state and cannot be resumed; train it in a new run: {_anew(run)}")


def reopen(run: Run, config: Config, data: Data, base: FrozenBase | None, note: Callable[[str], None]) -> Info | None:
    """Return the checkpoint to continue from (None: train from step 0), and write the changed settings.

    The caller holds the lock of the run.

    Raises:
        UserError: if there is no valid checkpoint, or it was trained on other data or on adapters of a different base.
    """
    remove_replaced(run)
    last = latest_valid(run.checkpoints, note)
    old = last.config() if last else run.config()
    check_resume(old, config, last.step if last else 0)
    if last is None:
        note(f"{run.path} has no checkpoint yet: starting again from step 0/{config.train.steps}")
    else:
        if last.about.get("data") != data.fingerprint:
            raise UserError(
                f"the data of {run.path} has changed since step {last.step}: {data.source}; restore it, or train on the new "
                f"data in a new run: {_anew(run)}"
            )
        if base is not None:
            check_base(run, last.step, base.checksum, config.init_from)
        note(f"resuming from {run.checkpoints / str(last.step)} at step {last.step}/{config.train.steps}")
    if changed := changes(old, config):
        settings = (f"{name} {short_repr(was)} -> {short_repr(now)}" for name, (was, now) in changed.items())
        note(f"changed settings: {', '.join(settings)}")
    write_settings(run, config, data.tokenizer)
    return last


def _sources(data: DataConfig) -> list[tuple[bool, bool, int]]:
    """List the sources of the data without their paths."""
    return [(bool(each.path), each.conversations, weight) for each, weight in data.sources]


def _anew(run: Run) -> str:
    return f"jaxgpt train finetune --init-from {run.path} --data.path PATH"
