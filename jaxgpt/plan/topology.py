"""Machines one does not have: what their chips can do, how they are wired, and a compiler that compiles for them.

The compiler is libtpu's, which needs no TPU (`pip install -e '.[tpu]'`, Linux on x86-64). Without it, and for GPUs,
the table of chips still serves an estimate.
"""

from __future__ import annotations

import importlib.metadata
import importlib.util
import math
import re
from dataclasses import dataclass
from typing import Any, NamedTuple

from jaxgpt.config import UserError, did_you_mean
from jaxgpt.errors import shown
from jaxgpt.parallel.host import quiet_libtpu

GIB = 2**30


class Chip(NamedTuple):
    """One accelerator as JAX sees it (a device), by its maker's public figures.

    Attributes:
        title: what people call it.
        flops: peak of bfloat16 products, FLOP/s.
        hbm: bytes of memory that a program can have.
        hbm_bandwidth: bytes/s.
        link: bytes/s that leave the device for its neighbours, over all links, one way.
        network: bytes/s that leave the device for another slice or host.
        host: devices of one host, as libtpu lays them out; () for what libtpu does not know.
        per_chip: devices of one chip.
        options: what libtpu wants to know besides.
    """

    title: str
    flops: float
    hbm: float
    hbm_bandwidth: float
    link: float
    network: float
    host: tuple[int, ...] = ()
    per_chip: int = 1
    options: dict[str, Any] = {}  # noqa: RUF012


# Peak, bandwidths: docs.cloud.google.com/tpu/docs/{v4,v5e,v5p,v6e,tpu7x}, "System architecture" (2026-11); the documents
# give links both ways, here is one way. Memory: what libtpu 0.0.42 says is available when a program asks for too much.
# v4's network is not in its document; its hosts are taken to be wired as v5e's. A TPU7x chip is two devices.
# GPUs: NVIDIA's data sheets of the SXM boards (dense figures); NVLink 900 GB/s both ways, one 400 Gb/s port a GPU.
CHIPS = {
    "v4": Chip("TPU v4", 275e12, 30.75 * GIB, 1228e9, 300e9, 3.1e9, (2, 2, 1), 1, {"chip_config_name": "megacore"}),
    "v5e": Chip("TPU v5e", 197e12, 15.75 * GIB, 819e9, 200e9, 3.1e9, (2, 2, 1)),
    "v5p": Chip("TPU v5p", 459e12, 95.74 * GIB, 2765e9, 600e9, 6.25e9, (2, 2, 1)),
    "v6e": Chip("TPU v6e (Trillium)", 918e12, 31.25 * GIB, 1638e9, 400e9, 12.5e9, (2, 2, 1)),
    "tpu7x": Chip("TPU7x (Ironwood)", 2307e12 / 2, 94.75 * GIB, 7380e9 / 2, 600e9 / 2, 6.25e9, (2, 2, 1), 2),
    "h100": Chip("NVIDIA H100 SXM", 989e12, 80e9, 3350e9, 450e9, 50e9),
    "h200": Chip("NVIDIA H200 SXM", 989e12, 141e9, 4800e9, 450e9, 50e9),
}
# Slices by their names at Google Cloud, such as v5litepod-8: a version and a number, and the grid of that many chips.
# The numbers of v4 and v5p are of TensorCores, two to a chip; those of v5e and v6e are of chips. Larger grids of 3D tori
# than the powers of two, such as 4x4x12, have to be written as grids, for there can be several.
# docs.cloud.google.com/tpu/docs/{v4,v5e,v5p,v6e}, "Configurations"
_FLAT = ("1x1", "2x2", "2x4", "4x4", "4x8", "8x8", "8x16", "16x16")
_CUBIC = ("2x2x1", "2x2x2", "2x2x4", "2x4x4", "4x4x4", "4x4x8", "4x8x8", "8x8x8", "8x8x16", "8x16x16", "16x16x16")
CLOUD = {
    "v4": ("v4", 2, _CUBIC[:-1]),
    "v5e": ("v5e", 1, _FLAT),
    "v5litepod": ("v5e", 1, _FLAT),
    "v5p": ("v5p", 2, (*_CUBIC, "16x16x24")),
    "v6e": ("v6e", 1, _FLAT),
}
_FORM = "a chip and its grid, as in v5e:2x4, v5p:4x4x4 or h100:8, or a slice of Google Cloud, as in v5e-8 or v5p-128"


@dataclass(frozen=True)
class Topology:
    """Chips in a grid, and how many such grids (slices) are joined by a network.

    Attributes:
        name: of the chip, a key of `CHIPS`.
        grid: chips along each direction of one slice.
        slices: grids.
    """

    name: str
    grid: tuple[int, ...]
    slices: int = 1

    @property
    def chip(self) -> Chip:
        return CHIPS[self.name]

    @property
    def n_devices(self) -> int:
        return math.prod(self.grid) * self.chip.per_chip * self.slices

    def __str__(self) -> str:
        text = f"{self.name}:{'x'.join(map(str, self.grid))}"
        return text if self.slices == 1 else f"{self.slices} slices of {text}"


