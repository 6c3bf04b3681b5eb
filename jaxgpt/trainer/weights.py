"""Initial weights and frozen arrays of a run: opened before the program is built, then read onto its devices."""

from __future__ import annotations

from dataclasses import dataclass
from pathlib import Path
from typing import Any, NamedTuple

import jax

from jaxgpt.checkpoint.index import checkpoints
from jaxgpt.checkpoint.info import SEAL, Info, read_info
from jaxgpt.checkpoint.match import first_difference
from jaxgpt.checkpoint.paths import parse_checkpoint
from jaxgpt.checkpoint.run import Run
from jaxgpt.checkpoint.source import Place, WeightSource, check_base, checksum, open_base, open_base_of, open_source
from jaxgpt.config import Config
from jaxgpt.data.bos import with_bos
from jaxgpt.data.tokenizer import Tokenizer
from jaxgpt.errors import UserError
from jaxgpt.model.params import abstract_params
from jaxgpt.train.loss import FrozenParts, base_of
from jaxgpt.train.step import TrainState
from jaxgpt.trainer.program import Program
from jaxgpt.trainer.start import Start


@dataclass
class Base:
    """Frozen weights: a function that reads them onto the devices of a program, and records their checksum.

    Attributes:
        source: the weights.
        run: run that needs these weights, to resume or, with adapters, to start from; None: a new run.
        part: as for `check_base`.
        checksum: SHA-256 of the weights, after the call.
    """

    source: WeightSource
    run: Run | None
    part: str = "base"
    checksum: str = ""

    def __call__(self, place: Place) -> Any:
        """Read the weights; raise `UserError` if the run was trained with different weights."""
        base = self.source.read_frozen(place)
        if self.run:
            check_base(self.run, self.source, base, self.part)
        self.checksum = base.checksum
        return base.params


class InitialWeights(NamedTuple):
    """Sources of the initial weights and of the frozen arrays, and the tokenizer.

    Attributes:
        initial: source of the initial weights; None: random initialization, or the run's checkpoint.
        frozen: base of the adapters (None: random weights), `Start.frozen`, or `FrozenParts` of both, with unstacked layers; a
            `Base` is not yet read.
        checksum: SHA-256 of the arrays of `Start.frozen`; "": no arrays.
        tokenizer: tokenizer of the weights or of the resumed run; None: the tokenizer of the data.
        state: checkpoint of the initial weights and optimizer state (`state_from`); None: a new optimizer.
    """

    initial: WeightSource | None = None
    frozen: Base | Any = ()
    checksum: str = ""
    tokenizer: Tokenizer | None = None
    state: Path | None = None

    def facts(self) -> dict[str, Any]:
        """Return the values that must be equal in all processes."""
        facts = {}
        if self.checksum:
            has_base = isinstance(self.frozen, FrozenParts)
            facts["the reference" if has_base else "the frozen weights"] = self.checksum
        for part, each in self.parts.items():
            if isinstance(each, Base):
                name = "the reference" if part == "frozen" else "the frozen weights"
                facts[name] = each.source.digest
        if self.initial:
            facts["the weights of --init-from"] = self.initial.digest
        if self.state:
            facts["the optimizer state of --init-from"] = read_info(self.state).sha256[SEAL]
        return facts

    def about(self) -> dict[str, Any]:
        """Return facts that every checkpoint records and a resumed run must match; call this after reading the weights."""
        *_, last = self.parts
        checksums = {last: self.checksum}
        for part, each in self.parts.items():
            if isinstance(each, Base):
                checksums[part] = each.checksum
        return {part: checksum for part, checksum in checksums.items() if checksum}

    @property
    def parts(self) -> dict[str, Any]:
        """The frozen arrays by the name of their checksum in checkpoints; `Start.frozen` is the last."""
        if isinstance(self.frozen, FrozenParts):
            return {"base": self.frozen.base, "frozen": self.frozen.of_objective}
        return {"base": self.frozen}


