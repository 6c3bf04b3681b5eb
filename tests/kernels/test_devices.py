"""Attention kernels on a mesh."""

from __future__ import annotations

from typing import Any

import flax.linen as nn
import jax
import jax.numpy as jnp
import numpy as np
import pytest
from helpers import cudnn_on_a_cpu, small, splash_on_a_cpu

from jaxgpt.config import MeshConfig
from jaxgpt.kernels.devices import ROWS, STACKS, only_rows_are_divided
from jaxgpt.kernels.tiled import tiled_attention
from jaxgpt.ops.attention import Visible, attend, row_positions
from jaxgpt.parallel.mesh import make_mesh
from jaxgpt.parallel.rules import RULES, Rules, change_rules, use_mesh

SPLIT = {"length": ("tensor",)}


@pytest.mark.parametrize(
    ("K", "kernel", "rules"),
    [
        (1, cudnn_on_a_cpu, {}),
        (4, tiled_attention, SPLIT),
        (4, tiled_attention, {"heads": (), "kv_heads": (), "head_dim": ("tensor",)}),
        pytest.param(1, splash_on_a_cpu, {}, marks=pytest.mark.long),
        pytest.param(2, tiled_attention, {}, marks=pytest.mark.long),
        pytest.param(4, splash_on_a_cpu, SPLIT, marks=pytest.mark.long),
        pytest.param(4, cudnn_on_a_cpu, SPLIT, marks=pytest.mark.long),
    ],
)
def test_a_kernel_on_a_mesh(K: int, kernel: Any, rules: Rules) -> None:
    """Each device computes its rows and heads over complete sequences, even with fewer key heads than devices."""
    config = small("gpt2", n_head=4, n_kv_head=K, block_size=40)
    mesh = make_mesh(MeshConfig(data=2, fsdp=1, tensor=2))
    rng = np.random.default_rng(0)
    visible = Visible(row_positions(40))
    arrays = [jnp.asarray(rng.normal(size=s), jnp.float32) for s in ((2, 40, 4, 8), (2, K, 40, 8), (2, K, 8, 40))]

    def forward_and_backward(attention: Any, *arrays: jax.Array) -> Any:
        out, backward = jax.vjp(lambda *qkv: attention(*qkv, visible, 0.3), *arrays)
        return out, *backward(jnp.sin(out))

    # A new function per call, because JAX's trace cache does not depend on the rules.
    call = jax.jit(lambda *arrays: forward_and_backward(kernel, *arrays))
    with use_mesh(mesh, config, change_rules(rules)):
        found = call(*arrays)
        placed = nn.spmd.logical_to_mesh_axes(("batch", None, "heads", None))
    if not rules:  # XLA may choose a different sharding for the results of other operations
        assert found[0].sharding.is_equivalent_to(jax.sharding.NamedSharding(mesh, placed), 4)
    for a, b in zip(found, jax.jit(lambda *x: forward_and_backward(attend, *x))(*arrays), strict=True):
        np.testing.assert_allclose(a, b, atol=2e-5, rtol=1e-5)


@pytest.mark.parametrize(("data", "fsdp", "expected"), [(2, 1, True), (1, 2, False)])
def test_a_data_mesh_divides_only_rows(data: int, fsdp: int, expected: bool) -> None:
    with use_mesh(make_mesh(MeshConfig(data=data, fsdp=fsdp)), small("gpt2")):
        assert only_rows_are_divided() is expected


def test_the_axes_of_rows_and_stacks_have_rules() -> None:
    assert {*ROWS, *STACKS} <= set(RULES)
