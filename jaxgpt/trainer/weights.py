"""Initial weights and frozen arrays of a run, opened before the program is built; `starting_state.py` reads the weights."""

from __future__ import annotations

from pathlib import Path
from typing import Any, NamedTuple

from jaxgpt.checkpoint.index import checkpoints
from jaxgpt.checkpoint.info import SEAL, FrozenPart, read_info
from jaxgpt.checkpoint.paths import parse_checkpoint
from jaxgpt.checkpoint.run import Run
from jaxgpt.checkpoint.source import WeightSource, open_source
from jaxgpt.config import Config
from jaxgpt.data.tokenizers.base import Tokenizer
from jaxgpt.data.tokenizers.bos import with_bos
from jaxgpt.errors import UserError
from jaxgpt.train.adapters import FrozenParts
from jaxgpt.trainer.frozen_sources import (
    FrozenArrays,
    FrozenWeights,
    open_adapter_base,
    open_frozen,
    part_of_objective,
)
from jaxgpt.trainer.start import Start

# Names in errors, keyed by names in checkpoints.
FACTS: dict[FrozenPart, str] = {"base": "the frozen weights", "frozen": "the reference"}


class InitialWeights(NamedTuple):
    """Sources of the initial weights and of the frozen arrays, and the tokenizer.

    Attributes:
        initial: source of the initial weights; None: random initialization, `state`, or the run's checkpoint.
        state: checkpoint of the initial weights and optimizer state (`state_from`); None: a new optimizer.
        has_adapters: whether the run trains adapters.
        base: the weights that adapters change; None: random weights, or no adapters.
        frozen: arrays that the objective reads (`Start.frozen`); None: the objective receives the base of the adapters.
        tokenizer: tokenizer of the weights or of the resumed run; None: the tokenizer of the data.
    """

    initial: WeightSource | None = None
    state: Path | None = None
    has_adapters: bool = False
    base: FrozenWeights | None = None
    frozen: FrozenWeights | FrozenArrays | None = None
    tokenizer: Tokenizer | None = None

    @property
    def frozen_argument(self) -> Any:
        """The argument `frozen` of `build`."""
        base = self.base.argument if self.base else None
        if self.frozen is None:
            return base
        if self.has_adapters:
            return FrozenParts(base, self.frozen.argument)
        return self.frozen.argument

    @property
    def frozen_parts(self) -> dict[FrozenPart, FrozenWeights | FrozenArrays]:
        """The frozen arrays, keyed by the names of their checksums in checkpoints."""
        parts: dict[FrozenPart, FrozenWeights | FrozenArrays] = {}
        if self.base is not None:
            parts["base"] = self.base
        if self.frozen is not None:
            parts[part_of_objective(self.has_adapters)] = self.frozen
        return parts

    def facts(self) -> dict[str, Any]:
        """Return the values that must be equal in all processes."""
        facts = {FACTS[name]: part.digest for name, part in self.frozen_parts.items() if part.digest}
        if self.initial:
            facts["the weights of --init-from"] = self.initial.digest
        if self.state:
            facts["the optimizer state of --init-from"] = read_info(self.state).sha256[SEAL]
        return facts

    def checksums(self) -> dict[FrozenPart, str]:
        """Return the checksums that checkpoints record and a resumed run must match; call this after building the program."""
        return {name: part.checksum for name, part in self.frozen_parts.items() if part.checksum}


def open_weights(start: Start) -> InitialWeights:
    """Open the initial weights and the frozen arrays without reading weights onto devices, and read their tokenizer.

    Raises:
        UserError: if weights are missing or damaged, frozen weights do not match the trained model, or the optimizer state
            needs the base of its adapters.
    """
    config = start.config
    run = start.resumed
    is_first = run is None or not checkpoints(run.checkpoints)

    # Find the optimizer state of an earlier run, with its weights.
    origin = None
    state = None
    if config.state_from and is_first:
        state = _existing_state(config)
        path, _ = parse_checkpoint(config.state_from)
        origin = Run(path)

    if config.lora.rank:
        weights = _open_adapters(start, run or origin)
    else:
        weights = InitialWeights(frozen=open_frozen(start))
        if config.init_from and is_first and state is None:
            initial = open_source(*parse_checkpoint(config.init_from))
            weights = weights._replace(initial=initial)

    # Read the tokenizer of the resumed run, or of the run with the initial weights.
    tokenizer = None
    source = origin or _run_of_weights(start, weights)
    if run:
        tokenizer = run.tokenizer()
    elif source:
        tokenizer = with_bos(source.tokenizer(), config.data.bos)
    return weights._replace(state=state, tokenizer=tokenizer)


def _open_adapters(start: Start, trained: Run | None) -> InitialWeights:
    """Open the base of adapters, and the arrays of the objective; `trained` as in `FrozenWeights`."""
    base = open_adapter_base(start, trained)
    frozen = open_frozen(start)
    has_arrays = bool(frozen.digest)
    return InitialWeights(has_adapters=True, base=base, frozen=frozen if has_arrays else None)


def _run_of_weights(start: Start, weights: InitialWeights) -> Run | None:
    """Return the run with the tokenizer for a new run; None: the tokenizer comes from the data."""
    if weights.initial:
        return weights.initial.run
    if weights.base:
        return weights.base.source.run
    if isinstance(start.frozen, WeightSource):  # random weights have the tokenizer of the frozen weights
        return start.frozen.run
    return None


def _existing_state(config: Config) -> Path:
    """Return the path of the checkpoint `state_from`; raise `UserError` if it was deleted, or its adapters have no base."""
    path = Path(config.state_from)
    if not path.is_dir():
        raise UserError(
            f"the checkpoint to start from, {config.state_from}, has been deleted: restore it, or start from a different one "
            f"with --init-from RUN --keep-optimizer --overwrite"
        )
    if config.lora.rank and not config.init_from:
        raise UserError(
            f"with lora.rank, state_from {config.state_from} needs the base of its adapters: set init_from to the init_from of "
            f"that run"
        )
    return path
