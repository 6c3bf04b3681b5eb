"""Devices, meshes and the sharding table."""

from jaxgpt.parallel.host import for_one_run, keep_memory, use_cores
from jaxgpt.parallel.mesh import batch_sharding, everywhere, make_mesh, on_mesh, resolve, settle, shardings

__all__ = [
    "batch_sharding",
    "everywhere",
    "for_one_run",
    "keep_memory",
    "make_mesh",
    "on_mesh",
    "resolve",
    "settle",
    "shardings",
    "use_cores",
]
