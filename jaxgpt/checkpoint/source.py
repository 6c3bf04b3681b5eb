"""Sources of weights: a checkpoint of a run with the base of its adapters, checked first, then read onto its devices.

`open_source` verifies files, and reads no weights onto devices. `WeightSource.read` reads each array with its sharding, so a
device holds its shards and at most one more array at a time.
"""

from __future__ import annotations

import hashlib
from collections.abc import Callable
from pathlib import Path
from typing import Any, NamedTuple, TypeVar

import jax
import numpy as np

from jaxgpt.checkpoint.index import checkpoints
from jaxgpt.checkpoint.info import SEAL, FrozenPart, Info, read_info
from jaxgpt.checkpoint.intact import resolve_weights
from jaxgpt.checkpoint.match import first_difference, name_difference
from jaxgpt.checkpoint.needed import needed_runs, recorded_checkpoint
from jaxgpt.checkpoint.paths import as_path, parse_checkpoint
from jaxgpt.checkpoint.placement import Place, merge_placed
from jaxgpt.checkpoint.run import Run, open_run
from jaxgpt.checkpoint.store import read_params, stored_weights
from jaxgpt.config import Config, ModelConfig
from jaxgpt.errors import UserError
from jaxgpt.model import GPT
from jaxgpt.model.params import abstract_params
from jaxgpt.parallel.arrays import to_host

T = TypeVar("T")


class FrozenBase(NamedTuple):
    """Frozen weights, such as the base of adapters, and their checksum."""

    params: Any
    checksum: str


class WeightSource(NamedTuple):
    """An intact checkpoint of a run, with unread weights.

    Attributes:
        path: path of the run, as the caller specified it.
        run: the open run.
        config: settings of the run.
        step: step of the checkpoint.
        part: part of the checkpoint that is read: the trained parameters, `params`, or their `ema`.
        base: source of the frozen weights if the run has adapters, otherwise None.
    """

    path: str
    run: Run
    config: Config
    step: int
    part: str
    base: WeightSource | None

    @property
    def info(self) -> Info:
        """Content of the checkpoint.json."""
        return read_info(self.run.checkpoints / str(self.step))

    @property
    def digest(self) -> str:
        """SHA-256 of the digests of the files of this checkpoint and its base, to compare processes."""
        digest = hashlib.sha256(self.info.sha256[SEAL].encode())
        if self.base:
            digest.update(self.base.digest.encode())
        return digest.hexdigest()

    @property
    def exists(self) -> bool:
        """Whether the checkpoint still exists; a training process deletes old checkpoints."""
        return (self.run.checkpoints / str(self.step)).is_dir()

    def read(self, place: Place) -> Any:
        """Read the weights of the model: the weights of `part`, or adapters merged with their base."""
        trained = self.read_trained(place)
        if self.base is None:
            return trained
        return merge_placed(self.read_base(place).params, trained, self.config.lora.alpha)

    def read_trained(self, place: Place) -> Any:
        """Read the parameters of `part`: weights, or adapters.

        Raises:
            UserError: if the parameters belong to a different model class, cannot be read, or were deleted meanwhile.
        """
        like = place.like(self.config.model, self.config.lora)
        name = self.info.model
        if name and place.model is None:
            # Reject the weights even if their names and shapes match GPT: the forward pass may differ.
            trained = f"{self.path} was trained with the model {name}, given in Python"
            difference = self._difference(like, GPT) or trained
            raise UserError(f"{difference}: pass load(path, model={name}); commands cannot read it")
        try:
            return read_params(self.run.checkpoints, self.step, like, self.part)
        except UserError:
            difference = self._difference(like, place.model or GPT)
            if difference:
                fix = "load it in Python with the class that it was trained with, load(path, model=YourGPT)"
                raise UserError(f"{difference}: {fix}") from None
            raise

    def _difference(self, like: Any, model: type[GPT]) -> str:
        """Describe the weights that only the checkpoint or only the model has, or return ""."""
        stored = stored_weights(self.run.checkpoints, self.step, self.part)
        difference = name_difference(stored, like, model)
        return f"{self.path} {difference}" if difference else ""

    def read_base(self, place: Place) -> FrozenBase:
        """Read the frozen weights of the adapters; raise `UserError` if they changed since the adapters were trained."""
        assert self.base is not None
        base = self.base.read_frozen(place)
        check_base(self.run, self.base, base)
        return base

    def read_frozen(self, place: Place) -> FrozenBase:
        """Read the weights of the model as frozen weights, with their checksum."""
        params = self.read(place)
        return FrozenBase(params, checksum(params))


