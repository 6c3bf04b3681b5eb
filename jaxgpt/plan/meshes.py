"""The meshes of a topology that suit a run, sorted by the estimated time of a step."""

from __future__ import annotations

from collections.abc import Iterator
from dataclasses import replace
from typing import NamedTuple

from jaxgpt.config import Config, MeshConfig
from jaxgpt.errors import UserError
from jaxgpt.parallel.mesh import sizes_of
from jaxgpt.parallel.rows import row_shards
from jaxgpt.parallel.rules import AXES
from jaxgpt.plan.cost import StepCost
from jaxgpt.plan.estimate import estimate, resolve_mesh
from jaxgpt.plan.topology import Topology
from jaxgpt.plan.work import NEXT_TOKEN, Work
from jaxgpt.progress import NO_PROGRESS, Progress

LEAST_POSITIONS = 4096  # positions per device along context; shorter windows are better divided as rows


class MeshChoice(NamedTuple):
    """A mesh, and the estimated cost of a step on the mesh."""

    mesh: MeshConfig
    cost: StepCost

    @property
    def flags(self) -> str:
        """The options that select this mesh."""
        return mesh_flags(self.mesh)


def mesh_flags(mesh: MeshConfig) -> str:
    """Return the options that select a mesh; axes of size 1 are omitted, except data."""
    sizes = sizes_of(mesh)
    return " ".join(f"--mesh.{axis} {size}" for axis, size in sizes.items() if size > 1 or axis == "data")


def meshes(
    config: Config, topology: Topology, work: Work = NEXT_TOKEN, progress: Progress = NO_PROGRESS
) -> list[MeshChoice]:
    """Estimate a step on every sensible mesh of a topology: first the meshes that fit, each group by time without overlap.

    A sensible mesh uses all devices and divides the widths of the model. Each shard of the rows has at least one row. If
    windows are sharded, each shard has at least `LEAST_POSITIONS` positions.
    """
    found = []
    candidates = list(_all_meshes(config, topology))
    for number, mesh in enumerate(candidates):
        progress(number, len(candidates))
        changed = replace(config, mesh=mesh)
        found.append(MeshChoice(mesh, estimate(changed, topology, work)))

    def order(choice: MeshChoice) -> tuple[bool, float]:
        return not choice.cost.fits, choice.cost.bounds(topology.chip)["seconds_serial"]

    return sorted(found, key=order)


def _all_meshes(config: Config, topology: Topology) -> Iterator[MeshConfig]:
    """Yield the meshes of all devices that the model and the batch allow."""
    for sizes in _factorizations(topology.n_devices, len(AXES)):
        mesh = MeshConfig(**dict(zip(AXES, sizes, strict=True)))
        if row_shards(sizes_of(mesh)) > config.train.batch_size:
            continue
        if mesh.context > max(1, config.window // LEAST_POSITIONS):
            continue
        try:
            resolved, _ = resolve_mesh(replace(config, mesh=mesh), topology)
        except UserError:  # such as an n_embd that fsdp does not divide
            continue
        yield resolved.mesh


def _factorizations(n: int, count: int) -> Iterator[tuple[int, ...]]:
    """Yield the tuples of `count` positive integers with the product n, in lexicographic order."""
    if count == 1:
        yield (n,)
        return
    for first in range(1, n + 1):
        if n % first == 0:
            for others in _factorizations(n // first, count - 1):
                yield (first, *others)
