"""Start: the settings, the weights and the directory of a run before its first step."""

from __future__ import annotations

import math
from collections.abc import Iterator
from contextlib import ExitStack, contextmanager
from dataclasses import asdict, replace
from pathlib import Path
from typing import Any, NamedTuple

import jax
import numpy as np
import optax

from jaxgpt.checkpoint.base import FrozenBase, locate_base, weights_at
from jaxgpt.checkpoint.run import Run, check_free, new_run, open_run, parse_checkpoint
from jaxgpt.checkpoint.store import Info, checkpoints, restore
from jaxgpt.config import Config, ModelConfig, changes, flat
from jaxgpt.data import Batches, Data
from jaxgpt.data.tokenizer import Tokenizer
from jaxgpt.errors import UserError
from jaxgpt.files import sole_writer
from jaxgpt.lm.model import load, load_base
from jaxgpt.model import GPT
from jaxgpt.ops import Ops
from jaxgpt.parallel.processes import on_leader, same_on_all
from jaxgpt.train.loss import Objective
from jaxgpt.train.step import TrainState
from jaxgpt.trainer.metrics import versions
from jaxgpt.trainer.program import Program
from jaxgpt.trainer.report import Report
from jaxgpt.trainer.resume import check_resumable, reopen


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


def check(start: Start) -> None:
    """Check what can be checked without reading the data.

    Raises:
        UserError: if `out` holds a run or the weights to start from, or the run cannot be resumed.
    """
    if start.run:
        return check_resumable(start.run)
    out, weights = Path(start.out), Path(start.config.init_from)
    if start.out and out.exists():
        check_free(out, start.overwrite)
    if start.overwrite and start.config.init_from and out.resolve() in weights.resolve().parents:
        raise UserError(f"--out {out} --overwrite would delete the weights to start from: choose a different --out")


def read_weights(start: Start) -> Weights:
    """Read the initial weights (`init_from`) or the base of adapters, and the tokenizer that belongs to them."""
    config, run = start.config, start.run
    tokenizer = run.tokenizer() if run else None
    if not config.init_from:
        return Weights(tokenizer=tokenizer)
    if config.lora.rank:
        base, its_tokenizer = load_base(locate_base(run, config) if run else config.init_from, config.model)
        return Weights(None, base._replace(params=_on_host(base.params)), tokenizer or its_tokenizer)
    if run and checkpoints(run.checkpoints):
        return Weights(tokenizer=tokenizer)
    _, params, its_tokenizer, _ = load(*parse_checkpoint(config.init_from))
    return Weights(_on_host(params), None, tokenizer or its_tokenizer)


def completed(config: Config, data: Data) -> Config:
    """Set what the data determine: the vocabulary of the model, and the steps of `train.epochs`."""
    config, train = config.with_model(vocab_size=config.model.vocab_size or data.tokenizer.vocab_size), config.train
    data.check(config)
    if not train.epochs:
        return config
    windows = round(train.epochs * Batches.of(config, data.train).per_epoch, 6)  # 1.1 * 10 is 11.000000000000002
    return replace(config, train=replace(train, steps=max(math.ceil(windows / train.batch_size), 1), epochs=0.0))


@contextmanager
def open_for_training(
    start: Start, config: Config, data: Data, base: FrozenBase | None, report: Report
) -> Iterator[tuple[Run, Info | None]]:
    """Create the run, or open the run to resume, as its only writer; process 0 does it for all processes.

    Yields the run, and the checkpoint to resume from; None: train from step 0.

    Raises:
        UserError: if another process writes the run, or it cannot be resumed with these settings, data and base.
    """

    def on_disk() -> tuple[str, dict[str, Any] | None]:
        if start.run is None:
            return str(lock.enter_context(new_run(start.out, config, data.tokenizer, start.overwrite)).path), None
        lock.enter_context(sole_writer(start.run.path))
        last = reopen(start.run, config, data, base, report.note)
        return str(start.run.path), asdict(last) if last else None

    with ExitStack() as lock:
        path, last = on_leader(on_disk)
        run = same_on_all(lambda: open_run(Path(path)), lambda _: {})  # every process must see the directory
        yield run, Info(**last) if last else None


def first_state(program: Program, run: Run, last: Info | None, params: Any) -> TrainState:
    """Restore the state of a checkpoint, or make the first one from weights per layer (None: random weights)."""
    if last is None:
        return program.init(params)
    return program.from_checkpoint(restore(run.checkpoints, last.step, program.abstract_checkpoint))


def with_weights(base: Config, init_from: str, keep: bool) -> Config:
    """Return settings that start from the weights of a run, with its model and tokenizer.

    With `keep`, `base` sets dropout and context, the model settings that may differ.
    """
    directory, _ = parse_checkpoint(init_from)
    model = open_run(directory).config().model
    if keep:
        own = {name: getattr(base.model, name) for name in _may_differ(model)}
        model = replace(model, **own)
    # The paths are valid in every directory.
    data = replace(base.data, tokenizer=str((directory / "tokenizer.json").absolute()))
    return replace(base, model=model, data=data, init_from=str(weights_at(init_from).absolute()))


def check_same_model(weights: Config, config: Config) -> None:
    """Check that settings keep the model and the tokenizer of `with_weights`, except dropout and context.

    Raises:
        UserError: if another setting differs.
    """
    free = [f"model.{name}" for name in _may_differ(weights.model)]
    for name, (was, now) in changes(weights, config).items():
        if (name.startswith("model.") and name not in free) or name == "data.tokenizer":
            window = "; to train on shorter windows, use --data.window" if name == "model.block_size" else ""
            raise UserError(f"{name} must be {was!r}, as in the run of --init-from, not {now!r}: omit it{window}")


def _may_differ(model: ModelConfig) -> tuple[str, ...]:
    """Name the model settings that no weight depends on: dropout, and the context without a table of positions."""
    return ("dropout",) if model.positions == "learned" else ("dropout", "block_size")


def _on_host(params: Any) -> Any:
    return jax.tree.map(np.asarray, params)
