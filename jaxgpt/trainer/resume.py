"""Resume: the checks and changes of a run that continues from its last checkpoint."""

from __future__ import annotations

from collections.abc import Callable
from dataclasses import replace
from pathlib import Path

from jaxgpt.checkpoint.base import FrozenBase, check_base, weights_at
from jaxgpt.checkpoint.run import Run, parse_checkpoint, remove_replaced, write_settings
from jaxgpt.checkpoint.store import Info, checkpoints, find_damage, latest_valid
from jaxgpt.config import Config, DataConfig, changes
from jaxgpt.data import Data
from jaxgpt.errors import UserError, short_repr
from jaxgpt.files import sole_writer


def check_resume(old: Config, new: Config) -> Config:
    """Check which settings of a run change, and complete those that came from the tokenizer."""
    new = new.with_model(vocab_size=new.model.vocab_size or old.model.vocab_size)
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
    return new


def moved_base(run: Run, config: Config, init_from: str) -> Config:
    """Set a new path of the base of a run with adapters; `reopen` compares the weights."""
    if config.lora.rank:
        return replace(config, init_from=str(weights_at(init_from).absolute()))
    if not config.init_from or Path(init_from) not in (Path(config.init_from), parse_checkpoint(config.init_from)[0]):
        started = f"started from {config.init_from}" if config.init_from else "did not start from other weights"
        raise UserError(f"--init-from {init_from}: {run.path} {started}; omit it, or start a new run")
    return config


def is_finished(run: Run, old: Config, new: Config) -> bool:
    """Return whether a run has nothing left to do. The steps of `train.epochs` are known once the data have been read."""
    step, last = max(checkpoints(run.checkpoints).items(), default=(0, None))
    if new.train.epochs:
        return False
    _check_steps(run, step, old, new)
    evaluated = last is not None and (last.val_loss is not None or step > new.train.steps)
    return step >= new.train.steps and evaluated and not find_damage(run.checkpoints / str(step))


def check_resumable(run: Run, config: Config, given_data: bool) -> None:
    """Check what can be checked without reading the data.

    Raises:
        UserError: if another process writes the run, it has no optimizer state, or its data have moved.
    """
    with sole_writer(run.path):
        pass
    step = max(checkpoints(run.checkpoints), default=None)
    if step is not None and not (run.checkpoints / str(step) / "opt_state").is_dir():
        raise UserError(f"{run.path} has no optimizer state and cannot be resumed; train it in a new run: {_anew(run)}")
    for data, _ in config.data.sources:
        if data.path and not Path(data.path).exists() and not given_data:
            flag = "--data.mix" if config.data.mix else "--data.path"
            raise UserError(f"no such file or directory: {data.path}; if the data has moved, set {flag}")


def reopen(run: Run, config: Config, data: Data, base: FrozenBase | None, note: Callable[[str], None]) -> Info | None:
    """Find the checkpoint to continue from, and write the changed settings. The caller holds the lock of the run.

    Returns:
        The checkpoint; None: train from step 0.

    Raises:
        UserError: if there is no valid checkpoint, or it was trained on other data or on adapters of another base.
    """
    remove_replaced(run)
    old = run.config()
    check_resume(old, config)
    step = latest_valid(run.checkpoints, config, note)
    last = None if step is None else checkpoints(run.checkpoints)[step]
    if last is None:
        run.checkpoints.mkdir(exist_ok=True)  # a user may have deleted the directory
        note(f"{run.path} has no checkpoint yet: starting again from step 0/{config.train.steps}")
    else:
        _check_steps(run, last.step, old, config)
        if last.about.get("data") != data.fingerprint:
            raise UserError(
                f"the data of {run.path} has changed since step {step}: {data.source}; restore it, or train on the new "
                f"data in a new run: {_anew(run)}"
            )
        if base is not None:
            check_base(run, config, last.step, base.checksum, config.init_from)
        note(f"resuming from {run.checkpoints / str(step)} at step {step}/{config.train.steps}")
    for line in _change_notes(old, config):
        note(line)
    write_settings(run, config, data.tokenizer)
    return last


def _change_notes(old: Config, new: Config) -> list[str]:
    changed = ", ".join(
        f"{name} {short_repr(was)} -> {short_repr(now)}" for name, (was, now) in changes(old, new).items()
    )
    notes = [f"changed settings: {changed}"] if changed else []
    if old.decay_steps != new.decay_steps and not (new.optim.decay_steps or new.optim.schedule == "constant"):
        notes.append(
            f"the learning rate now reaches its minimum at step {new.decay_steps} instead of {old.decay_steps}, as "
            f"optim.decay_steps is 0 (train.steps); to keep the old schedule: --optim.decay-steps {old.decay_steps}"
        )
    return notes


def _check_steps(run: Run, step: int, old: Config, new: Config) -> None:
    if step >= new.train.steps != old.train.steps:
        raise UserError(
            f"train.steps {new.train.steps} is not above the current step {step} of {run.path}; raise it, or omit it"
        )


def _sources(data: DataConfig) -> list[tuple[bool, bool, int]]:
    """List the sources of the data without their paths."""
    return [(bool(each.path), each.conversations, weight) for each, weight in data.sources]


def _anew(run: Run) -> str:
    return f"jaxgpt train finetune --init-from {run.path} --data.path PATH"
