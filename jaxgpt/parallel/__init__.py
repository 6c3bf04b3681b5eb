"""Devices, meshes and the sharding table."""

from jaxgpt.parallel.host import keep_memory, quick_compile_options, use_cores
from jaxgpt.parallel.mesh import (
    Microbatches,
    batch_sharding,
    everywhere,
    make_mesh,
    microbatches,
    on_mesh,
    resolve,
    settle,
    shardings,
    shardings_like,
)

__all__ = [
    "Microbatches",
    "batch_sharding",
    "everywhere",
    "keep_memory",
    "make_mesh",
    "microbatches",
    "on_mesh",
    "quick_compile_options",
    "resolve",
    "settle",
    "shardings",
    "shardings_like",
    "use_cores",
]
