"""Options of XLA's compiler."""

from __future__ import annotations

from types import SimpleNamespace
from typing import Any

import jax
import numpy as np

from jaxgpt.parallel import compile_options


def test_xla_knows_the_options_of_compilation() -> None:
    for platform in ("cpu", "gpu"):
        mesh: Any = SimpleNamespace(devices=np.array([SimpleNamespace(platform=platform)]))
        for options in (compile_options.quick_compile_options(mesh), compile_options.step_compile_options(mesh)):
            assert jax.jit(lambda x: x + 1, compiler_options=options)(1.0) == 2


def test_gpus_compute_the_random_bits_of_unsharded_weights_in_a_kernel() -> None:
    for platform, fsdp, kernels in (("cpu", 1, 0), ("gpu", 1, 1), ("gpu", 2, 0)):
        devices = np.array([SimpleNamespace(platform=platform)])
        shape = {"data": 4, "fsdp": fsdp}
        mesh: Any = SimpleNamespace(devices=devices, shape=shape, size=4 * fsdp)
        with compile_options.random_bits_by_kernel(mesh):
            traced = jax.jit(lambda: jax.random.bits(jax.random.key(0), (8,))).trace()
            assert traced.lower(lowering_platforms=("cuda",)).as_text().count("@cu_threefry2x32") == kernels
