"""Measured peak rates of the devices together: FLOP/s of matrix products, and bytes/s that they read."""

from __future__ import annotations

import math
import time
from collections.abc import Callable
from typing import Any

import jax
import jax.numpy as jnp
from jax.sharding import Mesh, NamedSharding, PartitionSpec

from jaxgpt.bench.results import PeakRates
from jaxgpt.parallel.rules import replicated

WIDTHS = {"cpu": (1024, 2048)}  # matrix widths to try; accelerators need larger matrices to reach their peak
BANDWIDTH_BYTES = {"cpu": 2**29}  # bytes read by all devices together; the devices of a CPU share its memory
SECONDS = 0.3  # minimum seconds per measurement
QUEUED = 10  # calls per timed sample on an accelerator, to amortize the time of dispatching and blocking


def platform_of(mesh: Mesh) -> str:
    """Return the platform of the devices of a mesh, such as "cpu"."""
    return str(mesh.devices.flat[0].platform)


def peak_rates(mesh: Mesh, dtype: str) -> PeakRates:
    """Measure the peak rates of all devices together; `dtype`: compute dtype of the run."""
    peak = product_peak(mesh, dtype)
    return {
        "flops_per_second": peak,
        "bfloat16_flops_per_second": peak if dtype == "bfloat16" else product_peak(mesh, "bfloat16"),
        "bytes_per_second": read_bandwidth(mesh),
    }


def product_peak(mesh: Mesh, dtype: str) -> float:
    """Measure the FLOP/s of all devices together in matrix products: the best of a few sizes."""
    best = 0.0
    for width in WIDTHS.get(platform_of(mesh), (4096, 8192)):
        rows_per_device = width
        if platform_of(mesh) == "cpu":  # the devices share the machine: split one product
            rows_per_device = math.ceil(width / mesh.size)
        rows = rows_per_device * mesh.size
        a = _normal(_split(mesh), (rows, width), dtype)
        b = _normal(replicated(mesh), (width, width), dtype)
        product = jax.jit(lambda a, b: a @ b, out_shardings=a.sharding)
        flops = 2 * rows * width**2
        best = max(best, flops / _fastest(mesh, product, a, b))
    return best


def read_bandwidth(mesh: Mesh) -> float:
    """Measure the bytes/s that all devices read together, in products of a large matrix and a vector."""
    width = 4096  # columns of the matrix; a vector of this length stays in the caches
    row_bytes = width * jnp.dtype(jnp.float32).itemsize
    total_bytes = BANDWIDTH_BYTES.get(platform_of(mesh), 2**30 * mesh.size)
    rows = total_bytes // (row_bytes * mesh.size)
    ones = jax.jit(jnp.ones, static_argnums=(0, 1), out_shardings=_split(mesh))
    a = ones((mesh.size, rows, width), jnp.float32)
    x = ones((mesh.size, width), jnp.float32)
    product = jax.jit(lambda a, x: jnp.einsum("dok,dk->do", a, x), out_shardings=x.sharding)
    return float(a.nbytes / _fastest(mesh, product, a, x))


def _normal(sharding: NamedSharding, shape: tuple[int, ...], dtype: str) -> jax.Array:
    """Return a sharded array of standard normal random numbers.

    GPUs multiply arrays of ones with less power, and therefore at a higher clock rate.
    """
    return jax.jit(lambda: jax.random.normal(jax.random.key(0), shape, dtype), out_shardings=sharding)()


def _split(mesh: Mesh) -> NamedSharding:
    """Return the sharding that splits the first axis over all devices."""
    return NamedSharding(mesh, PartitionSpec(mesh.axis_names))


def _fastest(mesh: Mesh, work: Callable[..., Any], *args: Any) -> float:
    """Return the least seconds of a call of `work`, among the samples taken in `SECONDS`."""
    calls = 1 if platform_of(mesh) == "cpu" else QUEUED
    jax.block_until_ready(work(*args))
    best = float("inf")
    begin = time.perf_counter()
    while time.perf_counter() - begin < SECONDS:
        start = time.perf_counter()
        for _ in range(calls):
            out = work(*args)
        jax.block_until_ready(out)
        best = min(best, (time.perf_counter() - start) / calls)
    return best
