"""Kernels equal the definitions under any sharding rules."""

from __future__ import annotations

import functools
from typing import Any

import jax
import jax.numpy as jnp
import numpy as np
import pytest
from helpers import cudnn_on_a_cpu, small
from hypothesis import given, settings
from hypothesis import strategies as st

from jaxgpt.config import MeshConfig
from jaxgpt.kernels.experts import large_tiled_experts, ragged_experts, tiled_experts
from jaxgpt.kernels.sharded import gathered_attention, ring_attention
from jaxgpt.kernels.tiled import tiled_attention
from jaxgpt.ops.attention import Visible, attend, row_positions
from jaxgpt.ops.experts import ExpertWeights, experts, route
from jaxgpt.parallel.mesh import make_mesh
from jaxgpt.parallel.rules import AXES, Rules, change_rules, use_mesh

B, T, D, F, E = 4, 4, 8, 8, 4
N, K, H = 4, 2, 4
CONFIG = small("experts", n_embd=D, n_inner=F, n_experts=E, n_head=N, n_kv_head=K, head_dim=H, block_size=T)
LEARNED = ("length", "embed", "heads", "kv_heads", "head_dim", "mlp", "expert")  # axes of the arrays of kernels
Kernel = Any

ways = st.lists(st.sampled_from(AXES), unique=True, max_size=2).map(tuple)
all_rules = st.dictionaries(st.sampled_from(LEARNED), ways)
# Four devices along one axis, or two along each of two.
meshes = st.one_of(
    st.sampled_from([{axis: 4} for axis in AXES]),
    st.lists(st.sampled_from(AXES), min_size=2, max_size=2, unique=True).map(lambda two: dict.fromkeys(two, 2)),
)


def normal(*shapes: tuple[int, ...]) -> list[jax.Array]:
    rng = np.random.default_rng(0)
    return [jnp.asarray(rng.normal(size=shape), jnp.float32) for shape in shapes]


def of_experts(kernel: Kernel) -> Any:
    """Return the output of experts, and the gradients."""

    def apply(x: jax.Array, router: jax.Array, *weights: jax.Array) -> jax.Array:
        routing = route(x @ router, 2)
        out: jax.Array = kernel(
            x, routing.choice_BTA, routing.share_BTA, ExpertWeights(*weights), jax.nn.silu, jnp.float32
        )
        return out

    return forward_and_backward(apply, normal((B, T, D), (D, E), (E, D, F), (E, F, D), (E, D, F)))


def of_attention(kernel: Kernel) -> Any:
    """Return the output of attention, and the gradients."""

    def apply(*qkv: jax.Array) -> jax.Array:
        out: jax.Array = kernel(*qkv, Visible(row_positions(T)), 0.3, None)
        return out

    return forward_and_backward(apply, normal((B, T, N, H), (B, K, T, H), (B, K, H, T)))


def forward_and_backward(function: Any, arrays: list[jax.Array]) -> list[jax.Array]:
    def compute(*arrays: jax.Array) -> list[jax.Array]:
        out, backward = jax.vjp(function, *arrays)
        return [out, *backward(jnp.sin(out))]

    return jax.jit(compute)(*arrays)


def tiled(*arguments: Any) -> jax.Array:
    return tiled_attention(*arguments[:-1])


def check(kernel: Kernel, sizes: dict[str, int], rules: Rules) -> None:
    compute, definition = KERNELS[kernel]
    with use_mesh(make_mesh(MeshConfig(**{"data": 1, **sizes})), CONFIG, change_rules(rules), rows=B, length=T):
        found = compute(kernel)
    for a, b in zip(found, expected(definition), strict=True):
        np.testing.assert_allclose(a, b, atol=1e-5 * np.abs(b).max())


KERNELS = {
    tiled_experts: (of_experts, experts),
    large_tiled_experts: (of_experts, experts),
    ragged_experts: (of_experts, experts),
    tiled: (of_attention, attend),
    cudnn_on_a_cpu: (of_attention, attend),
    gathered_attention: (of_attention, attend),
    ring_attention: (of_attention, attend),
}


@functools.cache
def expected(definition: Kernel) -> Any:
    return of_experts(experts) if definition is experts else of_attention(attend)


@pytest.mark.parametrize(
    ("kernel", "sizes", "rules"),
    [
        (tiled_experts, {"fsdp": 2}, {"mlp": ("fsdp",), "embed": ()}),
        (ragged_experts, {"fsdp": 2, "tensor": 2}, {"expert": ("fsdp", "tensor"), "embed": (), "mlp": ()}),
        (large_tiled_experts, {"expert": 2, "tensor": 2}, {"expert": ("expert", "tensor"), "mlp": ()}),
        (tiled, {"fsdp": 2}, {"heads": ("fsdp",), "embed": ()}),
        (ring_attention, {"fsdp": 2, "context": 2}, {"heads": ("fsdp",), "kv_heads": ("fsdp",), "embed": ()}),
        (gathered_attention, {"fsdp": 2}, {"length": ("fsdp", "context")}),
    ],
    ids=lambda value: getattr(value, "__name__", str(value)),
)
def test_rules_that_shard_several_axes_over_the_axes_of_rows(
    kernel: Kernel, sizes: dict[str, int], rules: Rules
) -> None:
    check(kernel, sizes, rules)


@pytest.mark.long
@pytest.mark.parametrize("kernel", KERNELS)
@settings(max_examples=10)
@given(sizes=meshes, rules=all_rules)
def test_any_rules(kernel: Kernel, sizes: dict[str, int], rules: Rules) -> None:
    check(kernel, sizes, rules)
