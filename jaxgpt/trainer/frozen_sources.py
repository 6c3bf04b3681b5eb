"""Frozen arrays of a run: the base of adapters, and arrays that the objective reads, such as a reference model.

Checkpoints are opened before the program is built, so that processes can compare their digests; `build` reads the arrays onto
the devices.
"""

from __future__ import annotations

from dataclasses import dataclass, field
from typing import Any, NamedTuple

import jax

from jaxgpt.checkpoint.info import FrozenPart
from jaxgpt.checkpoint.match import first_difference
from jaxgpt.checkpoint.paths import parse_checkpoint
from jaxgpt.checkpoint.placement import Place
from jaxgpt.checkpoint.run import Run
from jaxgpt.checkpoint.source import WeightSource, check_base, checksum, open_base, open_base_of, open_source
from jaxgpt.config import Config
from jaxgpt.errors import UserError
from jaxgpt.model.params import abstract_params
from jaxgpt.trainer.start import Start


@dataclass
class FrozenWeights:
    """Frozen weights of a checkpoint, which `build` reads onto the devices of its program.

    Attributes:
        source: checkpoint to read the weights from.
        trained: run that was trained with these weights, and recorded their checksum: the resumed run or, for adapters, the
            run to start from; None: a new run.
        part: name of the checksum in checkpoints.
    """

    source: WeightSource
    trained: Run | None
    part: FrozenPart = "base"
    _checksum: str | None = field(default=None, init=False)  # None: not read

    @property
    def digest(self) -> str:
        """Digest of the files: equal in all processes of a run."""
        return self.source.digest

    @property
    def argument(self) -> Any:
        """The argument `frozen` of `build`: the function that reads the weights."""
        return self.read

    def read(self, place: Place) -> Any:
        """Read the weights; raise `UserError` if the run was trained with different weights."""
        frozen = self.source.read_frozen(place)
        if self.trained:
            check_base(self.trained, self.source, frozen, self.part)
        self._checksum = frozen.checksum
        return frozen.params

    @property
    def checksum(self) -> str:
        """SHA-256 of the arrays, which `read` must have read."""
        assert self._checksum is not None, "build has read the weights"
        return self._checksum


class FrozenArrays(NamedTuple):
    """Frozen arrays that are given in Python.

    Attributes:
        arrays: any tree of arrays with unstacked layers.
        checksum: SHA-256 of the arrays; "": no arrays.
    """

    arrays: Any
    checksum: str

    @property
    def digest(self) -> str:
        """The checksum: equal in all processes of a run."""
        return self.checksum

    @property
    def argument(self) -> Any:
        """The argument `frozen` of `build`: the arrays."""
        return self.arrays


def open_adapter_base(start: Start, trained: Run | None) -> FrozenWeights | None:
    """Open the base of adapters, without reading it onto devices; None: random weights. `trained` as in `FrozenWeights`."""
    config = start.config
    if not config.init_from:
        return None
    if start.resumed:
        source = open_base(start.resumed, config)
    else:
        source = open_base_of(config.init_from, config.model)
    return FrozenWeights(source, trained)


def part_of_objective(has_adapters: bool) -> FrozenPart:
    """Return the name of the checksum of `Start.frozen` in checkpoints: with adapters, `base` names their base."""
    return "frozen" if has_adapters else "base"


def open_frozen(start: Start) -> FrozenWeights | FrozenArrays:
    """Open the weights of `Start.frozen`, without reading them onto devices, or compute the checksum of its arrays."""
    frozen = start.frozen
    if isinstance(frozen, str):
        frozen = open_same_model(frozen, start.config)
    if isinstance(frozen, WeightSource):
        part = part_of_objective(has_adapters=bool(start.config.lora.rank))
        return FrozenWeights(frozen, start.resumed, part)
    has_arrays = bool(jax.tree.leaves(frozen))
    return FrozenArrays(frozen, checksum(frozen) if has_arrays else "")


def open_same_model(path: str, config: Config, part: str = "") -> WeightSource:
    """Open the frozen weights at a path; `part` as for `open_source`.

    Raises:
        UserError: if the checkpoint is missing or damaged, or the names, shapes or dtypes of its weights differ from the
            trained model's.
    """
    source = open_source(*parse_checkpoint(path), part)
    difference = first_difference(abstract_params(source.config.model), config.model)
    if difference:
        raise UserError(
            f"the model of {path} differs from the trained model ({difference}): choose weights of the same model"
        )
    return source
