"""Sums over devices."""

from __future__ import annotations

from functools import partial
from typing import Any

import jax
import jax.numpy as jnp
import numpy as np
import pytest

from jaxgpt.config import MeshConfig
from jaxgpt.parallel import sums
from jaxgpt.parallel.mesh import make_mesh


@pytest.mark.parametrize("small", [0, 20, 1 << 18])
def test_sums_over_devices_do_not_depend_on_how_they_are_sent(monkeypatch: pytest.MonkeyPatch, small: int) -> None:
    """Compare with NumPy for arrays sent together and separately, of several dtypes; the batch is a tree."""
    monkeypatch.setattr(sums, "SMALL", small)
    rng = np.random.default_rng(0)
    rows = rng.normal(size=(12, 7)).astype(np.float32)
    w = rng.normal(size=(7, 5)).astype(np.float32)

    def sums_of_rows(w: Any, batch: Any) -> Any:
        rows = batch["rows"]
        products = rows @ w
        return {
            "scalar": rows.sum(),
            "matrix": [products.sum(0), rows.T @ products],
            "count": jnp.int32(len(rows)),
        }

    compute = jax.jit(sums.over_data(sums_of_rows))
    with jax.set_mesh(make_mesh(MeshConfig(data=4))), jax.numpy_dtype_promotion("standard"):
        found = compute(w, {"rows": rows})
    expected = sums_of_rows(w, {"rows": rows})
    jax.tree.map(partial(np.testing.assert_allclose, rtol=1e-5, atol=1e-5), found, expected)
    assert found["count"].dtype == jnp.int32


def test_sums_by_device_reject_dropout() -> None:
    def objective(*_: Any) -> Any:
        raise AssertionError("not called")

    key = jax.random.key(0)
    with pytest.raises(ValueError, match="does not support dropout"):
        sums.sums_by_device(None, None, key, objective=objective, accumulation=1)  # type: ignore[arg-type]
