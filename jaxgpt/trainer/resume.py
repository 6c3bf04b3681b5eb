"""The settings of a run that may change when it is resumed."""

from __future__ import annotations

from pathlib import Path
from typing import Any

from jaxgpt.config import Config, DataConfig
from jaxgpt.config_changes import changes
from jaxgpt.data.prepared.index import read_index
from jaxgpt.data_files import place_of
from jaxgpt.errors import UserError, short_repr
from jaxgpt.record_files import RECORDS

# Prefixes of the names of settings that a resumed run keeps; `_may_change` has the exceptions.
KEPT = ("model.", "data.", "lora.", "post.", "optim.name", "train.eval_windows")


def check_resume(old: Config, new: Config, step: int = 0) -> None:
    """Check that a run can be resumed with changed settings, and has steps left if `train.steps` changes.

    Raises:
        UserError: if a setting that a resumed run must keep has changed, or the changed `train.steps` leaves no steps.
    """
    for name, (was, now) in changes(old, new).items():
        if not _may_change(name, old, new):
            raise UserError(_kept(old, name, was, now))
    if step >= new.train.steps != old.train.steps and not new.train.epochs:
        raise UserError(f"--train.steps {new.train.steps} is not above the current step {step}; raise it, or omit it")


def _may_change(name: str, old: Config, new: Config) -> bool:
    """Return whether a resumed run may change a setting from `old` to `new`."""
    match name:
        case "post.reward_seconds":
            return True
        case "data.path" | "data.mix":
            return _may_continue(old.data, new.data)
        case "optim.ema_decay":  # a run can neither start nor end an EMA, but can change its decay
            return bool(old.optim.ema_decay and new.optim.ema_decay)
        case "train.batch_size" | "train.steps_per_call":  # these determine the number of answers in a rollout
            return not old.post.is_rollout
    return not name.startswith(KEPT)


def _may_continue(old: DataConfig, new: DataConfig) -> bool:
    """Return whether a run may continue with the paths and mixtures of `new`, if their content allows it.

    A mixture may follow any data. A path may follow a path of the same kind, because the data may have moved.
    """
    if new.mix:
        return True
    return not old.mix and _kind_of(old.path) == _kind_of(new.path)


def _kind_of(path: str) -> tuple[bool, bool]:
    """Return whether a path is given, and whether its suffix is the suffix of a records file; the file need not exist."""
    return bool(path), Path(path).suffix.lower() in RECORDS


def _kept(old: Config, name: str, was: Any, now: Any) -> str:
    """Return the error for a changed setting that a resumed run must keep, with the value in use, not an unused default."""
    option = f"--{name.replace('_', '-')}"
    given = " ".join(now) if isinstance(now, tuple) else str(now)
    if name in ("data.dataset", "data.path", "data.mix"):
        ways = (
            "continue on different data with --data.mix PATH=WEIGHT, or in a new run with "
            "--init-from RUN --keep-optimizer --out NEW"
        )
        return f"a resumed run keeps its data, not {option} {given}: this run uses {_data_in_use(old.data)}; omit it, {ways}"
    if name in ("data.tokenizer", "data.vocab_size"):
        used = _tokenizer_in_use(old)
        return f"a resumed run keeps {used}, not {option} {given}; omit it, or start a new run (--out)"
    return f"a resumed run keeps {name}: {short_repr(was)}, not {short_repr(now)}; omit it, or start a new run (--out)"


def _data_in_use(data: DataConfig) -> str:
    words = data.phases[-1].words
    return f"the mixture {' '.join(words)}" if words else data.path or f"the built-in text {data.dataset}"


def _tokenizer_in_use(config: Config) -> str:
    for source in config.data.sources:
        if source.path and read_index(Path(place_of(source.path, config.directory))):
            return f"the tokenizer of {source.path}"
    return f"the tokenizer {config.data.tokenizer}"
