"""Hardware topologies: parse their names, and return devices to compile for.

libtpu (`pip install -e '.[tpu]'`, Linux on x86-64) compiles for TPUs and needs no TPU. JAX's CUDA plugin (`'.[cuda13]'`)
compiles for one H100 or H200 machine and needs no GPU. Without a compiler, and for other chips, only estimates are available.
"""

from __future__ import annotations

import importlib.metadata
import importlib.util
import math
import re
from dataclasses import dataclass, replace
from typing import Any

from jaxgpt.config import Config
from jaxgpt.errors import UserError, did_you_mean, short_repr
from jaxgpt.kernels import CONTEXT_KERNELS, KERNELS, Target, choose_attention
from jaxgpt.parallel.chips import CHIPS, Chip
from jaxgpt.runtime import quiet_libtpu

# Google Cloud's slice names, such as v5litepod-8, consist of a version and a number: TensorCores for v4 and v5p (two per chip),
# chips for v5e and v6e. Some slices are not in the table: write their grid, such as 4x4x12.
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
# XLA's description of a GPU to compile for. Source: NVIDIA H100 Tensor Core GPU Architecture (2022), table 3.
HOPPER = ("h100", "h200")
_HOPPER = (
    "gpu_device_info {{ cuda_compute_capability {{ major: 9 }} core_count: 132 fpus_per_core: 128 clock_rate_ghz: 1.98 "
    "memory_bandwidth: {bandwidth:.0f} device_memory_size: {memory:.0f} l2_cache_size: 52428800 shared_memory_per_core: 233472 "
    "shared_memory_per_block: 49152 shared_memory_per_block_optin: 232448 registers_per_core_limit: 65536 "
    "registers_per_block_limit: 65536 threads_per_warp: 32 threads_per_block_limit: 1024 threads_per_core_limit: 2048 "
    "block_dim_limit_x: 2147483647 block_dim_limit_y: 65535 block_dim_limit_z: 65535 }} "
    'platform_name: "CUDA" dnn_version_info {{ major: 9 minor: 8 }} device_description_str: "{kind}"'
)
_FORM = "a chip and a grid, such as v5e:2x4, v5p:4x4x4 or h100:8, or a Google Cloud slice, such as v5e-8 or v5p-128"
# Mapping from the specifications in a topology, such as
# custom:8,peak=312T,hbm=80G,bandwidth=2039G,link=300G,network=25G, to fields of `Chip`.
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
    if not re.fullmatch(r"[1-9]\d{0,4}(x[1-9]\d{0,4}){0,2}", grid):
        raise UserError(f"topology {short_repr(text)} has no valid grid; expected {_FORM}")
    if slices < 1:
        raise UserError(f"--slices must be at least 1, not {slices}")

    shape = tuple(map(int, grid.split("x")))
    size = math.prod(shape)
    if chip.machine and size > chip.machine:
        part = next(n for n in range(chip.machine, 0, -1) if size % n == 0)
        fix = f"--topology {name}:{part} --slices {slices * size // part}"
        raise UserError(f"{name}:{grid} exceeds the {chip.machine} GPUs that are linked in one machine: use {fix}")
    rows, columns = (*shape, 1)[:2]
    if chip.tpu and size > 1 and (rows % 2 or columns % 2):  # valid grids: a single chip, or complete hosts
        near = "x".join(map(str, (rows + rows % 2, columns + columns % 2, *shape[2:])))
        raise UserError(f"{name} hosts have 2x2 chips, so a {grid} grid is not possible; use {name}:{near}")
    return Topology(name, chip, shape, slices)


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
    grids = {grid for name, _, grids in CLOUD.values() if name == topology.name for grid in grids} or {*_CUBIC}
    found = [replace(topology, grid=tuple(map(int, grid.split("x"))), slices=1) for grid in grids]
    larger = [each for each in found if each.n_devices > topology.n_devices]
    return sorted(larger, key=lambda each: each.n_devices)


def attention_of(config: Config, topology: Topology) -> str:
    """Describe the attention of a run on a chip.

    Raises:
        UserError: if `train.attention` selects a kernel that cannot run there.
    """
    chosen = choose_attention(config, topology.target)
    kernels = [*KERNELS.values(), *CONTEXT_KERNELS.items()]
    name = next((name for name, kernel in kernels if kernel is chosen.attend), "")
    return f"{name}, without stored T x T scores" if name else chosen.note or "xla, with all T x T scores in memory"


def compiler_missing(topology: Topology) -> str:
    """Return why this machine cannot compile for a topology, with a fix if one exists, or ""."""
    if topology.name in HOPPER:
        if topology.slices > 1:
            return "only estimates are available for several GPU machines"
        if any(importlib.util.find_spec(f"jax_cuda{version}_plugin") for version in (12, 13)):
            return ""
        return "JAX's CUDA plugin is not installed: pip install -e '.[cuda13]' (Linux; no GPU needed)"
    if not topology.chip.tpu:
        return f"there is no compiler for {topology.chip.title}, only for TPUs and Hopper GPUs"
    if importlib.util.find_spec("libtpu") is None:
        return "libtpu is not installed: pip install -e '.[tpu]' (Linux, x86-64; no TPU needed)"

    found = importlib.metadata.version("libtpu")
    required = " ".join(importlib.metadata.requires("jax") or [])
    wanted = "".join(re.findall(r"libtpu\s*==\s*([\d.]+)\*", required))
    if not found.startswith(wanted):
        jax_version = importlib.metadata.version("jax")
        return f"libtpu is {found}, but jax {jax_version} needs {wanted}*: pip install 'jax[tpu]=={jax_version}'"
    return ""


def devices_of(topology: Topology) -> list[Any]:
    """Return devices to compile for; programs cannot run on them.

    Raises:
        UserError: if the compiler is missing, has the wrong version, is in use by another process, or lacks the topology.
    """
    why = compiler_missing(topology)
    if why:
        raise UserError(why)
    quiet_libtpu()
    import jax
    from jax.experimental import topologies

    name = f"{topology.name}:{'x'.join(map(str, topology.grid))}"
    platform = "cuda" if topology.name in HOPPER else "tpu"
    try:
        described = topologies.get_topology_desc(name, platform, **_compiler_options(topology))
        return list(described.devices)
    except (jax.errors.JaxRuntimeError, RuntimeError) as e:
        text = " ".join(str(e).split())
        if "lockfile" in text or "already in use" in text:
            raise UserError(
                "libtpu is in use by another process: wait for it to end, or remove a stale /tmp/libtpu_lockfile"
            ) from None
        raise UserError(f"the compiler does not support {topology}: {text[:200]}") from None


def _compiler_options(topology: Topology) -> dict[str, Any]:
    """Return the options of `get_topology_desc` that describe a topology to its compiler."""
    chip = topology.chip
    if topology.name in HOPPER:
        return {
            "target_config": _HOPPER.format(bandwidth=chip.hbm_bandwidth, memory=chip.hbm, kind=chip.kinds[0]),
            "topology": f"1x1x{topology.n_devices}",  # numbers of slices, processes and devices
        }
    options: dict[str, Any] = dict(chip.options)
    if topology.slices > 1:
        options["num_slices"] = topology.slices
    elif topology.n_devices == chip.per_chip:
        options["chips_per_host_bounds"] = (1, 1, 1)
    return options