def parse_topology(text: str, slices: int = 1) -> Topology:
    """Parse `v5e:2x4`, or the name of a slice at Google Cloud, `v5e-8`.

    Raises:
        UserError: not of that form, an unknown chip or slice, or a grid that its hosts do not fill.
    """
    name, _, grid = _of_cloud(text).partition(":")
    if name not in CHIPS:
        near = did_you_mean(name, CHIPS)
        raise UserError(f"unknown chip {shown(name)}{near}: known are {', '.join(CHIPS)}; expected {_FORM}")
    if not re.fullmatch(r"[1-9]\d{0,4}(x[1-9]\d{0,4}){0,2}", grid):
        raise UserError(f"the topology {text!r} has no grid: expected {_FORM}")
    if not 1 <= slices <= 1024:
        raise UserError(f"--slices must be at least 1 and at most 1024, not {slices}")
    shape = tuple(map(int, grid.split("x")))
    host = CHIPS[name].host
    # libtpu builds grids of whole hosts; one chip alone is the exception.
    if host and math.prod(shape) > 1:
        nearest = [max(h, math.ceil(n / h) * h) for n, h in zip((*shape, 1, 1), host, strict=False)]
        if any(n % h for n, h in zip((*shape, 1, 1), host, strict=False)):
            near = "x".join(map(str, nearest[: max(len(shape), 2)]))
            raise UserError(f"a host of {name} has 2x2 chips, which do not fill {grid}: {name}:{near} would be whole")
    if math.prod(shape) * slices * CHIPS[name].per_chip > 2**17:
        raise UserError(f"{text} has more than {2**17:,} devices, which no machine has")
    return Topology(name, shape, slices)


def _of_cloud(text: str) -> str:
    """A slice's name at Google Cloud as a chip and its grid; other texts as they are."""
    version, _, size = text.lower().partition("-")
    if version not in CLOUD or not size:
        return text
    name, cores, grids = CLOUD[version]
    sizes = {str(cores * math.prod(map(int, grid.split("x")))): grid for grid in grids}
    if size not in sizes:
        what = "chips" if cores == 1 else "TensorCores, two to a chip"
        raise UserError(
            f"unknown slice {shown(text)}: {version}-N has N = {', '.join(sizes)} ({what}); "
            f"another grid is written {name}:{grids[-1]}"
        )
    return f"{name}:{sizes[size]}"


def compiler_missing(topology: Topology) -> str:
    """Why this machine cannot compile for that one, and what to do; "" where it can."""
    if not topology.chip.host:
        return f"there is no compiler for {topology.chip.title} without one at hand"
    if importlib.util.find_spec("libtpu") is None:
        return "libtpu is not installed: pip install -e '.[tpu]' (Linux, x86-64; no TPU needed)"
    wanted, found = _libtpu_wanted(), importlib.metadata.version("libtpu")
    if wanted and not found.startswith(wanted):
        jax_version = importlib.metadata.version("jax")
        return f"libtpu is {found}, jax {jax_version} wants {wanted}*: pip install 'jax[tpu]=={jax_version}'"
    return ""


def devices_of(topology: Topology) -> list[Any]:
    """Devices to compile for. Nothing can run on them.

    Raises:
        UserError: libtpu is missing, is of another version, is in use by another process, or does not know the topology.
    """
    if why := compiler_missing(topology):
        raise UserError(why)
    quiet_libtpu()
    import jax
    from jax.experimental import topologies

    options = dict(topology.chip.options)
    if topology.slices > 1:
        options["num_slices"] = topology.slices
    if math.prod(topology.grid) == 1:
        options["chips_per_host_bounds"] = (1, 1, 1)
    name = f"{topology.name}:{'x'.join(map(str, topology.grid))}"
    try:
        return list(topologies.get_topology_desc(name, "tpu", **options).devices)
    except (jax.errors.JaxRuntimeError, RuntimeError) as e:
        text = " ".join(str(e).split())
        if "lockfile" in text or "already in use" in text:
            raise UserError(
                "libtpu is in use by another process: wait for it, or remove /tmp/libtpu_lockfile if there is none"
            ) from None
        raise UserError(f"libtpu cannot lay out {topology}: {text[:200]}") from None


def _libtpu_wanted() -> str:
    """The versions of libtpu that this jax was built for, as a prefix such as `0.0.42.`."""
    for line in importlib.metadata.requires("jax") or []:
        if found := re.match(r"libtpu\s*==\s*([\d.]+)\*", line):
            return found[1]
    return ""
