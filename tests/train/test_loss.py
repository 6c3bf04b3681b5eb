"""The objective of language models, whole and in chunks."""

from __future__ import annotations

import math
import re
from functools import partial
from typing import Any

import jax
import jax.numpy as jnp
import numpy as np
import pytest
from helpers import make, small

from jaxgpt.config import MeshConfig, ModelConfig
from jaxgpt.model import GPT
from jaxgpt.ops import Ops
from jaxgpt.ops.sharding import constrain
from jaxgpt.parallel.mesh import make_mesh
from jaxgpt.parallel.rules import use_mesh
from jaxgpt.train.at_positions import chunked
from jaxgpt.train.loss import RowSums, cross_entropy, next_token_loss, token_losses

B, T = 4, 10


def packed(config: ModelConfig) -> jax.Array:
    """Return windows of documents with some padded targets, `[B, T, 3]`."""
    token_key, target_key, padding_key = jax.random.split(jax.random.key(0), 3)
    tokens = jax.random.randint(token_key, (B, T), 0, config.vocab_size)
    targets = jax.random.randint(target_key, (B, T), 0, config.vocab_size)
    targets = jnp.where(jax.random.bernoulli(padding_key, 0.7, (B, T)), targets, -1)
    documents = jnp.broadcast_to(jnp.arange(T) // 4, (B, T))
    return jnp.stack([tokens, targets, documents], -1)


def test_losses_of_bfloat16_logits_are_float32() -> None:
    logits_BTV = jax.random.normal(jax.random.key(0), (2, 3, 50)).astype(jnp.bfloat16)
    targets_BT = jnp.array([[1, 2, 3], [4, 5, -1]])
    found = cross_entropy(logits_BTV, targets_BT)
    assert found.dtype == jnp.float32
    np.testing.assert_array_equal(found, cross_entropy(logits_BTV.astype(jnp.float32), targets_BT))


@pytest.mark.parametrize("chunk", [0, 4])
def test_side_outputs_are_ignored_without_penalties(chunk: int) -> None:
    model, params = make(small("experts", n_layer=1))
    windows = packed(model.config)

    def names(penalties: dict[str, float] | None) -> set[str]:
        objective = next_token_loss(model.apply, chunk, penalties)
        return set(jax.eval_shape(objective, params, windows, None).others)

    assert names(None) == set()
    assert "balance_loss" in names({})


@pytest.mark.parametrize(
    ("name", "dtype", "chunk"),
    [
        pytest.param("gpt2", "float32", 4, marks=pytest.mark.ci),  # the last chunk is padded
        pytest.param("modern", "bfloat16", 4, marks=pytest.mark.long),
        pytest.param("torch", "float32", 1, marks=pytest.mark.long),
    ],
)
def test_chunks_do_not_change_loss_or_gradients(name: str, dtype: str, chunk: int) -> None:
    """Test dropout and documents, with a tied head (gpt2), a soft cap (modern), and an untied head with a bias (torch).

    test_equal_steps.py tests one step with chunks by default.
    """
    model, params = make(small(name, n_layer=1, dropout=0.2))
    model = GPT(model.config, Ops(dtype=jnp.dtype(dtype)))
    windows = packed(model.config)
    key = jax.random.key(1)

    @partial(jax.jit, static_argnums=0)
    def sums_and_gradients(chunk: int) -> tuple[RowSums, Any]:
        objective = next_token_loss(model.apply, chunk=chunk)

        def total(params: Any) -> tuple[jax.Array, RowSums]:
            sums = objective(params, windows, key)
            return sums.loss_B.sum(), sums

        grads, sums = jax.grad(total, has_aux=True)(params)
        return sums, grads

    expected, expected_grads = sums_and_gradients(0)
    found, grads = sums_and_gradients(chunk)
    np.testing.assert_allclose(found.loss_B, expected.loss_B, rtol=1e-5, atol=1e-5)
    assert (found.count_B == (windows[..., 1] >= 0).sum(-1)).all()

    # In bfloat16, the gradient of the head is rounded once per chunk.
    tolerance = {"rtol": 1e-5, "atol": 1e-5} if dtype == "float32" else {"rtol": 0.02, "atol": 0.05}
    jax.tree.map(partial(np.testing.assert_allclose, **tolerance), grads, expected_grads)


@pytest.mark.parametrize("chunk", [1, 4, 10, 30])
def test_chunks_keep_the_loss_of_every_token(chunk: int) -> None:
    x = jnp.arange(B * T * 2.0).reshape(B, T, 2)
    targets = jnp.arange(B * T).reshape(B, T)

    def losses(x_BTD: jax.Array, targets_BT: jax.Array) -> jax.Array:
        """Padding has a loss that would be noticed."""
        return jnp.where(targets_BT < 0, 99.0, x_BTD.sum(-1) + targets_BT)

    np.testing.assert_array_equal(chunked(losses, x, targets, chunk), losses(x, targets))


@pytest.mark.ci
def test_chunked_loss_never_stores_all_logits() -> None:
    config = small("gpt2", vocab_size=509, n_layer=1)
    model, params = make(config)
    windows = packed(config)

    def largest(chunk: int) -> int:
        """Return the size of the largest array with a vocabulary axis, except the table."""
        objective = next_token_loss(model.apply, chunk=chunk)
        gradient = jax.jit(jax.grad(lambda params: objective(params, windows, None).loss_B.sum()))
        text = gradient.lower(params).compile().as_text()
        shapes = {tuple(map(int, dims.split(","))) for dims in re.findall(r"f32\[([\d,]+)\]", text)}
        sizes = {math.prod(shape) for shape in shapes if config.vocab_size in shape}
        table = config.vocab_size * config.n_embd
        return max(sizes - {table})

    assert largest(0) >= B * T * config.vocab_size
    assert largest(2) == B * 2 * config.vocab_size
    assert largest(10 * T) == B * T * config.vocab_size, "the last chunk is not padded"


def answers(config: ModelConfig) -> jax.Array:
    """Return windows with up to 3 consecutive targets: at the end, at the beginning, shorter, and none."""
    windows = packed(config)
    is_target_BT = np.zeros((B, T), bool)
    for row, targets in enumerate([slice(7, 10), slice(0, 3), slice(4, 6), slice(0, 0)]):
        is_target_BT[row, targets] = True
    return windows.at[..., 1].set(jnp.where(is_target_BT, jnp.abs(windows[..., 1]), -1))


@pytest.mark.parametrize("chunk", [0, 2])
def test_logits_of_answers_are_enough(chunk: int) -> None:
    """Losses and gradients equal those with logits at all positions."""
    config = small("gpt2", n_layer=1)
    model, params = make(config)
    windows = answers(config)
    weight_BT = jnp.arange(B * T, dtype=jnp.float32).reshape(B, T)  # a different gradient of each token

    def total(params: Any, losses: Any) -> tuple[jax.Array, jax.Array]:
        losses_BT, _ = losses(model.apply, params, windows)
        return (losses_BT * weight_BT).sum(), losses_BT

    gradient = jax.jit(jax.grad(total, has_aux=True), static_argnums=1)
    expected_grads, expected_BT = gradient(params, token_losses)
    grads, found_BT = gradient(params, partial(token_losses, chunk=chunk, longest=3))
    assert (expected_BT[:3] > 0).sum() == 8
    np.testing.assert_allclose(found_BT, expected_BT, rtol=1e-5)
    jax.tree.map(partial(np.testing.assert_allclose, rtol=1e-4, atol=1e-4), grads, expected_grads)


def test_losses_of_answers_store_no_logits_of_prompts() -> None:
    config = small("gpt2", vocab_size=509, n_layer=1)
    model, params = make(config)
    windows = answers(config)

    def total(params: Any) -> jax.Array:
        losses_BT, _ = token_losses(model.apply, params, windows, longest=3)
        return losses_BT.sum()

    text = jax.jit(jax.grad(total)).lower(params).as_text()
    assert f"tensor<{B}x3x509xf32>" in text
    assert f"tensor<{B}x{T}x509xf32>" not in text


def test_chunks_of_sharded_positions_move_no_positions() -> None:
    """Each device computes an equal share of every chunk: nothing is gathered, not even for chunks that do not divide T."""
    model = small("gpt2", block_size=32)
    x_BTD = jnp.arange(2 * 32 * 3, dtype=jnp.float32).reshape(2, 32, 3)
    targets_BT = jnp.tile(jnp.arange(32), (2, 1))

    def losses(x_BTD: jax.Array, targets_BT: jax.Array) -> jax.Array:
        def one(x_BcD: jax.Array, targets_Bc: jax.Array) -> jax.Array:
            return constrain(jnp.sin(x_BcD).sum(-1) * targets_Bc, ("batch", "length"))

        x_BTD = constrain(x_BTD, ("batch", "length", "width"))
        targets_BT = constrain(targets_BT, ("batch", "length"))
        return constrain(chunked(one, x_BTD, targets_BT, 12), ("batch", "length"))

    expected = losses(x_BTD, targets_BT)
    with use_mesh(make_mesh(MeshConfig(data=1, context=4)), model, length=32):
        compiled = jax.jit(losses).lower(x_BTD, targets_BT).compile()
        np.testing.assert_allclose(compiled(x_BTD, targets_BT), expected, rtol=1e-6)
    assert not re.search("all-gather|all-to-all|collective-permute|all-reduce", compiled.as_text())
