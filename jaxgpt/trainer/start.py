"""Start: settings, weights and directory of a run before its first step, and the checks of a resume."""

from __future__ import annotations

from collections.abc import Iterator
from contextlib import ExitStack, contextmanager
from dataclasses import asdict, fields, replace
from pathlib import Path
from typing import Any, NamedTuple

import jax
import numpy as np
import optax

from jaxgpt.checkpoint.base import FrozenBase, check_base, locate_base
from jaxgpt.checkpoint.run import (
    Run,
    check_free,
    new_run,
    open_run,
    parse_checkpoint,
    remove_replaced,
    write_settings,
)
from jaxgpt.checkpoint.store import Info, checkpoints, find_damage, latest_valid, resolve_step, restore
from jaxgpt.checkpoint.versions import versions
from jaxgpt.config import Config, DataConfig, ModelConfig, flat
from jaxgpt.data import Data
from jaxgpt.data.tokenizer import Tokenizer
from jaxgpt.errors import UserError, short_repr
from jaxgpt.files import missing, sole_writer
from jaxgpt.lm.model import load, load_base
from jaxgpt.model import GPT
from jaxgpt.ops import Ops
from jaxgpt.parallel.processes import on_leader, same_on_all
from jaxgpt.train.loss import Objective
from jaxgpt.train.step import TrainState
from jaxgpt.trainer.program import Program
from jaxgpt.trainer.report import Report


class Start(NamedTuple):
    """What to train: a new run in `out`, or the continuation of `run`.

    Attributes:
        config: settings of the run.
        out: directory of a new run; empty: the first free one of runs/PRESET, runs/PRESET-2, ...
        overwrite: replace the run in `out`.
        run: the run to resume; None: a new run.
        data: training and validation data; None: `open_data(config)`.
        model: module to train; None: `GPT(config.model)`.
        optimizer: optax transformation; None: `config.optim`.
        objective: objective of training and evaluation; None: `next_token_loss`.
        ops: operations; None: `jaxgpt.kernels.best(config, mesh)`.
    """

    config: Config
    out: str = ""
    overwrite: bool = False
    run: Run | None = None
    data: Data | None = None
    model: GPT | None = None
    optimizer: optax.GradientTransformation | None = None
    objective: Objective | None = None
    ops: Ops | None = None

    def facts(self) -> dict[str, Any]:
        """Return the values that must be equal in all processes."""
        options = {"--out": self.out, "--overwrite": self.overwrite, "the run to resume": str(self.run)}
        return versions() | options | flat(self.config)


class Weights(NamedTuple):
    """Weights that exist before training.

    Attributes:
        params: initial weights per layer; None: random weights, or those of a checkpoint of the run.
        base: frozen weights of adapters per layer; None: all weights are trained.
        tokenizer: tokenizer of the weights or of the resumed run; None: the tokenizer of the data.
    """

    params: Any = None
    base: FrozenBase | None = None
    tokenizer: Tokenizer | None = None

    def facts(self) -> dict[str, Any]:
        """Return the values that must be equal in all processes."""
        return {"the weights of --init-from": self.base.checksum} if self.base else {}


def weights_at(init_from: str) -> Path:
    """Return the checkpoint of `--init-from`, which is a run (its best checkpoint) or RUN/checkpoints/STEP."""
    directory, which = parse_checkpoint(init_from)
    return Run(directory).checkpoints / str(resolve_step(Run(directory).checkpoints, which))


def moved_base(run: Run, config: Config, init_from: str) -> Config:
    """Set a new path of the base of a run with adapters; `opened` compares the weights."""
    if config.lora.rank:
        return replace(config, init_from=str(weights_at(init_from).absolute()))
    if not config.init_from or Path(init_from) not in (Path(config.init_from), parse_checkpoint(config.init_from)[0]):
        started = f"started from {config.init_from}" if config.init_from else "did not start from other weights"
        raise UserError(f"--init-from {init_from}: {run.path} {started}; omit it, or start a new run")
    return config