def open_weights(start: Start) -> InitialWeights:
    """Open the initial weights (`init_from`) or the base of adapters without reading them, and read their tokenizer.

    Raises:
        UserError: if the weights are missing or damaged, or the optimizer state needs the base of its adapters.
    """
    config = start.config
    run = start.resumed
    is_first = run is None or not checkpoints(run.checkpoints)

    # The optimizer state of an earlier run, with its weights.
    origin = None
    state = None
    if config.state_from and is_first:
        state = _existing_state(config.state_from)
        path, _ = parse_checkpoint(config.state_from)
        origin = Run(path)

    if config.lora.rank:
        weights = _open_adapters(start, run or origin, state)
    else:
        weights = _open_frozen_arrays(start)._replace(state=state)
        if config.init_from and is_first and state is None:
            initial = open_source(*parse_checkpoint(config.init_from))
            weights = weights._replace(initial=initial)

    # The tokenizer of the resumed run, or of the run with the initial weights.
    tokenizer = None
    source = origin or _run_of_weights(start, weights)
    if run:
        tokenizer = run.tokenizer()
    elif source:
        tokenizer = with_bos(source.tokenizer(), config.data.bos)
    return weights._replace(tokenizer=tokenizer)


def _open_adapters(start: Start, owner: Run | None, state: Path | None) -> InitialWeights:
    """Open the base of adapters.

    Args:
        start: the training job.
        owner: run that was trained with this base, to resume or to start from; None: a new run.
        state: checkpoint of the initial adapters and optimizer state.
    """
    config = start.config
    if state and not config.init_from:
        raise UserError(
            f"with lora.rank, state_from {config.state_from} needs the base of its adapters: set init_from to the init_from of "
            f"that run"
        )

    base = None
    if config.init_from:
        run = start.resumed
        source = open_base(run, config) if run else open_base_of(config.init_from, config.model)
        base = Base(source, owner)

    # The objective receives the given arrays, otherwise the base.
    weights = _open_frozen_arrays(start, part="frozen")
    has_own = isinstance(weights.frozen, Base) or bool(weights.checksum)
    frozen = FrozenParts(base, weights.frozen) if has_own else base
    return weights._replace(frozen=frozen, state=state)


def _open_frozen_arrays(start: Start, part: str = "base") -> InitialWeights:
    """Open the frozen weights of an objective, or compute the checksum of its frozen arrays; `part` as for `check_base`."""
    frozen = start.frozen
    if isinstance(frozen, str):
        source = open_frozen(frozen, start.config)
        return InitialWeights(frozen=Base(source, start.resumed, part))
    if isinstance(frozen, WeightSource):
        return InitialWeights(frozen=Base(frozen, start.resumed, part))
    if jax.tree.leaves(frozen):
        return InitialWeights(frozen=frozen, checksum=checksum(frozen))
    return InitialWeights(frozen=frozen)


def _run_of_weights(start: Start, weights: InitialWeights) -> Run | None:
    """Return the run with the tokenizer for a new run; None: the tokenizer comes from the data."""
    if weights.initial:
        return weights.initial.run
    base = base_of(weights.frozen)
    if start.config.lora.rank and isinstance(base, Base):
        return base.source.run
    if isinstance(start.frozen, WeightSource):  # random weights have the tokenizer of the frozen weights
        return start.frozen.run
    return None


def _existing_state(checkpoint: str) -> Path:
    """Return the path of a checkpoint to start from; raise `UserError` if it has been deleted."""
    path = Path(checkpoint)
    if not path.is_dir():
        raise UserError(
            f"the checkpoint to start from, {checkpoint}, has been deleted: restore it, or start from a different one with "
            f"--init-from RUN --keep-optimizer --overwrite"
        )
    return path


def open_frozen(path: str, config: Config) -> WeightSource:
    """Open the frozen weights at a path; raise `UserError` if their model has different weights than the trained model."""
    source = open_source(*parse_checkpoint(path))
    difference = first_difference(abstract_params(source.config.model), config.model)
    if difference:
        raise UserError(
            f"the model of {path} differs from the trained model ({difference}): choose weights of the same model"
        )
    return source


def starting_state(program: Program, run: Run, last: Info | None, weights: InitialWeights) -> TrainState:
    """Return the state before the first step: from the checkpoint `last`, from a different run, or new."""
    if last:
        return program.restore(run.checkpoints, last.step)
    if weights.state:
        return program.with_new_schedule(weights.state.parent, int(weights.state.name))
    if weights.initial:
        return program.init(weights.initial.read(program.place), donate=True)
    return program.init()
