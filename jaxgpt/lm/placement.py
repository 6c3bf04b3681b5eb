"""The devices of a model: the mesh of its weights, its parts in several processes, and the sharding of caches and batches."""

from __future__ import annotations

from contextlib import AbstractContextManager, nullcontext
from dataclasses import dataclass
from typing import TypeVar, cast

import jax
import numpy as np
from jax.sharding import Mesh, NamedSharding

from jaxgpt.lm.model import LM
from jaxgpt.parallel.mesh import block_on_cpu_mesh
from jaxgpt.parallel.processes import process_count, process_index
from jaxgpt.parallel.rows import batch_ways
from jaxgpt.parallel.rules import STATIONARY, use_mesh

T = TypeVar("T")


def mesh_of(lm: LM) -> Mesh | None:
    """Return the mesh of the weights if they are on several devices, otherwise None."""
    sharding = getattr(jax.tree.leaves(lm.params)[0], "sharding", None)
    if isinstance(sharding, NamedSharding) and sharding.mesh.size > 1:
        return cast(Mesh, sharding.mesh)
    return None


def row_ways(lm: LM) -> int:
    """Return the number of shards of the rows of a batch."""
    mesh = mesh_of(lm)
    return 1 if mesh is None else batch_ways(mesh)


def cache_shards(lm: LM, rows: int) -> tuple[int, int]:
    """Return the number of shards of a cache in `placed`, and the number of devices."""
    mesh = mesh_of(lm)
    if mesh is None:
        return 1, 1
    # An axis of the mesh that does not divide the rows or the heads replicates the cache.
    row_shards = batch_ways(mesh)
    if rows % row_shards:
        row_shards = 1
    head_shards = mesh.shape["tensor"]
    if lm.config.model.kv_heads % head_shards:
        head_shards = 1
    return row_shards * head_shards, mesh.size


def placed(lm: LM, rows: int) -> AbstractContextManager[None]:
    """Return a context manager with the mesh of the weights, if they are on several devices.

    The `rows` of a batch are sharded over data, fsdp and expert if the product of their sizes divides `rows`; otherwise,
    they are replicated. Weights stay where they are (`STATIONARY`).
    """
    mesh = mesh_of(lm)
    if mesh is None:
        return nullcontext()
    return use_mesh(mesh, lm.config.model, STATIONARY, rows=rows, length=1)


def settled(lm: LM, out: T) -> T:
    """Return a result; on a mesh of several CPU devices, first block on it, as in `block_on_cpu_mesh`."""
    mesh = mesh_of(lm)
    return out if mesh is None else block_on_cpu_mesh(mesh, out)


@dataclass(frozen=True)
class MeshPart:
    """The part of a mesh with the devices of this process.

    Attributes:
        lm: the model on the devices of the part.
        index: index of the part.
        count: number of parts.
    """

    lm: LM
    index: int
    count: int


def own_part(lm: LM) -> MeshPart:
    """Return the part of the mesh with the devices of this process. Every part has all weights.

    The mesh is cut along `data` into the smallest equal parts that have all devices of their processes. Parts generate texts
    without waiting for each other. The arrays are not copied. The mesh is one part if `data` is 1, if weights are sharded over
    `data`, or if there is a single process.

    Example: 4 processes with 2 devices each.
        data 8                     4 parts of 1 process
        data 4, tensor 2           4 parts of 1 process
        data 2, fsdp 4             2 parts of 2 processes
        fsdp 8                     1 part of 4 processes
    """
    mesh = mesh_of(lm)
    if process_count() == 1 or mesh is None or _is_divided_over_data(lm):
        return MeshPart(lm, 0, 1)

    process = np.vectorize(lambda device: device.process_index, otypes=[int])(mesh.devices)
    length = part_length(process)
    count = len(process) // length
    first, *_ = np.argwhere(process == process_index())[0]
    index = int(first) // length
    return MeshPart(_cut(lm, mesh.devices[index * length : (index + 1) * length]), index, count)


def one_copy(lm: LM) -> LM:
    """Return the model on the fewest devices of this process's part of the mesh that hold all weights, without a copy.

    A single text is not generated faster with more devices along `data`.
    """
    own = own_part(lm).lm
    mesh = mesh_of(own)
    if mesh is None or mesh.is_multi_process or _is_divided_over_data(own):
        return own
    return _cut(own, mesh.devices[:1])


def part_length(process: np.ndarray) -> int:
    """Return the length of the smallest equal parts, along the first axis of a mesh, that split no process.

    Args:
        process: index of the process of each device of the mesh.
    """
    total = len(process)
    for length in range(1, total):
        if total % length:
            continue
        parts = np.split(process, total // length)
        processes = [set(part.flat) for part in parts]
        if sum(map(len, processes)) == len(set.union(*processes)):
            return length
    return total


def _is_divided_over_data(lm: LM) -> bool:
    """Return whether weights are sharded over `data` (by default, they are replicated), so that parts of the mesh lack some."""
    specs = [x.sharding.spec for x in jax.tree.leaves(lm.params)]
    return "data" in jax.tree.leaves([tuple(spec) for spec in specs])


def _cut(lm: LM, devices: np.ndarray) -> LM:
    """Return the model on some devices of its mesh, which together hold all weights. The weights are not copied."""
    mesh = mesh_of(lm)
    assert mesh is not None
    part = Mesh(devices, mesh.axis_names, axis_types=mesh.axis_types)

    def view(x: jax.Array) -> jax.Array:
        assert isinstance(x.sharding, NamedSharding)
        sharding = NamedSharding(part, x.sharding.spec)
        shards = [shard.data for shard in x.addressable_shards if shard.device in sharding.device_set]
        return jax.make_array_from_single_device_arrays(x.shape, sharding, shards)

    return lm._replace(params=jax.tree.map(view, lm.params))
