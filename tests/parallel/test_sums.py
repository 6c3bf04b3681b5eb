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

    def local(w: jax.Array, batch: Any) -> Any:
        rows = batch["rows"]
        return {"scalar": rows.sum(), "matrix": [(rows @ w).sum(0), rows.T @ (rows @ w)], "count": jnp.int32(len(rows))}

    with jax.set_mesh(make_mesh(MeshConfig(data=4))), jax.numpy_dtype_promotion("standard"):
        found = jax.jit(sums.over_data(local))(w, {"rows": rows})
    expected = {"scalar": rows.sum(), "matrix": [(rows @ w).sum(0), rows.T @ (rows @ w)], "count": np.int32(12)}
    jax.tree.map(partial(np.testing.assert_allclose, rtol=1e-5, atol=1e-5), found, expected)
    assert found["count"].dtype == jnp.int32


def test_sums_by_device_reject_dropout() -> None:
    with pytest.raises(ValueError, match="does not support dropout"):
        sums.sums_by_device(None, None, jax.random.key(0), objective=lambda *_: None, accumulation=1)  # type: ignore[arg-type,return-value]
