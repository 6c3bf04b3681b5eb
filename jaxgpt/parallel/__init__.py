"""Devices, meshes and the sharding table."""

from jaxgpt.parallel.host import keep_memory, quick_compile_options, use_cores
from jaxgpt.parallel.mesh import (
    Microbatches,
    batch_sharding,
    block_on_cpu_mesh,
    make_mesh,
    microbatches,
    replicated,
    resolve,
    shardings,
    shardings_like,
    use_mesh,
)

__all__ = [
    "Microbatches",
    "batch_sharding",
    "block_on_cpu_mesh",
    "keep_memory",
    "make_mesh",
    "microbatches",
    "quick_compile_options",
    "replicated",
    "resolve",
    "shardings",
    "shardings_like",
    "use_cores",
    "use_mesh",
]
