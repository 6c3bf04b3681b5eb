"""The check of an operation against its definition accepts kernels and finds faults."""

from __future__ import annotations

from typing import Any

import jax
import jax.numpy as jnp
import pytest

from jaxgpt.kernels import CPU
from jaxgpt.kernels.check import differences
from jaxgpt.ops import Ops
from jaxgpt.ops.attention import Visible, attend
from jaxgpt.ops.norms import norm

NAMES = ("linear", "norm", "activate", "rotation", "attend", "log_likelihood", "squared_norm")


@pytest.mark.parametrize("name", NAMES)
def test_the_operations_of_a_cpu_pass(name: str) -> None:
    with jax.numpy_dtype_promotion("standard"):
        found = differences(name, getattr(CPU, name))
    assert found.pop("bfloat16", 0) < 0.02
    assert found["value"] < 1e-5
    assert max(found.values()) < 1e-5


def detached(*args: Any) -> jax.Array:
    return jax.lax.stop_gradient(attend(*args))


def without_window(q: Any, k: Any, v: Any, visible: Visible, scale: float, edit: Any) -> jax.Array:
    return attend(q, k, v, Visible(visible.query, visible.key), scale, edit)


def mixing_rows(kind: str, x: jax.Array, *args: Any) -> jax.Array:
    return norm(kind, x, *args) + 0.01 * x[::-1].astype(jnp.float32)


@pytest.mark.parametrize(
    ("name", "entry", "failing"),
    [
        ("attend", detached, {"gradient"}),
        ("attend", without_window, {"value", "gradient", "vmap", "mesh", "bfloat16"}),
        ("norm", mixing_rows, {"value", "gradient", "vmap", "mesh"}),
        ("norm", lambda *args: norm(*args).astype(jnp.bfloat16), {"value", "gradient", "vmap", "mesh"}),
        ("squared_norm", lambda x: Ops().squared_norm(x[..., :-1]), {"value", "gradient", "vmap", "bfloat16", "mesh"}),
    ],
)
def test_faults_are_found(name: str, entry: Any, failing: set[str]) -> None:
    with jax.numpy_dtype_promotion("standard"):
        found = differences(name, entry)
    assert {check for check, value in found.items() if value > (0.02 if check == "bfloat16" else 1e-5)} >= failing
