"""The machine's own side: its cores as devices, and its memory. To be told before JAX's first use of a device."""

from __future__ import annotations

import contextlib
import ctypes
import importlib.util
import math
import os
import sys
from dataclasses import replace
from pathlib import Path

import jax
from jax.sharding import Mesh

from jaxgpt.config import Config, MeshConfig, ModelConfig
from jaxgpt.parallel.mesh import microbatches, sizes_of

GLIBC_KEEPS = 32 * 2**20  # bytes; larger blocks are given back when they are freed, whatever its thresholds
ACTIVATIONS = 120  # bytes of temporaries a token, layer and width: about 30 arrays of float32
LARGE = 50_000_000  # parameters, without those of a vocabulary, which may not be known yet
TPU_NODES = ("accel*", "vfio/[0-9]*")  # below /dev
M_TRIM_THRESHOLD, M_MMAP_MAX, M_ARENA_MAX = -1, -4, -8  # malloc.h


def use_cores(mesh: MeshConfig, processes: int = 1, model: ModelConfig | None = None) -> None:
    """Make every core of a CPU a device, or as many devices as a mesh without -1 has; one for a large model.

    Where JAX has been used in this process, the devices are those that there are.

    Args:
        mesh: the mesh to make devices for.
        processes: number of processes that share it.
        model: the model to train, if any. Where only the batch is split, each device holds and updates all weights: many
            take more memory, and more time than is won by products that need not share their threads (on two cores).
    """
    if _libtpu_without_tpu():
        quiet_libtpu()
    if "JAX_NUM_CPU_DEVICES" in os.environ or "host_platform_device_count" in os.environ.get("XLA_FLAGS", ""):
        return
    sizes = sizes_of(mesh).values()
    devices = math.ceil(math.prod(size for size in sizes if size > 0) / processes)
    if -1 in sizes:
        large = model is not None and replace(model, vocab_size=0).parameters >= LARGE
        devices = max(devices, 1 if large and -1 not in (mesh.fsdp, mesh.tensor) else _cores())
    with contextlib.suppress(RuntimeError):  # JAX has been used
        jax.config.update("jax_num_cpu_devices", devices)


def missing_platform() -> str:
    """Say why the backend that JAX_PLATFORMS names cannot start; "" if it can, or none is named.

    For after a failure: starting the backend before `keep_memory` would undo what that does.
    """
    if not (asked := os.environ.get("JAX_PLATFORMS")):
        return ""
    try:
        jax.devices()
    except (RuntimeError, AssertionError) as e:  # JAX asserts where a plugin is not installed
        why = " ".join(str(e).split()) or "jaxlib was installed without it"
        return f"JAX_PLATFORMS={asked} cannot be used ({why[:200]}); install jaxgpt[cuda13] or jaxgpt[tpu], or unset it"
    return ""


def keep_memory(config: Config) -> None:
    """Let this process keep what a training step frees, for the next one.

    XLA on a CPU allocates a step's temporaries anew each time, as one block. glibc returns a large one to the kernel, which
    hands it out again page by page, zeroed: a sixth of the default preset's step, a fifth of GPT-2 124M's. The price is
    memory that stays with the process, at most what a step needs. Small models are spared: glibc keeps their blocks
    anyway, and places them better.
    """
    devices = min(max(jax.config.values["jax_num_cpu_devices"], 1), config.train.batch_size)
    tokens = microbatches(config.train, devices).rows * config.model.block_size / _cores()
    if not sys.platform.startswith("linux") or not hasattr(libc := ctypes.CDLL(None), "mallopt"):
        return
    if tokens * config.model.n_embd * config.model.n_layer * ACTIVATIONS > GLIBC_KEEPS:
        # No blocks outside the heap, none given back, and one heap: those of threads are limited to 64 MB. (The command
        # line has asked for one heap before its first thread; here it is for other callers.)
        for parameter, value in ((M_MMAP_MAX, 0), (M_TRIM_THRESHOLD, -1), (M_ARENA_MAX, 1)):
            libc.mallopt(parameter, value)


def device_memory() -> int:
    """Bytes of memory of the first device: an accelerator's own, or the machine's."""
    stats = jax.local_devices()[0].memory_stats() or {}
    return stats.get("bytes_limit") or os.sysconf("SC_PAGE_SIZE") * os.sysconf("SC_PHYS_PAGES")


def quick_compile_options(mesh: Mesh) -> dict[str, bool | str | int | float] | None:
    """For a program that is called once. On a CPU the compiler spends less on its speed; its numbers stay as they are."""
    return {"xla_backend_optimization_level": 1} if mesh.devices.flat[0].platform == "cpu" else None


def _libtpu_without_tpu() -> bool:
    """Whether JAX would look for TPUs on a machine that has libtpu only to compile for them, as `jaxgpt plan` does."""
    wanted = "JAX_PLATFORMS" not in os.environ and importlib.util.find_spec("libtpu") is not None
    return wanted and not any(True for pattern in TPU_NODES for _ in Path("/dev").glob(pattern))


def quiet_libtpu() -> None:
    """Tell libtpu, before it is loaded, that there is no TPU: no search for one, no logs, no lock. It can still compile."""
    settings = {
        "TPU_SKIP_MDS_QUERY": "1",
        "TPU_ACCELERATOR_TYPE": "v5litepod-1",
        "TPU_WORKER_HOSTNAMES": "localhost",
        "TPU_WORKER_ID": "0",
        "TPU_LOG_DIR": "disabled",
        "TPU_MIN_LOG_LEVEL": "3",
        "TPU_STDERR_LOG_LEVEL": "3",
        # The lock guards chips, and compiling touches none: several plans can be made at once.
        "ALLOW_MULTIPLE_LIBTPU_LOAD": "1",
    }
    for name, value in settings.items():
        os.environ.setdefault(name, value)


def _cores() -> int:
    return len(os.sched_getaffinity(0)) if hasattr(os, "sched_getaffinity") else os.cpu_count() or 1
