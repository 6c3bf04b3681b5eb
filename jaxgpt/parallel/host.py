"""The machine's own side: its cores as devices, and its memory. To be told before JAX's first use of a device."""

from __future__ import annotations

import ctypes
import math
import os
import sys

import jax

from jaxgpt.config import Config, MeshConfig
from jaxgpt.parallel.mesh import sizes_of

GLIBC_KEEPS = 32 * 2**20  # bytes; larger blocks are given back when they are freed, whatever its thresholds
ACTIVATIONS = 120  # bytes of temporaries a token, layer and width: about 30 arrays of float32
M_TRIM_THRESHOLD, M_MMAP_MAX, M_ARENA_MAX = -1, -4, -8  # malloc.h


def use_cores(config: MeshConfig, processes: int = 1) -> None:
    """Make every core of a CPU a device (more, where the mesh asks for more)."""
    if "JAX_NUM_CPU_DEVICES" in os.environ or "host_platform_device_count" in os.environ.get("XLA_FLAGS", ""):
        return
    asked = math.prod(size for size in sizes_of(config).values() if size > 0)
    jax.config.update("jax_num_cpu_devices", max(_cores(), math.ceil(asked / processes)))


def keep_memory(config: Config) -> None:
    """Let this process keep what a training step frees, for the next one.

    XLA on a CPU allocates a step's temporaries anew each time, as one block. glibc returns a large one to the kernel, which
    hands it out again page by page, zeroed: a sixth of the default preset's step, a fifth of GPT-2 124M's. The price is
    memory that stays with the process, at most what a step needs. Small models are spared: glibc keeps their blocks
    anyway, and places them better.
    """
    tokens = config.train.batch_size // config.train.accumulation * config.model.block_size / _cores()
    if not sys.platform.startswith("linux") or not hasattr(libc := ctypes.CDLL(None), "mallopt"):
        return
    if tokens * config.model.n_embd * config.model.n_layer * ACTIVATIONS > GLIBC_KEEPS:
        # No blocks outside the heap, none given back, and one heap: those of threads are limited to 64 MB.
        for parameter, value in ((M_MMAP_MAX, 0), (M_TRIM_THRESHOLD, -1), (M_ARENA_MAX, 1)):
            libc.mallopt(parameter, value)


def _cores() -> int:
    return len(os.sched_getaffinity(0)) if hasattr(os, "sched_getaffinity") else os.cpu_count() or 1