def is_finished(run: Run, old: Config, new: Config) -> bool:
    """Return whether a run has nothing left to do."""
    step, last = max(checkpoints(run.checkpoints).items(), default=(0, None))
    steps = new.train.steps
    if step >= steps != old.train.steps:
        raise UserError(f"train.steps {steps} is not above the current step {step} of {run.path}; raise it, or omit it")
    evaluated = last is not None and (last.val_loss is not None or step > steps)
    return step >= steps and evaluated and not find_damage(run.checkpoints / str(step))


def check(start: Start) -> None:
    """Check what can be checked without reading the data.

    Raises:
        UserError: if `out` holds a run, or the run to resume is written by another process or has moved data.
    """
    config, run = start.config, start.run
    if run is None:
        if start.out and Path(start.out).exists():
            check_free(Path(start.out), start.overwrite)
        if start.overwrite:
            _check_overwrite(Path(start.out), config.init_from)
        return
    with sole_writer(run.path):
        pass
    step = max(checkpoints(run.checkpoints), default=None)
    if step is not None and not (run.checkpoints / str(step) / "opt_state").is_dir():
        raise UserError(f"{run.path} has no optimizer state and cannot be resumed; train it in a new run: {_anew(run)}")
    for data, _ in config.data.sources:
        if data.path and not Path(data.path).exists() and start.data is None:
            flag = "--data.mix" if config.data.mix else "--data.path"
            raise missing(data.path, f"; if the data has moved, set {flag}")


def read_weights(start: Start) -> Weights:
    """Read the initial weights (`init_from`) or the base of adapters, and the tokenizer that belongs to them."""
    config, run = start.config, start.run
    tokenizer = run.tokenizer() if run else None
    if not config.init_from:
        return Weights(tokenizer=tokenizer)
    if config.lora.rank:
        path = locate_base(run, config) if run else Path(config.init_from)
        base, its_tokenizer = load_base(path, config.model)
        return Weights(None, base._replace(params=_on_host(base.params)), tokenizer or its_tokenizer)
    if run and checkpoints(run.checkpoints):
        return Weights(tokenizer=tokenizer)
    _, params, its_tokenizer, _ = load(*parse_checkpoint(config.init_from))
    return Weights(_on_host(params), None, tokenizer or its_tokenizer)


def first_state(program: Program, run: Run, last: Info | None, params: Any) -> TrainState:
    """Restore the state of a checkpoint, or make the first one from weights per layer (None: random weights)."""
    if last is None:
        return program.init(params)
    return program.from_checkpoint(restore(run.checkpoints, last.step, program.layout.abstract_checkpoint))


@contextmanager
def opened(
    start: Start, config: Config, data: Data, base: FrozenBase | None, report: Report
) -> Iterator[tuple[Run, Info | None]]:
    """Create the run, or open the run to resume, as its only writer; process 0 does it for all processes.

    Yields:
        The run, and the checkpoint to resume from; None: train from step 0.

    Raises:
        UserError: if another process writes the run, there is no valid checkpoint, or it was trained on other data or on
            adapters of another base.
    """

    def create() -> tuple[str, None]:
        return str(stack.enter_context(new_run(start.out, config, data.tokenizer, start.overwrite)).path), None

    def resume(run: Run) -> tuple[str, dict[str, Any] | None]:
        stack.enter_context(sole_writer(run.path))
        remove_replaced(run)
        old = run.config()
        resumed(old, config)
        step = latest_valid(run.checkpoints, config, report.note)
        last = None if step is None else checkpoints(run.checkpoints)[step]
        if last is None:
            run.checkpoints.mkdir(exist_ok=True)  # a user may have deleted the folder
            report.note(f"{run.path} has no checkpoint yet: starting again from step 0/{config.train.steps}")
        else:
            if last.about.get("data") != data.fingerprint:
                raise UserError(
                    f"the data of {run.path} has changed since step {step}: {data.source}; restore it, or train on the new "
                    f"data in a new run: {_anew(run)}"
                )
            if base is not None:
                check_base(run, config, last.step, base.checksum, config.init_from)
            report.note(f"resuming from {run.checkpoints / str(step)} at step {step}/{config.train.steps}")
        for line in _change_notes(old, config):
            report.note(line)
        write_settings(run, config, data.tokenizer)
        return str(run.path), None if last is None else asdict(last)

    with ExitStack() as stack:
        path, last = on_leader(lambda: resume(start.run) if start.run else create())
        run = same_on_all(lambda: open_run(Path(path)), lambda _: {})  # every process must see the directory
        yield run, Info(**last) if last else None


