"""Published specifications of accelerators: peak FLOP/s, memory and bandwidths."""

from __future__ import annotations

from typing import NamedTuple

from jax.sharding import Mesh

GIB = 2**30


class Chip(NamedTuple):
    """Published specifications of an accelerator, per JAX device."""

    title: str  # common name
    kinds: tuple[str, ...]  # values of JAX's `device_kind`
    flops: float  # peak bfloat16 FLOP/s
    hbm: float  # device memory in bytes; TPU: memory available to a program
    hbm_bandwidth: float  # bytes/s
    link: float  # bandwidth to other devices of a slice or machine, all links, one direction, bytes/s
    network: float  # bandwidth to other slices or machines, bytes/s
    machine: int = 0  # maximum number of linked devices in one machine; 0: no limit
    tpu: bool = False  # whether libtpu can compile for this chip
    per_chip: int = 1  # JAX devices per chip
    options: tuple[tuple[str, str], ...] = ()  # additional options of libtpu's topology
    torus: int = 1  # dimensions of the torus that share the link bandwidth; 1: a switch
    capability: str = ""  # compute capability of a GPU, as JAX names it


# TPU rates: docs.cloud.google.com/tpu/docs/{v4,v5e,v5p,v6e,tpu7x}, "System architecture" (2026-11). The documents
# specify bidirectional link bandwidth; the table lists the bandwidth in one direction. v4's network bandwidth is not
# documented and is assumed to equal v5e's. TPU memory: the amount available according to the out-of-memory messages of
# libtpu 0.0.42. A TPU7x chip is two devices. NVIDIA: data sheets of A100 80GB SXM, H100 SXM, H200 SXM, HGX B200, L4 and
# L40S, bfloat16 without sparsity. NVLink bandwidth is in one direction; the network is one port per GPU: 200 Gb/s for
# A100, 400 Gb/s for H100, H200 and B200. L4 and L40S have no NVLink: the table lists PCIe 4.0 x16, and assumes a port of
# 100 Gb/s. Compute capabilities: developer.nvidia.com/cuda-gpus. AMD: data sheet of MI300X; seven Infinity Fabric links of
# 64 GB/s, and a port of 400 Gb/s.
# fmt: off
CHIPS = {
    "v4": Chip("TPU v4", ("TPU v4",), 275e12, 30.75 * GIB, 1228e9, 300e9, 3.1e9, tpu=True,
               options=(("chip_config_name", "megacore"),), torus=3),
    "v5e": Chip("TPU v5e", ("TPU v5 lite", "TPU v5e"), 197e12, 15.75 * GIB, 819e9, 200e9, 3.1e9, tpu=True, torus=2),
    "v5p": Chip("TPU v5p", ("TPU v5", "TPU v5p"), 459e12, 95.74 * GIB, 2765e9, 600e9, 6.25e9, tpu=True, torus=3),
    "v6e": Chip("TPU v6e (Trillium)", ("TPU v6 lite", "TPU v6e"), 918e12, 31.25 * GIB, 1638e9, 400e9, 12.5e9, tpu=True,
               torus=2),
    "tpu7x": Chip("TPU7x (Ironwood)", ("TPU7x",), 2307e12 / 2, 94.75 * GIB, 7380e9 / 2, 300e9, 6.25e9, tpu=True, per_chip=2,
                  torus=3),
    "a100": Chip("NVIDIA A100 SXM", ("NVIDIA A100-SXM4-80GB", "NVIDIA A100-SXM4-40GB"), 312e12, 80e9, 2039e9, 300e9, 25e9, 8,
                 capability="8.0"),
    "h100": Chip("NVIDIA H100 SXM", ("NVIDIA H100 80GB HBM3",), 989e12, 80e9, 3350e9, 450e9, 50e9, 8, capability="9.0"),
    "h200": Chip("NVIDIA H200 SXM", ("NVIDIA H200",), 989e12, 141e9, 4800e9, 450e9, 50e9, 8, capability="9.0"),
    "b200": Chip("NVIDIA B200 SXM", ("NVIDIA B200",), 2250e12, 180e9, 7700e9, 900e9, 50e9, 8, capability="10.0"),
    "l4": Chip("NVIDIA L4", ("NVIDIA L4",), 121e12, 24e9, 300e9, 32e9, 12.5e9, 8, capability="8.9"),
    "l40s": Chip("NVIDIA L40S", ("NVIDIA L40S",), 362e12, 48e9, 864e9, 32e9, 12.5e9, 8, capability="8.9"),
    "mi300x": Chip("AMD MI300X", ("AMD Instinct MI300X",), 1307e12, 192e9, 5300e9, 448e9, 50e9, 8, capability="gfx942"),
}
# fmt: on


def peak_flops(mesh: Mesh) -> float:
    """Return the published peak bfloat16 FLOP/s of a mesh, or 0 if unknown, as on CPUs."""
    kind = mesh.devices.flat[0].device_kind
    return next((mesh.size * chip.flops for chip in CHIPS.values() if kind in chip.kinds), 0.0)
