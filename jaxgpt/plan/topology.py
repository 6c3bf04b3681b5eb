"""Hardware topologies: slices of chips, and the names that specify them."""

from __future__ import annotations

import math
import re
from dataclasses import dataclass, replace
from typing import Any, NamedTuple

from jaxgpt.errors import UserError, short_repr
from jaxgpt.kernels import Target
from jaxgpt.parallel.chips import CHIPS, Chip
from jaxgpt.suggestions import did_you_mean


class CloudSlices(NamedTuple):
    """The slices of a version of TPUs on Google Cloud.

    Attributes:
        chip: a key of `CHIPS`.
        cores: units per chip in the names of slices: 2 if the names count TensorCores, 1 if they count chips.
        grids: number of chips along each dimension of each slice, such as 2x4.
    """

    chip: str
    cores: int
    grids: tuple[str, ...]


# Google Cloud's slice names, such as v5litepod-8, consist of a version and a number: TensorCores for v4 and v5p (two per chip),
# chips for v5e and v6e. Some slices are not in the table: write their grid, such as 4x4x12.
# docs.cloud.google.com/tpu/docs/{v4,v5e,v5p,v6e}, "Configurations"
_FLAT = ("1x1", "2x2", "2x4", "4x4", "4x8", "8x8", "8x16", "16x16")
_CUBIC = ("2x2x1", "2x2x2", "2x2x4", "2x4x4", "4x4x4", "4x4x8", "4x8x8", "8x8x8", "8x8x16", "8x16x16", "16x16x16")
CLOUD = {
    "v4": CloudSlices("v4", 2, _CUBIC[:-1]),
    "v5e": CloudSlices("v5e", 1, _FLAT),
    "v5litepod": CloudSlices("v5e", 1, _FLAT),
    "v5p": CloudSlices("v5p", 2, (*_CUBIC, "16x16x24")),
    "v6e": CloudSlices("v6e", 1, _FLAT),
}
_FORM = "a chip and a grid, such as v5e:2x4, v5p:4x4x4 or h100:8, or a Google Cloud slice, such as v5e-8 or v5p-128"
# Specifications of a chip in the text of a topology, such as
# custom:8,peak=312T,hbm=80G,bandwidth=2039G,link=300G,network=25G, and the fields of `Chip` that they set.
NUMBERS = {"peak": "flops", "hbm": "hbm", "bandwidth": "hbm_bandwidth", "link": "link", "network": "network"}
UNITS = {"G": 1e9, "T": 1e12, "P": 1e15}
# Defaults of a custom chip: links, network and compute capability of an L4.
CUSTOM = Chip("custom chip", (), 0.0, 0.0, 0.0, 32e9, 12.5e9, capability="8.9")


@dataclass(frozen=True)
class Topology:
    """One or more slices, each a grid of chips, connected by a network."""

    name: str  # a key of `CHIPS`, or custom
    chip: Chip
    grid: tuple[int, ...]  # number of chips along each dimension of a slice
    slices: int = 1  # number of TPU slices or GPU machines

    @property
    def n_devices(self) -> int:
        return math.prod(self.grid) * self.chip.per_chip * self.slices

    @property
    def target(self) -> Target:
        """The kind of device, for `jaxgpt.kernels.best`."""
        return Target("tpu") if self.chip.tpu else Target("gpu", self.chip.capability)

    def __str__(self) -> str:
        text = f"{self.name}:{'x'.join(map(str, self.grid))}"
        return text if self.slices == 1 else f"{self.slices} slices of {text}"


