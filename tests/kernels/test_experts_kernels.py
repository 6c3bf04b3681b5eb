"""Kernels of experts equal the definition: values and gradients, on one device and on a mesh."""

from __future__ import annotations

import re
from typing import Any

import jax
import jax.numpy as jnp
import numpy as np
import pytest
from helpers import on_cpu, small
from jax.sharding import NamedSharding, PartitionSpec

from jaxgpt.config import MeshConfig
from jaxgpt.kernels.expert_tiles import GPU_TILE, TILE, _tile_product, tiles_of
from jaxgpt.kernels.experts import large_tiled_experts, ragged_experts, tiled_experts
from jaxgpt.kernels.stored import Stored
from jaxgpt.ops.experts import ExpertWeights, experts, route
from jaxgpt.parallel.mesh import make_mesh
from jaxgpt.parallel.rules import use_mesh

D, F, E = 16, 8, 4
KERNELS = pytest.mark.parametrize("kernel", [tiled_experts, large_tiled_experts, ragged_experts])


def arrays(rows: int, T: int, gated: bool = True, dtype: Any = jnp.float32) -> tuple[Any, ...]:
    rng = np.random.default_rng(0)
    x = rng.normal(size=(rows, T, D))
    router = rng.normal(size=(D, E))
    up, gate, down = (rng.normal(0, 0.3, shape) for shape in ((E, D, F), (E, D, F), (E, F, D)))
    weights = ExpertWeights(up, down, gate if gated else None)
    return tuple(jax.tree.map(lambda w: jnp.asarray(w, dtype), each) for each in (x, router, weights))


def forward_and_backward(kernel: Any, x: Any, router: Any, weights: Any, dtype: Any = jnp.float32) -> Any:
    def apply(x: Any, router: Any, weights: Any) -> Any:
        routing = route(x @ router, 2)
        return kernel(x, routing.choice_BTA, routing.share_BTA, weights, jax.nn.silu, dtype)

    @jax.jit
    def compute(*arrays: Any) -> Any:
        out, backward = jax.vjp(apply, *arrays)
        return out, backward(jnp.sin(out))

    return compute(x, router, weights)


def assert_close(found: Any, expected: Any, tolerance: float) -> None:
    for a, b in zip(jax.tree.leaves(found), jax.tree.leaves(expected), strict=True):
        b = np.asarray(b, np.float32)
        np.testing.assert_allclose(np.asarray(a, np.float32), b, atol=tolerance * np.abs(b).max())


@KERNELS
@pytest.mark.parametrize("gated", [False, True])
@pytest.mark.parametrize(("rows", "T"), [(2, 7), (2, TILE + 3), (1, 2)])
def test_a_kernel_equals_the_definition(kernel: Any, gated: bool, rows: int, T: int) -> None:
    given = arrays(rows, T, gated)
    assert_close(forward_and_backward(kernel, *given), forward_and_backward(experts, *given), 2e-6)


@KERNELS
def test_all_tokens_may_choose_the_same_experts(kernel: Any) -> None:
    x, router, weights = arrays(2, 40)
    router = jnp.zeros_like(router)
    assert_close(
        forward_and_backward(kernel, x, router, weights), forward_and_backward(experts, x, router, weights), 2e-6
    )


@KERNELS
def test_a_kernel_takes_arrays_of_numpy(kernel: Any) -> None:
    x, router, weights = jax.tree.map(np.asarray, arrays(2, 7))
    routing = route(x @ router, 2)
    given = (x, routing.choice_BTA, routing.share_BTA, weights, jax.nn.silu, jnp.float32)
    assert_close(kernel(*given), experts(*given), 2e-6)


def test_large_tiles_equal_the_definition() -> None:
    given = arrays(2, 520)
    assert tiles_of(2 * 520 * 2, E, GPU_TILE) == (21, 128)
    found = forward_and_backward(large_tiled_experts, *given)
    assert_close(found, forward_and_backward(experts, *given), 5e-6)


