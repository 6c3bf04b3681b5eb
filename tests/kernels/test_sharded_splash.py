"""Splash attention over sharded positions equals the definition, in Pallas' interpreter."""

from __future__ import annotations

from dataclasses import replace
from typing import Any

import jax
import jax.numpy as jnp
import numpy as np
import pytest
from helpers import interpreted_splash, small

from jaxgpt.config import Config, MeshConfig, TrainConfig
from jaxgpt.kernels import best, in_balanced_order
from jaxgpt.kernels.halo import balanced_order
from jaxgpt.kernels.sharded_splash import ShardedSplash, tile_size
from jaxgpt.kernels.splash_mask import RowMask
from jaxgpt.ops.attention import Positions, Visible, attend, document_positions, row_positions
from jaxgpt.parallel.mesh import make_mesh
from jaxgpt.parallel.rules import Rules, change_rules, use_mesh
from jaxgpt.trainer.build import build

B, N, K, H, T = 2, 4, 2, 8, 512
long = pytest.mark.long


def documents() -> Positions:
    """Return the positions of rows of several documents; the last is padding."""
    ids_BT = np.sort(np.random.default_rng(1).integers(0, 4, (B, T)), axis=1)
    return document_positions(jnp.asarray(np.where(ids_BT == 3, -1, ids_BT), jnp.int32))


def forward_and_backward(attention: Any, order: np.ndarray, place: Positions, window: int) -> Any:
    rng = np.random.default_rng(0)
    qkv = [jnp.asarray(rng.normal(size=shape), jnp.float32) for shape in ((B, T, N, H), (B, K, T, H), (B, K, H, T))]
    place = jax.tree.map(lambda x_BT: x_BT[:, order], place)

    def value(q: jax.Array, k: jax.Array, v: jax.Array) -> jax.Array:
        out = attention(q[:, order], k[:, :, order], v[..., order], Visible(place, None, window), 0.3)
        return out[:, np.argsort(order)]

    @jax.jit
    def call(*qkv: jax.Array) -> Any:
        out, backward = jax.vjp(value, *qkv)
        return out, *backward(jnp.sin(out))

    return call(*qkv)


@pytest.mark.parametrize(
    ("sizes", "balanced", "window", "place", "rules"),
    [
        pytest.param({"context": 2}, True, 0, row_positions(T), {}, marks=pytest.mark.ci),
        pytest.param({"context": 2}, False, 100, documents(), {}, marks=pytest.mark.ci),  # a halo
        pytest.param({"context": 2}, False, 100, row_positions(T), {}, marks=long),  # a halo
        pytest.param({"context": 2, "tensor": 2}, True, 100, documents(), {}, marks=long),  # a halo of each chunk
        pytest.param({"context": 2}, True, 129, row_positions(T), {}, marks=long),  # the longest
        pytest.param({"context": 2}, True, 130, documents(), {}, marks=long),  # no halo
        pytest.param(
            {"context": 2, "tensor": 4}, False, 300, documents(), {}, marks=long
        ),  # fewer key heads than devices
        pytest.param({"fsdp": 2, "context": 4}, False, 0, documents(), {}, marks=long),
        pytest.param({"context": 2}, True, 0, documents(), {"length": ()}, marks=long),
        pytest.param({"context": 4}, True, 0, documents(), {}, marks=long),  # no tiles
    ],
)
def test_the_kernel_equals_the_definition(
    sizes: dict[str, int], balanced: bool, window: int, place: Positions, rules: Rules
) -> None:
    context = sizes["context"]
    order = balanced_order(T, context) if balanced else np.arange(T)
    kernel = ShardedSplash(context if balanced else 1)
    config = small("gpt2", block_size=T, n_head=N, n_kv_head=K, n_embd=N * H)
    mesh = make_mesh(MeshConfig(**{"data": 1, **sizes}))
    with interpreted_splash(), use_mesh(mesh, config, change_rules(rules), length=T):
        found = forward_and_backward(kernel, order, place, window)
    for a, b in zip(found, forward_and_backward(attend, np.arange(T), place, window), strict=True):
        np.testing.assert_allclose(a, b, atol=1e-5, rtol=1e-5)


@pytest.mark.parametrize(("balanced", "window"), [(1, 0), (4, 0), (4, 3), (1, 9)])
def test_each_tile_of_the_mask_equals_the_mask(balanced: int, window: int) -> None:
    order = balanced_order(32, balanced) if balanced > 1 else np.arange(32)
    expected = Visible(Positions(jnp.asarray(order)[None]), None, window).mask()[0, 0]
    mask = RowMask(32, balanced, window)
    for i in range(0, 32, 4):
        for j in range(0, 32, 4):
            tile = slice(i, i + 4), slice(j, j + 4)
            np.testing.assert_array_equal(mask[tile], expected[tile])


def test_tiles_divide_the_chunks_of_the_order() -> None:
    assert tile_size(32_768, 8, 8) == 512
    assert tile_size(8_192, 8, 8) == 512
    assert tile_size(3 * 2_048, 8, 8) == 384
    assert tile_size(2_048, 8, 8) == 128
    assert tile_size(1_024, 8, 8) == 0
    assert tile_size(1_024, 8) == 128


@pytest.mark.ci
def test_training_changes_the_order_of_the_tokens_for_the_kernel() -> None:
    """The default objective changes the order. In other calls, the model of a program receives tokens in their order."""
    model = small("llama", block_size=T, n_layer=1)
    one = Config(model=model, train=TrainConfig(batch_size=2), mesh=MeshConfig(data=1))
    expected = build(one)
    rows = np.random.default_rng(0).integers(0, model.vocab_size, (2, T + 1)).astype(np.int32)
    losses_B = expected.sums(expected.init().params, expected.put(rows)).loss_B

    config = replace(one, mesh=MeshConfig(data=1, context=2))
    ops = best(config)._replace(attend=ShardedSplash())
    with interpreted_splash():
        program = build(config, ops=ops)
        found_B = program.sums(program.init().params, program.put(rows)).loss_B
    np.testing.assert_allclose(found_B, losses_B, rtol=1e-5)
    ordered, order = in_balanced_order(config, ops)
    assert ordered.attend == ShardedSplash(balanced=2)
    assert order is not None
    assert program.model.ops.attend == ShardedSplash()
