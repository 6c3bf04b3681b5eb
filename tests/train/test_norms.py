"""Norms of gradients."""

from __future__ import annotations

import re
from functools import partial
from typing import Any

import jax
import jax.numpy as jnp
import numpy as np
import optax
import pytest
from jax.sharding import NamedSharding, PartitionSpec

from jaxgpt.config import MeshConfig
from jaxgpt.parallel.mesh import make_mesh
from jaxgpt.train.loss import RowSums
from jaxgpt.train.step import init_state, squared_norms, train_step

SHAPES = [(), (1,), (65,), (128,), (130,), (3, 4096), (257, 96), (2, 31, 64)]


def tree(seed: int) -> dict[str, jax.Array]:
    rng = np.random.default_rng(seed)
    return {str(i): jnp.asarray(rng.normal(size=shape), jnp.float32) for i, shape in enumerate(SHAPES)}


def test_a_step_computes_the_norm_once() -> None:
    """The metrics and the clipping have the same formula, so the compiler merges them: clipping adds no reduction."""

    def objective(w: Any, x: jax.Array, *_: Any) -> RowSums:
        return RowSums(x @ w["a"] @ w["b"], x[:, 0])

    def reductions(optimizer: optax.GradientTransformation) -> int:
        step = jax.jit(partial(train_step, objective=objective, optimizer=optimizer))
        params = {"a": jnp.ones((3, 5)), "b": jnp.ones(5)}
        state = init_state(params, optimizer)
        text = step.lower(state, jnp.ones((2, 3))).compile().as_text()
        return text.count(" reduce(") + text.count(" reduce-window(")

    plain = reductions(optax.sgd(0.1))
    clipped = reductions(optax.chain(optax.clip_by_global_norm(1.0), optax.sgd(0.1)))
    assert plain == clipped > 0


@pytest.mark.parametrize("bad", [jnp.nan, jnp.inf, -jnp.inf])
def test_norms_tell_which_gradient_is_not_finite(bad: float) -> None:
    grads = tree(1)
    np.testing.assert_allclose(squared_norms(grads).sum(), optax.tree.norm(grads, squared=True), rtol=1e-5)
    grads["5"] = grads["5"].at[2, 4095].set(bad)
    norms = dict(zip(grads, squared_norms(grads), strict=True))
    assert [name for name, norm in norms.items() if not np.isfinite(norm)] == ["5"]


@pytest.mark.parametrize("mesh", [MeshConfig(data=2), MeshConfig(data=1, fsdp=2)])
def test_norms_move_no_gradients_between_devices(mesh: MeshConfig) -> None:
    """Each device sums the squares of its part of the weights, and only the sums are exchanged."""
    devices = make_mesh(mesh)
    x = jnp.asarray(np.random.default_rng(2).normal(size=(1024, 64)), jnp.float32)
    placed = jax.device_put(x, NamedSharding(devices, PartitionSpec("fsdp")))
    with jax.set_mesh(devices):
        norms = jax.jit(squared_norms)
        text = norms.lower(placed).compile().as_text()
        result: Any = norms(placed)
    moved = re.findall(
        r"= (\w+\[.*?\])\S* (?:all-gather|collective-permute|all-to-all|all-reduce)(?:-start)?\(", text or ""
    )
    assert all(shape in ("f32[]", "f32[1]") for shape in moved), moved
    np.testing.assert_allclose(result, [np.square(x).sum()], rtol=1e-5)