def open_source(path: str | Path, checkpoint: str = "best", part: str = "") -> WeightSource:
    """Open a checkpoint of a run and the bases of its adapters, and verify their files.

    Args:
        path: a run.
        checkpoint: `best`, `last`, or a step.
        part: as in `WeightSource`; "": the EMA if the run computes it.

    Raises:
        UserError: if the run, checkpoint or base is missing or damaged, the base has a different architecture, or a run is
            its own base.
    """
    run = open_run(as_path(path))
    config = run.config()
    part = part or trained_part(config)
    step = resolve_weights(run.checkpoints, checkpoint, part)
    base = open_base(run, config) if config.lora.rank else None
    return WeightSource(str(path), run, config, step, part, base)


def read_source(path: str | Path, checkpoint: str, read: Callable[[WeightSource], T]) -> tuple[WeightSource, T]:
    """Open a checkpoint and read it; if a training process deletes it meanwhile, resolve `checkpoint` again.

    Raises the errors of `open_source` and `read`.
    """
    while True:
        source = open_source(path, checkpoint)
        try:
            result = read(source)
        except UserError:
            if source.exists:
                raise
            continue
        return source, result


def open_base(run: Run, config: Config) -> WeightSource:
    """Open the base of a run's adapters; arguments and errors as in `open_source`."""
    path = recorded_checkpoint(run, config.init_from)
    if path is None:
        raise UserError(
            f"{run.path} holds adapters of {config.init_from}, which is missing: restore it, or move it next to {run.path}"
        )
    base, _ = parse_checkpoint(str(path))
    if run.path.resolve() in needed_runs(Run(base)):
        raise UserError(f"{path}, the base of {run.path}, needs {run.path} itself: restore the run {config.init_from}")
    return open_base_of(path, config.model)


def open_base_of(path: str | Path, model: ModelConfig) -> WeightSource:
    """Open the weights to train adapters on: a run or RUN/checkpoints/STEP with the architecture `model`."""
    base = open_source(*parse_checkpoint(str(path)))
    difference = first_difference(abstract_params(base.config.model), model)
    if difference:
        raise UserError(
            f"{path} is not the base of these adapters: its architecture differs ({difference}); restore the "
            f"original base"
        )
    return base


def check_base(run: Run, source: WeightSource, base: FrozenBase, part: FrozenPart = "base") -> None:
    """Raise `UserError` if frozen weights differ from the frozen weights that the checkpoints of a run record.

    Args:
        run: the run that was trained with the recorded weights.
        source: source of the weights.
        base: the weights.
        part: name of the checksum in the checkpoints: `base`, or `frozen` for the weights that an objective needs in
            addition to the base of adapters.
    """
    infos = checkpoints(run.checkpoints).values()
    if any(info.about.get(part, base.checksum) != base.checksum for info in infos):
        path = source.run.checkpoints / str(source.step)
        name = "reference" if part == "frozen" else part
        raise UserError(f"{path} is not the {name} of {run.path}: its weights differ from the original: restore it")


def trained_part(config: Config) -> str:
    """Return the part of a checkpoint with the weights to use: their EMA if the run computes it."""
    return "ema" if config.optim.ema_decay else "params"


def checksum(tree: Any) -> str:
    """Compute the SHA-256 of weights: their paths in the tree, dtypes, shapes and values, one array at a time.

    If weights are sharded over several processes, all processes must call this function.
    """
    digest = hashlib.sha256()
    for path, leaf in jax.tree_util.tree_leaves_with_path(tree):
        array = to_host(leaf)
        digest.update(f"{jax.tree_util.keystr(path)} {array.dtype} {array.shape}\n".encode())
        digest.update(np.ascontiguousarray(array).data)
    return digest.hexdigest()
