"""Batches of a step: their padding, their placement on the devices, and their shapes."""

from __future__ import annotations

import math
from collections.abc import Sequence
from dataclasses import dataclass
from typing import Any, NamedTuple

import jax
import numpy as np
from jax.sharding import Mesh

from jaxgpt.config import Config
from jaxgpt.data_files import has_documents
from jaxgpt.errors import UserError
from jaxgpt.parallel.rows import Microbatches, batch_sharding, batch_ways, microbatches, put, put_batches, rows_of


class Several(NamedTuple):
    """Batches for one call of up to K steps, as a tree with leaves `[K, rows, ...]`; the call uses the first n batches."""

    batches: Any
    n: Any


@dataclass(frozen=True)
class StepBatches:
    """The batches of a run on a mesh, sharded by rows.

    Attributes:
        config: settings of the run.
        mesh: mesh of the available devices, or of planned hardware.
    """

    config: Config
    mesh: Mesh

    @property
    def microbatches(self) -> Microbatches:
        """Number of microbatches of a step, and rows per microbatch."""
        return microbatches(self.config.train, batch_ways(self.mesh))

    @property
    def rows_per_step(self) -> int:
        """Number of rows of a step on the devices, including padding."""
        return math.prod(self.microbatches)

    def put(self, batch: Any) -> Any:
        """Put a batch on the devices, padded.

        A batch of `train.batch_size` rows is padded to `rows_per_step`; other batches to a multiple of the number of shards.
        """
        rows = rows_of(batch)
        if rows == self.config.train.batch_size:
            return put(self.mesh, batch, self.rows_per_step)
        ways = batch_ways(self.mesh)
        return put(self.mesh, batch, math.ceil(rows / ways) * ways)

    def put_for_call(self, batches: Sequence[Any]) -> Any:
        """Put the batches of a call on the devices: `Several` if `train.steps_per_call` is above 1.

        Raises:
            UserError: if there are no batches, or more than `train.steps_per_call`.
        """
        train = self.config.train
        most = train.steps_per_call
        if not 0 < len(batches) <= most:
            raise UserError(f"expected 1 to {most} batches per call (train.steps_per_call), not {len(batches)}")
        if most == 1:
            return self.put(batches[0])
        return Several(put_batches(self.mesh, batches, self.rows_per_step, most), len(batches))

    def abstract(self, steps: int = 1, spec: Any = None) -> Any:
        """Return an abstract, padded batch of a step; for K = `steps` > 1, `Several` with leaves `[K, rows, ...]`.

        Args:
            steps: number of batches.
            spec: shapes and dtypes of the rows, from `rows.row_spec`; None: windows, `[T + 1]` or with document ids `[T, 3]`
                (see `train.loss.split_windows`).
        """
        if spec is None:
            T = self.config.window
            spec = np.zeros((0, T, 3) if has_documents(self.config) else (0, T + 1), np.int32)
        rows = self.rows_per_step
        leading_axes = (rows,) if steps == 1 else (steps, rows)
        sharding = batch_sharding(self.mesh, several=steps > 1)

        def leaf(x: Any) -> jax.ShapeDtypeStruct:
            return jax.ShapeDtypeStruct((*leading_axes, *x.shape[1:]), x.dtype, sharding=sharding)

        batches = jax.tree.map(leaf, spec)
        return batches if steps == 1 else Several(batches, steps)