def parse_topology(text: str, slices: int = 1) -> Topology:
    """Parse a chip and a grid (`v5e:2x4`) or a Google Cloud slice (`v5e-8`).

    Specifications of the chip may follow, as in `custom:8,peak=312T,hbm=80G,bandwidth=2039G`.

    Raises:
        UserError: if syntax, chip, slice or `slices` is invalid, a GPU grid exceeds a machine, or a TPU grid has partial hosts.
    """
    # Parse the chip.
    place, _, numbers = text.partition(",")
    name, _, grid = _of_cloud(place).partition(":")
    if name not in (*CHIPS, "custom"):
        near = did_you_mean(name, CHIPS)
        raise UserError(f"unknown chip {short_repr(name)}{near}; chips: {', '.join(CHIPS)}, custom; expected {_FORM}")
    chip = CHIPS.get(name, CUSTOM)._replace(**_numbers(numbers))
    if not (chip.flops and chip.hbm and chip.hbm_bandwidth):
        raise UserError(
            f"topology {short_repr(text)} needs peak, hbm and bandwidth, as in custom:8,peak=312T,hbm=80G,bandwidth=2039G"
        )

    # Parse the grid, and check the slices.
    if not re.fullmatch(r"[1-9]\d{0,4}(x[1-9]\d{0,4}){0,2}", grid):
        raise UserError(f"topology {short_repr(text)} has no valid grid; expected {_FORM}")
    if slices < 1:
        raise UserError(f"--slices must be at least 1, not {slices}")
    topology = Topology(name, chip, tuple(map(int, grid.split("x"))), slices)
    _check_grid(topology)
    return topology


def _check_grid(topology: Topology) -> None:
    """Raise `UserError` if a GPU grid exceeds a machine, or a TPU grid has partial hosts."""
    name = topology.name
    chip = topology.chip
    shape = topology.grid
    grid = "x".join(map(str, shape))
    size = math.prod(shape)
    if chip.machine and size > chip.machine:
        # Divide the GPUs equally among as few machines as possible.
        part = next(n for n in range(chip.machine, 0, -1) if size % n == 0)
        fix = f"--topology {name}:{part} --slices {topology.slices * size // part}"
        raise UserError(f"{name}:{grid} exceeds the {chip.machine} GPUs that are linked in one machine: use {fix}")

    rows, columns = (*shape, 1)[:2]  # a grid of one dimension has one column
    if chip.tpu and size > 1 and (rows % 2 or columns % 2):  # valid grids: a single chip, or complete hosts
        near = "x".join(map(str, (rows + rows % 2, columns + columns % 2, *shape[2:])))
        raise UserError(f"{name} hosts have 2x2 chips, so a {grid} grid is not possible; use {name}:{near}")


def _numbers(text: str) -> dict[str, Any]:
    """Parse `peak=312T,hbm=80G` into fields of a chip."""
    found = {}
    for part in text.split(",") if text else ():
        match = re.fullmatch(r"([a-z]+)=(\d{1,6}(?:\.\d{1,6})?)([GTP])", part)
        if not match or match[1] not in NUMBERS or not float(match[2]):
            raise UserError(
                f"invalid topology number {short_repr(part)}: use one of {', '.join(NUMBERS)} with a value, such as peak=312T "
                "or hbm=80G (peak in FLOP/s, hbm in bytes, bandwidths in bytes/s)"
            )
        found[NUMBERS[match[1]]] = float(match[2]) * UNITS[match[3]]
    return found


def _of_cloud(text: str) -> str:
    """Convert a Google Cloud slice name to a chip and a grid; return other text unchanged."""
    version, _, size = text.lower().partition("-")
    if version not in CLOUD or not size:
        return text
    name, cores, grids = CLOUD[version]
    sizes = {}
    for grid in grids:
        chips = math.prod(map(int, grid.split("x")))
        sizes[str(cores * chips)] = grid
    if size not in sizes:
        unit = "chips" if cores == 1 else "TensorCores, two per chip"
        raise UserError(
            f"unknown slice {short_repr(text)}: {version}-N has N = {', '.join(sizes)} ({unit}); "
            f"for a different size, write the grid, as in {name}:{grids[-1]}"
        )
    return f"{name}:{sizes[size]}"


def larger_slices(topology: Topology) -> list[Topology]:
    """Return the larger slices of a chip, smallest first; for GPUs, larger parts of a machine."""
    chip = topology.chip
    if not chip.tpu:
        sizes = range(topology.n_devices + 1, chip.machine + 1) if topology.slices == 1 else ()
        return [replace(topology, grid=(size,)) for size in sizes]
    listed = {grid for slices in CLOUD.values() if slices.chip == topology.name for grid in slices.grids}
    grids = listed or {*_CUBIC}
    found = [replace(topology, grid=tuple(map(int, grid.split("x"))), slices=1) for grid in grids]
    larger = [each for each in found if each.n_devices > topology.n_devices]
    return sorted(larger, key=lambda each: each.n_devices)
