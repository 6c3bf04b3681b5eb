"""Options of XLA's compiler by platform: for training steps, for programs called once, and for random bits."""

from __future__ import annotations

import contextlib
from typing import Any

from jax.sharding import AbstractMesh, Mesh

CompilerOptions = dict[str, bool | str | int | float]


def step_compile_options(mesh: Mesh | AbstractMesh) -> CompilerOptions | None:
    """Return compiler options for training steps."""
    if isinstance(mesh, AbstractMesh) or mesh.devices.flat[0].platform != "gpu":
        return None
    # Do not merge the products of queries, keys and values, because attention would copy its slices of the result.
    return {"xla_gpu_dot_merger_threshold_mb": 0}


def quick_compile_options(mesh: Mesh) -> CompilerOptions | None:
    """Return compiler options for programs called once: faster compilation, equal results."""
    match mesh.devices.flat[0].platform:
        case "cpu":
            return {"xla_backend_optimization_level": 1}
        case "gpu":
            # The disabled pass would merge the kernels of all initial weights into one large kernel, which compiles slowly.
            return {"xla_disable_hlo_passes": "multi_output_fusion"}
    return None


def random_bits_by_kernel(mesh: Mesh) -> contextlib.AbstractContextManager[Any]:
    """Return a context in which GPUs compute random bits with JAX's kernel, because XLA's code for them compiles slowly.

    If the mesh shards weights, the context has no effect: XLA cannot divide the kernel, so each device would compute the bits
    of complete weights.
    """
    if mesh.devices.flat[0].platform != "gpu" or mesh.shape["data"] != mesh.size:
        return contextlib.nullcontext()
    from jax._src.config import threefry_gpu_kernel_lowering  # private: no public equivalent for one thread

    return threefry_gpu_kernel_lowering(True)