@pytest.mark.parametrize("largest", [TILE, GPU_TILE])
@pytest.mark.parametrize("pairs", [1, 1000, 8192, 100_000])
@pytest.mark.parametrize("number", [1, 8, 64])
def test_tiles_have_space_for_all_pairs_and_little_padding(pairs: int, number: int, largest: int) -> None:
    """The worst case is one pair in an additional tile of each expert."""
    n, t = tiles_of(pairs, number, largest)
    assert n >= (pairs - number) / t + number
    assert TILE <= t <= largest
    assert t == TILE or n * t <= 1.25 * pairs + t


def test_tiles_of_other_devices_are_not_multiplied() -> None:
    """The first `used` tiles are multiplied, forward and backward; other tiles may hold anything."""
    rng = np.random.default_rng(0)
    x, w, dy = (jnp.asarray(rng.normal(size=shape), jnp.float32) for shape in ((3, 2, D), (E, D, F), (3, 2, F)))
    expert = jnp.asarray([1, 1, 3])

    def all_tiles(x: Any, w: Any) -> Any:
        return jnp.einsum("ntI,nIO->ntO", x, w[expert])

    y, backward = jax.vjp(lambda x, w: _tile_product(x, w, expert, jnp.int32(2)), x.at[2].set(jnp.nan), w)
    dx, dw = backward(dy.at[2].set(jnp.nan))
    expected, of_all = jax.vjp(all_tiles, x.at[2].set(0), w)
    expected_dx, expected_dw = of_all(dy.at[2].set(0))
    assert_close((y, dx, dw), (expected, expected_dx, expected_dw), 2e-6)


@KERNELS
def test_bfloat16(kernel: Any) -> None:
    given = arrays(2, 40)
    dtype = jnp.dtype("bfloat16")
    found = forward_and_backward(kernel, *given, dtype)
    assert found[0].dtype == dtype
    assert_close(found, forward_and_backward(experts, *given, dtype), 3e-2)


@KERNELS
@pytest.mark.parametrize(
    "sizes",
    [
        {"data": 2, "fsdp": 2, "tensor": 2},
        {"data": 1, "expert": 2, "tensor": 4},
        {"data": 1, "fsdp": 2, "expert": 4},
    ],
    ids=str,
)
def test_each_device_computes_its_rows_and_width(kernel: Any, sizes: dict[str, int]) -> None:
    given = arrays(8, 12)
    config = small("experts", n_experts=E, n_inner=F)
    with use_mesh(make_mesh(MeshConfig(**sizes)), config, rows=8, length=12):
        found = forward_and_backward(kernel, *given)
    assert_close(found, forward_and_backward(experts, *given), 5e-6)


def test_devices_with_the_same_rows_add_only_the_outputs_of_their_rows() -> None:
    """Outputs are added once, after the exchange of rows; in the backward pass, only the gradients of the inputs are added."""
    x, router, weights = arrays(8, 12)
    routing = route(x @ router, 2)

    def loss(x: Any) -> Any:
        return tiled_experts(x, routing.choice_BTA, routing.share_BTA, weights, jax.nn.silu, jnp.float32).sum()

    config = small("experts", n_experts=E, n_inner=F)
    with use_mesh(make_mesh(MeshConfig(data=1, expert=2, tensor=2)), config, rows=8, length=12):
        text = str(jax.make_jaxpr(jax.grad(loss))(x))
    sums = re.findall(r"f32\[(\d+),12,16\] = psum\[", text)
    assert sums == ["4", "4"]


def test_devices_exchange_gradients_in_the_dtype_of_the_tokens() -> None:
    """Only the outputs are added in float32; their gradients have the dtype of the result."""
    x, router, weights = arrays(8, 12)
    routing = route(x @ router, 2)

    def loss(x: Any) -> Any:
        out = tiled_experts(x, routing.choice_BTA, routing.share_BTA, weights, jax.nn.silu, jnp.dtype("bfloat16"))
        return out.astype(jnp.float32).sum()

    config = small("experts", n_experts=E, n_inner=F)
    with use_mesh(make_mesh(MeshConfig(data=1, expert=2)), config, rows=8, length=12):
        text = str(jax.make_jaxpr(jax.grad(loss))(x))
    gathered = re.findall(r"(\w+)\[8,12,16\] = all_gather\[", text)
    scattered = re.findall(r"(\w+)\[4,12,16\] = reduce_scatter\[", text)
    assert gathered == ["bf16"] * 2
    assert sorted(scattered) == ["bf16", "f32"]


