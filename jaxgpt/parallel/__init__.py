"""Devices, meshes and the sharding table."""

from jaxgpt.parallel.mesh import batch_sharding, everywhere, make_mesh, on_mesh, resolve, settle, shardings, use_cores

__all__ = ["batch_sharding", "everywhere", "make_mesh", "on_mesh", "resolve", "settle", "shardings", "use_cores"]
