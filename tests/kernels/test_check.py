"""The check of an operation against its definition finds faults. test_table.py covers correct kernels."""

from __future__ import annotations

from typing import Any

import jax
import jax.numpy as jnp
import pytest

from jaxgpt.kernels.check import differences
from jaxgpt.ops.attention import Visible, attend
from jaxgpt.ops.norms import norm


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
    ],
)
def test_faults_are_found(name: str, entry: Any, failing: set[str]) -> None:
    with jax.numpy_dtype_promotion("standard"):
        found = differences(name, entry)
    assert {check for check, value in found.items() if value > (0.02 if check == "bfloat16" else 1e-5)} >= failing
