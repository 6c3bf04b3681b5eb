"""Published specifications of accelerators: peak rates, memory and bandwidths."""

from __future__ import annotations

from typing import Any, NamedTuple

from jax.sharding import Mesh

GIB = 2**30


class Chip(NamedTuple):
    """An accelerator, per JAX device, by its published specifications.

    Attributes:
        title: its common name.
        flops: peak of bfloat16 products, FLOP/s.
        hbm: memory available to a program, bytes.
        hbm_bandwidth: memory bandwidth, bytes/s.
        link: bandwidth to other devices of a slice, over all links in one direction, bytes/s.
        network: bandwidth to other slices or hosts, bytes/s.
        host: grid of one host's chips in libtpu; () if libtpu does not support it.
        per_chip: JAX devices per chip.
        options: additional options of libtpu's topology.
        kinds: JAX's names of a device, `device_kind`.
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
    kinds: tuple[str, ...] = ()


# TPU rates: docs.cloud.google.com/tpu/docs/{v4,v5e,v5p,v6e,tpu7x}, "System architecture" (2026-11). The documents give link
# bandwidth in both directions; here it is one direction. v4's network is not documented and is assumed to be as v5e's.
# TPU memory: the amount available according to the out-of-memory messages of libtpu 0.0.42. A TPU7x chip is two devices.
# GPUs: NVIDIA's data sheets of the SXM boards (without sparsity); NVLink 450 GB/s per direction, one 400 Gb/s port per GPU.
CHIPS = {
    "v4": Chip(
        "TPU v4", 275e12, 30.75 * GIB, 1228e9, 300e9, 3.1e9, (2, 2, 1), 1, {"chip_config_name": "megacore"}, ("TPU v4",)
    ),
    "v5e": Chip("TPU v5e", 197e12, 15.75 * GIB, 819e9, 200e9, 3.1e9, (2, 2, 1), kinds=("TPU v5 lite", "TPU v5e")),
    "v5p": Chip("TPU v5p", 459e12, 95.74 * GIB, 2765e9, 600e9, 6.25e9, (2, 2, 1), kinds=("TPU v5", "TPU v5p")),
    "v6e": Chip(
        "TPU v6e (Trillium)", 918e12, 31.25 * GIB, 1638e9, 400e9, 12.5e9, (2, 2, 1), kinds=("TPU v6 lite", "TPU v6e")
    ),
    "tpu7x": Chip(
        "TPU7x (Ironwood)", 2307e12 / 2, 94.75 * GIB, 7380e9 / 2, 600e9 / 2, 6.25e9, (2, 2, 1), 2, kinds=("TPU7x",)
    ),
    "h100": Chip("NVIDIA H100 SXM", 989e12, 80e9, 3350e9, 450e9, 50e9, kinds=("NVIDIA H100 80GB HBM3",)),
    "h200": Chip("NVIDIA H200 SXM", 989e12, 141e9, 4800e9, 450e9, 50e9, kinds=("NVIDIA H200",)),
}


def peak_flops(mesh: Mesh) -> float:
    """Return the published peak FLOP/s of bfloat16 products of all devices of a mesh, or 0 if it is unknown, as on CPUs."""
    kind = mesh.devices.flat[0].device_kind
    return next((mesh.size * chip.flops for chip in CHIPS.values() if kind in chip.kinds), 0.0)