def test_rows_of_other_devices_have_any_product(monkeypatch: pytest.MonkeyPatch) -> None:
    """`ragged_dot` does not define the results of rows without a group."""
    product = jax.lax.ragged_dot

    def undefined(y: Any, size: Any) -> Any:
        in_group = jnp.arange(len(y)) < size.sum()
        return jnp.where(in_group[:, None], y, jnp.nan)

    @jax.custom_vjp
    def ragged(x: Any, w: Any, size: Any) -> Any:
        return undefined(product(x, w, size), size)

    def backward(saved: Any, dy: Any) -> Any:
        x, w, size = saved
        _, of_rows = jax.vjp(lambda x, w: product(x, w, size), x, w)
        in_group = jnp.arange(len(dy)) < size.sum()
        dx, dw = of_rows(jnp.where(in_group[:, None], dy, 0))
        return undefined(dx, size), dw, None

    ragged.defvjp(lambda x, w, size: (ragged(x, w, size), (x, w, size)), backward)
    monkeypatch.setattr(jax.lax, "ragged_dot", ragged)
    given = arrays(2, 3, gated=False)
    config = small("experts", n_experts=E, n_inner=F)
    with use_mesh(make_mesh(MeshConfig(data=1, expert=2)), config, rows=2, length=3):
        found = forward_and_backward(ragged_experts, *given)
    assert_close(found, forward_and_backward(experts, *given), 5e-6)


@on_cpu
def test_weights_are_gathered_in_the_dtype_of_the_products() -> None:
    """The test uses float16, because XLA's CPU backend computes the collectives of bfloat16 in float32."""
    x, router, weights = arrays(8, 12)
    routing = route(x @ router, 2)
    config = small("experts", n_experts=E, n_inner=F)
    mesh = make_mesh(MeshConfig(data=1, fsdp=2, expert=4))
    widen = NamedSharding(mesh, PartitionSpec("expert", "fsdp"))
    narrow = NamedSharding(mesh, PartitionSpec("expert", None, "fsdp"))

    def compute(weights: Any) -> Any:
        return tiled_experts(x, routing.choice_BTA, routing.share_BTA, weights, jax.nn.silu, jnp.dtype("float16"))

    with use_mesh(mesh, config, rows=8, length=12):
        sharded = jax.jit(compute, in_shardings=(ExpertWeights(widen, narrow, widen),))
        text = sharded.lower(weights).compile().as_text()
    gathered = re.findall(rf"= (\w+)\[1,(?:{D},{F}|{F},{D})\]\S* all-gather\(", text)
    assert gathered == ["f16"] * 3


@pytest.mark.parametrize("T", [1, 5])
def test_stored_weights(T: int) -> None:
    """One token reads the matrices of its experts; several use the definition."""
    x, router, weights = arrays(1, T)
    stored = jax.tree.map(lambda w: Stored(w.mT, jnp.ones(w.mT.shape[:-1], jnp.float32)), weights)
    routing = route(x @ router, 2)
    arguments = x, routing.choice_BTA, routing.share_BTA
    found = tiled_experts(*arguments, stored, jax.nn.silu, jnp.dtype("float32"))
    assert_close(found, experts(*arguments, weights, jax.nn.silu, jnp.dtype("float32")), 2e-6)


def test_one_token_reads_only_its_experts() -> None:
    """The matrices of other experts may even be NaN."""
    x, router, weights = arrays(1, 1)
    routing = route(x @ router, 2)
    chosen = np.asarray(routing.choice_BTA).ravel()
    other = ~np.isin(np.arange(E), chosen)
    broken = jax.tree.map(lambda w: jnp.where(other[:, None, None], jnp.nan, w), weights)
    out = tiled_experts(x, routing.choice_BTA, routing.share_BTA, broken, jax.nn.silu, jnp.dtype("float32"))
    assert jnp.isfinite(out).all()
