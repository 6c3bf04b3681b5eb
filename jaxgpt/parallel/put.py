"""Batches on the devices of a mesh."""

from __future__ import annotations

from collections.abc import Sequence
from functools import cache
from typing import Any

import jax
import numpy as np
from jax.sharding import Mesh

from jaxgpt.parallel.mesh import batch_sharding


def put(mesh: Mesh, batches: Sequence[Any], shape: tuple[int, ...]) -> jax.Array:
    """Put batches of windows on the devices of a mesh, split by rows.

    Only rows of this process's devices are read, each once. The rest of the shape is filled up with -1: a window of -1 has no
    targets, and counts for nothing.

    Args:
        mesh: the devices.
        batches: each `[B, T + 1]`, an array or `Windows`, whose rows are read where they are sliced.
        shape: of the result: `[rows, T + 1]` for one batch, `[K, rows, T + 1]` for up to K of them.

    Returns:
        int32 of that shape.
    """

    @cache
    def part(first: int, last: int) -> np.ndarray:
        out = np.full((*shape[:-2], last - first, shape[-1]), -1, np.int32)
        for rows, batch in zip(out.reshape(-1, last - first, shape[-1]), batches, strict=False):
            filled = batch[first:last]
            np.copyto(rows[: len(filled)], filled, casting="same_kind")
        return out

    def shard(index: Any) -> np.ndarray:
        return part(*index[-2].indices(shape[-2])[:2])

    return jax.make_array_from_callback(shape, batch_sharding(mesh, len(shape) == 3), shard)
