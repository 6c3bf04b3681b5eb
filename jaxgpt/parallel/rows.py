"""Rows of batches: the number that each device computes at a time, and their placement on the devices of a mesh."""

from __future__ import annotations

import math
from collections.abc import Callable, Mapping, Sequence
from functools import cache
from typing import Any, NamedTuple

import jax
import jax.numpy as jnp
import numpy as np
from jax.sharding import Mesh, NamedSharding, PartitionSpec

from jaxgpt.config import TrainConfig
from jaxgpt.parallel.rules import RULES, partition_spec


class Microbatches(NamedTuple):
    """The division of a step's batch into microbatches."""

    accumulation: int  # number of microbatches that each device computes per step
    rows: int  # rows per microbatch, over all devices, including padding


def microbatches(train: TrainConfig, ways: int) -> Microbatches:
    """Split a batch of B windows over `ways` groups of devices, and in each group into equal microbatches.

    A group computes at most `m = ceil(B / train.accumulation)` windows at a time. Its share of the batch is
    `s = ceil(B / ways)` windows, in at least `n = ceil(s / m)` microbatches. Up to `2 * n - 1` microbatches are used if they
    can then be equal without padding. Otherwise, or if B is not a multiple of `ways`, the batch is padded to the
    result's `accumulation * rows` windows. Padding has no targets, so it changes neither the mean loss nor its gradient.
    """
    share = math.ceil(train.batch_size / ways)
    fewest = math.ceil(share / math.ceil(train.batch_size / train.accumulation))
    count = next((n for n in range(fewest, 2 * fewest) if share % n == 0), fewest)
    return Microbatches(count, ways * math.ceil(share / count))


def row_shards(sizes: Mapping[str, int]) -> int:
    """Return the number of shards of the rows of a batch, from the size of each mesh axis."""
    return math.prod(sizes[axis] for axis in RULES["batch"])


def batch_ways(mesh: Any) -> int:
    """Return the number of shards of the rows of a batch on a mesh."""
    return row_shards(mesh.shape)


def batch_sharding(mesh: Mesh, several: bool = False) -> NamedSharding:
    """Return the sharding of a batch `[B, ...]`, or of several batches `[K, B, ...]`, sharded by rows."""
    rows = partition_spec(("batch",), RULES)
    return NamedSharding(mesh, PartitionSpec(None, *rows) if several else rows)


def row_spec(batch: Any) -> Any:
    """Return the shapes and dtypes of the rows of a batch on the devices, each `[0, ...]`: a batch without rows.

    A batch is a tree with leaves `[B, ...]`. A leaf is an array, or a lazy batch such as `data.batches.Windows`: its slices
    are trees of arrays.
    """
    no_rows = jax.tree.map(lambda leaf: leaf[0:0], batch)
    return jax.tree.map(_on_device, no_rows)


def _on_device(array: Any) -> np.ndarray:
    """Convert an array without rows to the dtype of its device copy."""
    array = np.asarray(array)
    if array.dtype == bool:
        return array
    is_float = jnp.issubdtype(array.dtype, jnp.floating)
    return array.astype(np.float32 if is_float else np.int32)


def rows_of(batch: Any) -> int:
    """Return the number of rows of a batch."""
    return len(jax.tree.leaves(batch)[0])


def put(mesh: Mesh, batch: Any, rows: int) -> Any:
    """Put a batch on the devices of a mesh, sharded by rows.

    Only rows of this process's devices are read, each once. Missing rows are filled with -1 (booleans: False), and must have
    zero weight in an objective: windows of -1 have no targets.

    Args:
        mesh: the devices.
        batch: a batch as in `row_spec`, with up to `rows` rows.
        rows: number of rows of the result, a multiple of `batch_ways`.

    Returns:
        A tree of sharded arrays `[rows, ...]`: int32, float32 for floating-point numbers, or booleans.
    """
    spec, tree = jax.tree.flatten(row_spec(batch))

    def read(first: int, last: int) -> list[np.ndarray]:
        arrays = _missing_rows(spec, last - first)
        _read_into(arrays, batch, first, last)
        return arrays

    return jax.tree.unflatten(tree, _sharded(spec, (rows,), batch_sharding(mesh), read))


def put_batches(mesh: Mesh, batches: Sequence[Any], rows: int, steps: int) -> Any:
    """Put batches of several steps on the devices as in `put`, stacked: a tree of arrays `[steps, rows, ...]`.

    Args:
        mesh: the devices.
        batches: 1 to `steps` batches of equal structure. Missing batches are filled like missing rows.
        rows: number of rows of a step.
        steps: number of steps.
    """
    spec, tree = jax.tree.flatten(row_spec(batches[0]))

    def read(first: int, last: int) -> list[np.ndarray]:
        arrays = _missing_rows(spec, steps, last - first)
        for step, batch in enumerate(batches):
            _read_into([array[step] for array in arrays], batch, first, last)
        return arrays

    return jax.tree.unflatten(tree, _sharded(spec, (steps, rows), batch_sharding(mesh, several=True), read))


def _missing_rows(spec: Sequence[np.ndarray], *lead: int) -> list[np.ndarray]:
    """Return arrays `[*lead, ...]` of missing rows, one for each leaf of a `row_spec`."""
    return [np.full((*lead, *leaf.shape[1:]), False if leaf.dtype == bool else -1, leaf.dtype) for leaf in spec]


def _read_into(arrays: Sequence[np.ndarray], batch: Any, first: int, last: int) -> None:
    """Write the rows of a batch from `first` to `last` into arrays, one for each leaf."""
    read = jax.tree.leaves(jax.tree.map(lambda leaf: leaf[first:last], batch))
    for array, values in zip(arrays, read, strict=True):
        np.copyto(array[: len(values)], values, casting="same_kind")


def _sharded(
    spec: Sequence[np.ndarray],
    lead: tuple[int, ...],
    sharding: NamedSharding,
    read: Callable[[int, int], list[np.ndarray]],
) -> list[jax.Array]:
    """Make an array `[*lead, ...]` for each leaf of a `row_spec`. The last axis of `lead` is the axis of rows.

    `read(first, last)` returns the rows of all leaves. It is called once for each range of rows.
    """
    read_once = cache(read)
    axis = len(lead) - 1
    rows = lead[axis]
    arrays: list[jax.Array] = []
    for number, leaf in enumerate(spec):

        def shard(index: Any, number: int = number) -> np.ndarray:  # index: a slice for each axis
            first, last, _ = index[axis].indices(rows)
            return read_once(first, last)[number]

        arrays.append(jax.make_array_from_callback((*lead, *leaf.shape[1:]), sharding, shard))
    return arrays