def resumed(old: Config, new: Config) -> Config:
    """Check which settings of a run change, and complete those that came from the tokenizer."""
    new = new.with_model(vocab_size=new.model.vocab_size or old.model.vocab_size)
    # Data may have moved: `opened` compares their content.
    moved = ("data.path", "data.mix") if _sources(old.data) == _sources(new.data) else ()
    for name, was, now in changes(old, new):
        fixed = name.startswith(("model.", "data.", "lora.")) or name in ("optim.name", "train.eval_windows")
        if name == "optim.ema_decay":
            fixed = not (was and now)
        if fixed and name not in moved:
            raise UserError(
                f"a resumed run keeps {name}: {short_repr(was)}, not {short_repr(now)}; omit it, or start a new run (--out)"
            )
    return new


def changes(old: Config, new: Config) -> list[tuple[str, object, object]]:
    """List the settings that differ, each with its old and its new value."""
    before, after = flat(old), flat(new)
    return [(name, before[name], after[name]) for name in before if before[name] != after[name]]


def _change_notes(old: Config, new: Config) -> list[str]:
    notes = [f"{name} {short_repr(was)} -> {short_repr(now)}" for name, was, now in changes(old, new)]
    notes = [f"changed settings: {', '.join(notes)}"] if notes else []
    if old.decay_steps != new.decay_steps and not (new.optim.decay_steps or new.optim.schedule == "constant"):
        notes.append(
            f"the learning rate now reaches its minimum at step {new.decay_steps} instead of {old.decay_steps}, as "
            f"optim.decay_steps is 0 (train.steps); to keep the old schedule: --optim.decay-steps {old.decay_steps}"
        )
    return notes


def check_same_model(old: ModelConfig, new: ModelConfig) -> None:
    """Check that a model can start from the weights of another: only dropout, and a context without a table, may differ."""
    free = {"dropout"} if old.positions == "learned" else {"dropout", "block_size"}
    for name in [each.name for each in fields(ModelConfig) if each.name not in free]:
        was, now = getattr(old, name), getattr(new, name)
        if was != now:
            window = "; to train on shorter windows, use --data.window" if name == "block_size" else ""
            raise UserError(f"model.{name} must be {was!r}, as in the run of --init-from, not {now!r}: omit it{window}")


def _check_overwrite(out: Path, init_from: str) -> None:
    """Check that replacing a run deletes neither the initial weights nor the bases of their adapters."""
    weights, what = Path(init_from), "the weights to start from"
    while init_from:
        if out.resolve() in weights.resolve().parents:
            raise UserError(f"--out {out} --overwrite would delete {what}: choose a different --out")
        run = Run(parse_checkpoint(str(weights))[0])
        config = run.config()
        init_from, what = config.init_from if config.lora.rank else "", f"the base of {run.path}"
        weights = locate_base(run, config) if init_from else weights


def _anew(run: Run) -> str:
    return f"jaxgpt train finetune --init-from {run.path} --data.path PATH"


def _sources(data: DataConfig) -> list[tuple[bool, bool, int]]:
    """List the sources of the data without their paths."""
    return [(bool(each.path), each.conversations, weight) for each, weight in data.sources]


def _on_host(params: Any) -> Any:
    return jax.tree.map(np.asarray, params)
