"""Measure the limits of the devices of a mesh: matrix products and memory bandwidth."""

from __future__ import annotations

import math
import time
from collections.abc import Callable
from typing import Any

import jax
import jax.numpy as jnp
from jax.sharding import Mesh, NamedSharding, PartitionSpec

from jaxgpt.parallel import replicated

WIDTHS = {"cpu": (1024, 2048)}  # matrix widths to try; accelerators need larger ones to reach their peak
BLOCK = {"cpu": 2**29}  # bytes read by all devices together; the devices of a CPU share its memory
SECONDS = 0.3  # per measurement


def product_peak(mesh: Mesh, dtype: str) -> float:
    """Measure the FLOP/s of all devices together in matrix products: the best of a few sizes."""
    best = 0.0
    for width in WIDTHS.get(_platform(mesh), (4096, 8192)):
        rows = math.ceil(width / mesh.size) * mesh.size if _platform(mesh) == "cpu" else width * mesh.size
        a, b = _ones(mesh, (rows, width), dtype), jax.device_put(jnp.ones((width, width), dtype), replicated(mesh))
        product = jax.jit(lambda a, b: a @ b, out_shardings=a.sharding)
        best = max(best, 2 * rows * width**2 / _fastest(product, a, b))
    return best


def read_bandwidth(mesh: Mesh) -> float:
    """Measure the bytes/s that all devices together read, multiplying a matrix larger than any cache by a vector."""
    rows = BLOCK.get(_platform(mesh), 2**30 * mesh.size) // (4 * 4096 * mesh.size)
    a, x = _ones(mesh, (mesh.size, rows, 4096), "float32"), _ones(mesh, (mesh.size, 4096), "float32")
    product = jax.jit(lambda a, x: jnp.einsum("dok,dk->do", a, x), out_shardings=x.sharding)
    return float(a.nbytes / _fastest(product, a, x))


def _ones(mesh: Mesh, shape: tuple[int, ...], dtype: str) -> jax.Array:
    sharding = NamedSharding(mesh, PartitionSpec(mesh.axis_names))
    return jax.jit(lambda: jnp.ones(shape, dtype), out_shardings=sharding)()


def _fastest(work: Callable[..., Any], *args: Any) -> float:
    jax.block_until_ready(work(*args))
    begin, best = time.perf_counter(), float("inf")
    while time.perf_counter() - begin < SECONDS:
        start = time.perf_counter()
        jax.block_until_ready(work(*args))
        best = min(best, time.perf_counter() - start)
    return best


def _platform(mesh: Mesh) -> str:
    return str(mesh.devices.flat[0].platform)
