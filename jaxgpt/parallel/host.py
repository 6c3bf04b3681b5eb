"""The devices of this host: CPU cores as devices, a missing platform, the memory of a device, and the faster dtype."""

from __future__ import annotations

import contextlib
import math
import os
from dataclasses import replace

import jax

from jaxgpt.config import MeshConfig, ModelConfig
from jaxgpt.cpu import cores, cpu_supports
from jaxgpt.errors import one_line
from jaxgpt.model.params import count_parameters
from jaxgpt.parallel.mesh import sizes_of
from jaxgpt.runtime import set_quick_flag, skip_missing_tpus

LARGE = 50_000_000  # minimum parameters of a large model, without token table and head: the vocabulary may be unknown


def use_cores(mesh: MeshConfig, processes: int = 1, model: ModelConfig | None = None) -> None:
    """Make every CPU core a device, unless the mesh has a fixed size or would replicate a large model.

    The mesh spans `processes` processes. The number of devices is unchanged if the environment sets it, or JAX has already
    used a device.
    """
    skip_missing_tpus()
    set_quick_flag()
    if "JAX_NUM_CPU_DEVICES" in os.environ or "host_platform_device_count" in os.environ.get("XLA_FLAGS", ""):
        return
    devices = _cpu_devices(mesh, processes, model)
    with contextlib.suppress(RuntimeError):  # raised if JAX has already used a device
        jax.config.update("jax_num_cpu_devices", devices)


def _cpu_devices(mesh: MeshConfig, processes: int, model: ModelConfig | None) -> int:
    """Return the number of CPU devices of this process.

    A mesh without -1 sets the number of devices. For a large model, a -1 of data adds no devices: updating a copy of the
    weights on each device takes more time than splitting the batch saves.
    """
    sizes = sizes_of(mesh).values()
    fixed = math.prod(size for size in sizes if size > 0)
    devices = math.ceil(fixed / processes)
    if -1 in sizes:
        is_large = model is not None and count_parameters(replace(model, vocab_size=1)) >= LARGE
        only_data = -1 not in (mesh.fsdp, mesh.tensor)
        if not (is_large and only_data):
            devices = max(devices, cores())
    if devices > 1024:  # each device costs a few threads
        return cores()  # `resolve` then raises an error with the number of devices that the mesh needs
    return devices


def missing_platform() -> str:
    """Return why the backend in JAX_PLATFORMS does not start, or "".

    Call this only after JAX has failed, because it tries to start the backend.
    """
    asked = os.environ.get("JAX_PLATFORMS")
    if not asked:
        return ""
    try:
        jax.devices()
    except (RuntimeError, AssertionError) as e:  # AssertionError: missing plugin
        why = one_line(e, 200) or "jaxlib was installed without it"
        return f"JAX_PLATFORMS={asked} cannot be used ({why}); install jaxgpt[cuda13] or jaxgpt[tpu], or unset it"
    return ""


def device_memory(devices: int = 1) -> int:
    """Return the memory in bytes of this process's first device; `devices` on a CPU share the host's memory equally."""
    stats = jax.local_devices()[0].memory_stats() or {}
    host_memory = os.sysconf("SC_PAGE_SIZE") * os.sysconf("SC_PHYS_PAGES")
    return stats.get("bytes_limit") or host_memory // devices


def precision_note(dtype: str, device: jax.Device) -> str:
    """Return advice if a run uses float32 on a CPU that multiplies bfloat16 faster; otherwise ""."""
    # Before 0.12, JAX converts bfloat16 operands to float32 on a CPU.
    converted = jax.__version_info__ < (0, 12)
    if dtype != "float32" or device.platform != "cpu" or converted or not cpu_supports("amx_bf16"):
        return ""
    return "steps are faster in bfloat16 on this CPU: --train.compute-dtype bfloat16"
