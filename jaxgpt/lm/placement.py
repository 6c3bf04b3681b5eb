"""The devices of a model: the mesh of its weights, and the sharding of its cache and batches."""

from __future__ import annotations

from contextlib import AbstractContextManager, nullcontext
from typing import cast

import jax
from jax.sharding import Mesh

from jaxgpt.lm.model import LM
from jaxgpt.parallel.rows import batch_ways
from jaxgpt.parallel.rules import use_mesh


def mesh_of(lm: LM) -> Mesh | None:
    """Return the mesh of the weights if they are on several devices, otherwise None."""
    sharding = getattr(jax.tree.leaves(lm.params)[0], "sharding", None)
    if isinstance(sharding, jax.sharding.NamedSharding) and sharding.mesh.size > 1:
        return cast(Mesh, sharding.mesh)
    return None


def cache_shards(lm: LM, rows: int) -> tuple[int, int]:
    """Return over how many devices `placed` shards a cache, and the number of devices."""
    mesh = mesh_of(lm)
    if mesh is None:
        return 1, 1
    # An axis of the mesh that does not divide the rows or the heads replicates the cache.
    row_shards = batch_ways(mesh)
    if rows % row_shards:
        row_shards = 1
    head_shards = mesh.shape["tensor"]
    if lm.config.model.kv_heads % head_shards:
        head_shards = 1
    return row_shards * head_shards, mesh.size


def placed(lm: LM, rows: int) -> AbstractContextManager[None]:
    """Return a context manager with the mesh of the weights, if they are on several devices.

    The `rows` of a batch are sharded over data, fsdp and expert if the product of their sizes divides `rows`; otherwise,
    they are replicated.
    """
    mesh = mesh_of(lm)
    if mesh is None:
        return nullcontext()
    return use_mesh(mesh, lm.config.model, rows=rows, length=1)
