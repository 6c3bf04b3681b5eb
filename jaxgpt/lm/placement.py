"""The mesh of a model's weights: the context of its computations, and the shards of batches and caches."""

from __future__ import annotations

from contextlib import AbstractContextManager, nullcontext
from typing import TypeVar, cast

import jax
from jax.sharding import Mesh, NamedSharding

from jaxgpt.lm.model import LM
from jaxgpt.parallel.mesh import block_on_cpu_mesh
from jaxgpt.parallel.rows import batch_ways
from jaxgpt.parallel.rules import STATIONARY, use_mesh

T = TypeVar("T")


def mesh_of(lm: LM) -> Mesh | None:
    """Return the mesh of the weights if they are on several devices, otherwise None."""
    sharding = getattr(jax.tree.leaves(lm.params)[0], "sharding", None)
    if isinstance(sharding, NamedSharding) and sharding.mesh.size > 1:
        return cast(Mesh, sharding.mesh)
    return None


def row_ways(lm: LM) -> int:
    """Return the number of shards of the rows of a batch."""
    mesh = mesh_of(lm)
    return 1 if mesh is None else batch_ways(mesh)


def device_count(lm: LM) -> int:
    """Return the number of devices of the weights."""
    mesh = mesh_of(lm)
    return 1 if mesh is None else mesh.size


def cache_shards(lm: LM, rows: int) -> int:
    """Return the number of shards of a cache of `rows` rows within `use_mesh_of`."""
    mesh = mesh_of(lm)
    if mesh is None:
        return 1
    # An axis of the mesh that does not divide the rows or the heads replicates the cache.
    row_shards = batch_ways(mesh)
    if rows % row_shards:
        row_shards = 1
    head_shards = mesh.shape["tensor"]
    if lm.config.model.kv_heads % head_shards:
        head_shards = 1
    return row_shards * head_shards


def use_mesh_of(lm: LM, rows: int) -> AbstractContextManager[None]:
    """Return a context manager with the mesh of the weights, if they are on several devices.

    The `rows` of a batch are sharded over data, fsdp and expert if the product of their sizes divides `rows`; otherwise,
    they are replicated. Weights stay where they are (`STATIONARY`).
    """
    mesh = mesh_of(lm)
    if mesh is None:
        return nullcontext()
    return use_mesh(mesh, lm.config.model, STATIONARY, rows=rows, length=1)


def block_on_mesh(lm: LM, arrays: T) -> T:
    """Return arrays; on a mesh of several CPU devices, first block on them, as in `block_on_cpu_mesh`."""
    mesh = mesh_of(lm)
    return arrays if mesh is None else block_on_cpu_mesh(mesh, arrays)
