"""Memory for the temporaries of a training step on CPUs: blocks of the heap that later steps reuse."""

from __future__ import annotations

import contextlib
from collections.abc import Iterator

import jax
import numpy as np
from jax.sharding import Mesh

from jaxgpt.config import Config
from jaxgpt.cpu import cores
from jaxgpt.heap import M_ARENA_MAX, M_MMAP_MAX, M_TRIM_THRESHOLD, set_malloc, trim_memory
from jaxgpt.parallel.rows import microbatches

GLIBC_KEEPS = 32 * 2**20  # maximum bytes of a block that glibc can keep after it is freed
WALL = GLIBC_KEEPS  # bytes of an array that separates two blocks; larger than any free block of the heap
ROOM = 2**16  # additional bytes of a block, besides the temporaries
BLOCKS = 2  # blocks per device, because a call can begin before the memory of the previous call is free
ACTIVATIONS = 120  # bytes of temporaries per token, layer and unit of width: about 30 float32 arrays


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
