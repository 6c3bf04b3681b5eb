"""Sizes of sharded arrays on one device; the arrays may be abstract."""

from __future__ import annotations

import math
from typing import Any

import jax
from jax.sharding import AbstractMesh, Mesh


def shard_elements(tree: Any) -> float:
    """Count the elements of sharded arrays on one device."""
    return float(sum(math.prod(_shard_shape(leaf)) for leaf in jax.tree.leaves(tree)))


def shard_bytes(tree: Any) -> float:
    """Count the bytes of sharded arrays on one device."""
    return float(sum(math.prod(_shard_shape(leaf)) * leaf.dtype.itemsize for leaf in jax.tree.leaves(tree)))


def gathered_elements(weights: Any, mesh: Mesh | AbstractMesh) -> float:
    """Count the elements of sharded weights on one device of a mesh while they are gathered along fsdp."""
    total = 0.0
    for leaf in jax.tree.leaves(weights):
        ways = mesh.shape["fsdp"] if "fsdp" in sharding_axes(leaf) else 1
        total += ways * shard_elements(leaf)
    return total


def sharding_axes(leaf: Any) -> set[str]:
    """Return the axes of the mesh that shard an array."""
    return set(jax.tree.leaves(tuple(leaf.sharding.spec)))


def _shard_shape(leaf: Any) -> tuple[int, ...]:
    """Return the shape of an array's shard on each device."""
    shape: tuple[int, ...] = leaf.sharding.shard_shape(leaf.shape)
    return shape
