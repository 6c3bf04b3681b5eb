"""Flags that make a run fit: flags that reduce memory on a topology, and the smallest larger slice with enough memory."""

from __future__ import annotations

import math
from collections.abc import Iterator
from dataclasses import replace
from typing import Literal, NamedTuple

from jaxgpt.config import Config, MeshConfig
from jaxgpt.errors import UserError
from jaxgpt.parallel.mesh import sizes_of
from jaxgpt.plan.estimate import estimate, resolve_mesh
from jaxgpt.plan.meshes import mesh_flags
from jaxgpt.plan.one_device import one_device
from jaxgpt.plan.topology import Topology, larger_slices
from jaxgpt.plan.work import NEXT_TOKEN, Work


class _Option(NamedTuple):
    """Flags of the command, and the config with them."""

    flags: str
    config: Config


class Suggestion(NamedTuple):
    """Flags that reduce memory.

    Attributes:
        flags: the flags of the command.
        total: estimated bytes per device with these flags.
    """

    flags: str
    total: float


def suggestions(config: Config, topology: Topology, work: Work = NEXT_TOKEN) -> list[Suggestion]:
    """Return flags that reduce memory, by the estimated bytes per device, smallest first.

    If no single option fits in device memory, the first item is the fastest combination that fits, if any.
    """
    options = [*_wide_mesh(config, topology), *_remats(config, "dots", "offload", "full")]
    half = _windows(config) // 2
    if half > 0:
        options.append(_with_windows(_Option("", config), half))

    now = estimate(config, topology, work).total
    found = []
    for option in options:
        total = estimate(option.config, topology, work).total
        if total < now:
            found.append(Suggestion(option.flags, total))
    found.sort(key=lambda suggestion: suggestion.total)
    if any(suggestion.total <= topology.chip.hbm for suggestion in found):
        return found
    combination = _combination(config, topology, work)
    return [combination, *found] if combination else found


def _combination(config: Config, topology: Topology, work: Work) -> Suggestion | None:
    """Return the fastest mesh, remat and microbatches that fit in memory; None: no combination fits."""
    fitting = []
    for option in _combinations(config, topology):
        cost = estimate(option.config, topology, work)

        # Activations are proportional to the windows of a microbatch: use as many windows as fit.
        windows = _windows(option.config)
        activations = cost.memory["activations"]
        fewer = math.floor(windows * (cost.available - cost.total + activations) / activations)
        if 1 <= fewer < windows:
            option = _with_windows(option, fewer)
            cost = estimate(option.config, topology, work)
        if cost.fits:
            seconds = cost.bounds(topology.chip)["seconds_serial"]
            fitting.append((seconds, Suggestion(option.flags, cost.total)))
    if not fitting:
        return None
    _, fastest = min(fitting)
    return fastest


def _combinations(config: Config, topology: Topology) -> Iterator[_Option]:
    """Yield the combinations of the current or a wide mesh, and the current or a different rematerialization."""
    for mesh in [_Option("", config), *_wide_mesh(config, topology)]:
        yield mesh
        for remat in _remats(mesh.config, "dots", "full"):
            yield _Option(f"{mesh.flags} {remat.flags}".strip(), remat.config)


def _wide_mesh(config: Config, topology: Topology) -> list[_Option]:
    """Return the mesh that shards weights over a complete slice; [] if this mesh is the current mesh, or invalid."""
    mesh = config.mesh
    wide = replace(mesh, data=topology.slices, fsdp=mesh.fsdp * mesh.data // topology.slices)
    try:
        changed, _ = resolve_mesh(replace(config, mesh=wide), topology)
    except UserError:  # such as an n_embd that fsdp does not divide
        return []
    if wide == mesh:
        return []
    return [_Option(mesh_flags(wide), changed)]


def _remats(config: Config, *kinds: Literal["dots", "offload", "full"]) -> list[_Option]:
    """Return an option for each kind of rematerialization in `kinds` except the current kind."""
    options = []
    for kind in kinds:
        if kind != config.train.remat:
            changed = replace(config, train=replace(config.train, remat=kind))
            options.append(_Option(f"--train.remat {kind}", changed))
    return options


def _windows(config: Config) -> int:
    """Return the number of windows per device and microbatch."""
    return one_device(config).train.batch_size


def _with_windows(option: _Option, windows: int) -> _Option:
    """Limit microbatches to `windows` per device: add --train.accumulation to the flags and the config."""
    train = option.config.train
    count = math.ceil(train.batch_size / windows)
    changed = replace(option.config, train=replace(train, accumulation=count))
    return _Option(f"{option.flags} --train.accumulation {count}".strip(), changed)


class FittingSlice(NamedTuple):
    """A slice with enough memory for a run, and the flags of the command that make the run fit."""

    topology: Topology
    flags: str


def smallest_slice(config: Config, topology: Topology, work: Work = NEXT_TOKEN) -> FittingSlice | None:
    """Return the smallest larger slice with enough memory for a run by estimate; None: no such slice.

    The flags select as much sharding along fsdp as possible, microbatches of one row per device, and `--train.remat full`.
    """
    mesh = replace(MeshConfig(), data=-1, fsdp=-1, **_fixed_axes(config))
    train = replace(config.train, remat="full")
    for larger in larger_slices(topology):
        try:
            changed, _ = resolve_mesh(replace(config, mesh=mesh, train=train), larger)
        except UserError:
            continue
        option = _Option(f"{mesh_flags(changed.mesh)} --train.remat full", changed)
        option = _with_windows(option, 1)
        if estimate(option.config, larger, work).fits:
            return FittingSlice(larger, option.flags)
    return None


def _fixed_axes(config: Config) -> dict[str, int]:
    """Return the sizes of the axes that a larger slice keeps."""
    return {axis: size for axis, size in sizes_of(config.mesh).items() if axis not in ("data", "fsdp")}
