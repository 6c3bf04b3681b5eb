"""Compilers for absent hardware, and the devices that they compile for.

libtpu (`pip install -e '.[tpu]'`, Linux on x86-64) compiles for TPUs and needs no TPU. JAX's CUDA plugin (`'.[cuda13]'`)
compiles for one H100 or H200 machine and needs no GPU. Without a compiler, and for other chips, only estimates are available.
"""

from __future__ import annotations

import importlib.metadata
import importlib.util
import re
from typing import Any

from jaxgpt.errors import UserError
from jaxgpt.plan.topology import Topology
from jaxgpt.runtime import quiet_libtpu

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
