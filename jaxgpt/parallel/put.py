"""Batches on the devices of a mesh."""

from __future__ import annotations

from collections.abc import Sequence
from functools import cache
from typing import Any

import jax
import jax.numpy as jnp
import numpy as np
from jax.sharding import Mesh

from jaxgpt.parallel.mesh import batch_sharding


def put(mesh: Mesh, batches: Sequence[Any], shape: tuple[int, ...], several: bool = False) -> jax.Array:
    """Put batches of windows on the devices of a mesh, split by rows.

    Only rows of this process's devices are read, each once. The remaining rows are padding of -1: windows of -1 have no
    targets and zero weight.

    Args:
        batches: arrays or `Windows`, each `[B, T + 1]` or `[B, T, 3]`; slicing reads the rows.
        shape: shape of the result: `[rows, ...]` for one batch; `[K, rows, ...]` for 0 to K batches, if `several`.

    Returns:
        int32 of that shape; float32 for a batch of floating-point numbers.
    """
    axis = int(several)
    real = any(jnp.issubdtype(getattr(batch, "dtype", np.int32), jnp.floating) for batch in batches)

    @cache
    def part(first: int, last: int) -> np.ndarray:
        out = np.full((*shape[:axis], last - first, *shape[axis + 1 :]), -1, np.float32 if real else np.int32)
        for rows, batch in zip(out if several else [out], batches, strict=False):
            filled = batch[first:last]
            np.copyto(rows[: len(filled)], filled, casting="same_kind")
        return out

    def shard(index: Any) -> np.ndarray:
        return part(*index[axis].indices(shape[axis])[:2])

    return jax.make_array_from_callback(shape, batch_sharding(mesh, several), shard)
