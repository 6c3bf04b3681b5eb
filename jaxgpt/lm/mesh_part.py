"""Parts of the mesh of a model: in several processes, each part generates its own texts."""

from __future__ import annotations

from dataclasses import dataclass

import jax
import numpy as np
from jax.sharding import Mesh, NamedSharding

from jaxgpt.lm.model import LM
from jaxgpt.lm.placement import mesh_of
from jaxgpt.parallel.processes import process_count, process_index


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

    devices = _data_first(mesh)
    processes = np.vectorize(lambda device: device.process_index, otypes=[int])(devices)
    length = part_length(processes)
    first, *_ = np.argwhere(processes == process_index())[0]
    index = int(first) // length
    own_devices = devices[index * length : (index + 1) * length]
    return MeshPart(_on_devices(lm, own_devices), index, count=len(devices) // length)


def one_copy(lm: LM) -> LM:
    """Return the model on the fewest devices of this process's part of the mesh that hold all weights, without a copy.

    If several processes share the part, the model stays on the whole part. A single text is not generated faster with more
    devices along `data`.
    """
    own = own_part(lm).lm
    mesh = mesh_of(own)
    if mesh is None or mesh.is_multi_process or _is_divided_over_data(own):
        return own
    return _on_devices(own, _data_first(mesh)[:1])


def _data_first(mesh: Mesh) -> np.ndarray:
    """Return the devices of a mesh, with the axis `data` first; the mesh may have its axes in any order."""
    return np.moveaxis(mesh.devices, mesh.axis_names.index("data"), 0)


def part_length(processes: np.ndarray) -> int:
    """Return the length of the smallest equal parts of a mesh along `data` that split no process.

    Args:
        processes: index of the process of each device of the mesh; the first axis is `data`.
    """
    total = len(processes)
    for length in range(1, total):
        if total % length:
            continue
        parts = np.split(processes, total // length)
        of_parts = [set(part.flat) for part in parts]
        has_shared = sum(map(len, of_parts)) > len(set.union(*of_parts))
        if not has_shared:
            return length
    return total


def _is_divided_over_data(lm: LM) -> bool:
    """Return whether weights are sharded over `data` (by default, they are replicated), so that parts of the mesh lack some."""
    specs = [x.sharding.spec for x in jax.tree.leaves(lm.params)]
    return "data" in jax.tree.leaves([tuple(spec) for spec in specs])


def _on_devices(lm: LM, devices: np.ndarray) -> LM:
    """Return the model on some devices of its mesh, which together hold all weights. The weights are not copied.

    Args:
        lm: the model.
        devices: the devices, in the order of `_data_first`.
    """
    mesh = mesh_of(lm)
    assert mesh is not None
    in_order = np.moveaxis(devices, 0, mesh.axis_names.index("data"))
    part = Mesh(in_order, mesh.axis_names, axis_types=mesh.axis_types)

    def view(x: jax.Array) -> jax.Array:
        assert isinstance(x.sharding, NamedSharding)
        sharding = NamedSharding(part, x.sharding.spec)
        shards = [shard.data for shard in x.addressable_shards if shard.device in sharding.device_set]
        return jax.make_array_from_single_device_arrays(x.shape, sharding, shards)

    return lm._replace(params=jax.tree.map(view, lm.params))
