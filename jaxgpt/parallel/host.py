"""The host: its CPU cores as devices, its memory, and compiler options for its devices."""

from __future__ import annotations

import contextlib
import math
import os
from collections.abc import Iterator
from dataclasses import replace
from typing import Any

import jax
import numpy as np
from jax.sharding import AbstractMesh, Mesh

from jaxgpt.config import Config, MeshConfig, ModelConfig
from jaxgpt.cpu import cores, cpu_supports
from jaxgpt.errors import one_line
from jaxgpt.heap import M_ARENA_MAX, M_MMAP_MAX, M_TRIM_THRESHOLD, set_malloc, trim_memory
from jaxgpt.model.params import count_parameters
from jaxgpt.parallel.mesh import sizes_of
from jaxgpt.parallel.rows import microbatches
from jaxgpt.runtime import set_quick_flag, skip_missing_tpus

GLIBC_KEEPS = 32 * 2**20  # maximum bytes of a block that glibc can keep after it is freed
WALL = GLIBC_KEEPS  # bytes of an array that separates two blocks; larger than any free block of the heap
ROOM = 2**16  # additional bytes of a block, besides the temporaries
BLOCKS = 2  # blocks per device, because a call can begin before the memory of the previous call is free
ACTIVATIONS = 120  # bytes of temporaries per token, layer and unit of width: about 30 float32 arrays
LARGE = 50_000_000  # minimum parameters of a large model, without token table and head: the vocabulary may be unknown

CompilerOptions = dict[str, bool | str | int | float]


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


def keep_memory(config: Config) -> None:
    """Keep the memory that a training step frees, for the next step.

    XLA on a CPU allocates the temporaries of each step as one block. glibc returns a large block to the kernel, and mapping it
    again takes up to 20% of a step. Small models are not affected: glibc keeps their blocks anyway.
    """
    cpu_devices = max(jax.config.values["jax_num_cpu_devices"], 1)
    devices = min(cpu_devices, config.train.batch_size)
    tokens = microbatches(config.train, devices).rows * config.window / cores()
    temporaries = tokens * config.model.n_embd * config.model.n_layer * ACTIVATIONS
    if temporaries > GLIBC_KEEPS:
        # Allocate all blocks in the heap, and do not return them to the kernel. Use one heap for all threads, as
        # the command line already does.
        set_malloc({M_MMAP_MAX: 0, M_TRIM_THRESHOLD: -1, M_ARENA_MAX: 1})


@contextlib.contextmanager
def room_for_temporaries(mesh: Mesh, compiled: jax.stages.Compiled) -> Iterator[None]:
    """On CPUs, make the calls of a compiled program in this context reuse the same blocks of the heap.

    XLA allocates the temporaries of a call as one aligned block for each device. For the alignment, glibc searches for a
    slightly larger block, and gives the excess to other allocations. A freed block between allocations in use is therefore
    too small for the next call, and without room the heap grows to several times the memory in use.
    """
    trim_memory()  # the compiler has freed several hundred MiB
    if mesh.devices.flat[0].platform != "cpu":
        yield
        return
    analysis = compiled.memory_analysis()
    temporaries = analysis.temp_size_in_bytes if analysis else 0
    if temporaries <= GLIBC_KEEPS:
        yield
        return

    # Allocate blocks with room between walls, then free the blocks. Walls and blocks are consecutive at the end of the heap,
    # because no free block is as large. Nothing is written to them, so the kernel provides no memory for them.
    walls = []
    blocks = []
    with contextlib.suppress(MemoryError):
        for _ in range(BLOCKS * len(mesh.local_devices)):
            walls.append(np.empty(WALL, np.uint8))
            blocks.append(np.empty(temporaries + ROOM, np.uint8))
        walls.append(np.empty(WALL, np.uint8))
    del blocks
    yield
    del walls


def precision_note(dtype: str, device: jax.Device) -> str:
    """Return advice if a run uses float32 on a CPU that multiplies bfloat16 faster; otherwise ""."""
    # Before 0.12, JAX converts bfloat16 operands to float32 on a CPU.
    converted = jax.__version_info__ < (0, 12)
    if dtype != "float32" or device.platform != "cpu" or converted or not cpu_supports("amx_bf16"):
        return ""
    return "steps are faster in bfloat16 on this CPU: --train.compute-dtype bfloat16"


def step_compile_options(mesh: Mesh | AbstractMesh) -> CompilerOptions | None:
    """Return compiler options for training steps."""
    if isinstance(mesh, AbstractMesh) or mesh.devices.flat[0].platform != "gpu":
        return None
    # Do not merge the products of queries, keys and values, because attention would copy its slices of the result.
    return {"xla_gpu_dot_merger_threshold_mb": 0}


def quick_compile_options(mesh: Mesh) -> CompilerOptions | None:
    """Return compiler options for programs called once: faster compilation, equal results."""
    match mesh.devices.flat[0].platform:
        case "cpu":
            return {"xla_backend_optimization_level": 1}
        case "gpu":
            # The disabled pass would merge the kernels of all initial weights into one large kernel, which compiles slowly.
            return {"xla_disable_hlo_passes": "multi_output_fusion"}
    return None


def random_bits_by_kernel(mesh: Mesh) -> contextlib.AbstractContextManager[Any]:
    """Return a context in which GPUs compute random bits with JAX's kernel, because XLA's code for them compiles slowly.

    If the mesh shards weights, the context has no effect: XLA cannot divide the kernel, so each device would compute the bits
    of complete weights.
    """
    if mesh.devices.flat[0].platform != "gpu" or mesh.shape["data"] != mesh.size:
        return contextlib.nullcontext()
    from jax._src.config import threefry_gpu_kernel_lowering  # private: no public equivalent for one thread

    return threefry_gpu_kernel_lowering(True)
