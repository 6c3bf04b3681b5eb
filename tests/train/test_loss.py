"""The loss function, whole and in chunks."""

from __future__ import annotations

import re

import jax
import jax.numpy as jnp
import numpy as np
import pytest
from helpers import make, small

from jaxgpt.config import ModelConfig
from jaxgpt.model import GPT
from jaxgpt.train.loss import make_loss_fn

B, T = 4, 10


def ids(config: ModelConfig) -> tuple[jax.Array, jax.Array]:
    """Return inputs, and targets of which some are padding."""
    keys = jax.random.split(jax.random.key(0), 3)
    tokens, targets = (jax.random.randint(key, (B, T), 0, config.vocab_size) for key in keys[:2])
    return tokens, jnp.where(jax.random.bernoulli(keys[2], 0.7, (B, T)), targets, -1)


@pytest.mark.parametrize(
    ("name", "dtype", "chunk"),
    [
        ("gpt2", "float32", 4),  # leaves a part
        pytest.param("gpt2", "float32", 16, marks=pytest.mark.long),  # is more than all
        pytest.param("modern", "float32", 5, marks=pytest.mark.long),
        pytest.param("modern", "bfloat16", 4, marks=pytest.mark.long),
        pytest.param("torch", "float32", 1, marks=pytest.mark.long),
    ],
)
def test_chunks_do_not_change_loss_or_gradients(name: str, dtype: str, chunk: int) -> None:
    """With dropout and documents. Heads: tied (gpt2), soft-capped (modern), untied with a bias (torch); also in bfloat16."""
    model, params = make(small(name, n_layer=1, dropout=0.2))
    model = GPT(model.config, jnp.dtype(dtype))
    tokens, targets = ids(model.config)
    key, segments = jax.random.key(1), jnp.broadcast_to(jnp.arange(T) // 4, (B, T))

    def run(chunk: int):  # type: ignore[no-untyped-def]
        loss_fn = make_loss_fn(model.apply, chunk)
        losses = loss_fn(params, tokens, targets, key, segments)
        return losses, jax.grad(lambda p: loss_fn(p, tokens, targets, key, segments).sum())(params)

    (losses, grads), (losses_c, grads_c) = jax.jit(run, static_argnums=0)(0), jax.jit(run, static_argnums=0)(chunk)
    np.testing.assert_allclose(losses_c, losses, rtol=1e-5, atol=1e-5)
    assert (losses_c[targets < 0] == 0).all()
    # In bfloat16, the gradient of the head is rounded once per chunk.
    tolerance = {"rtol": 1e-5, "atol": 1e-5} if dtype == "float32" else {"rtol": 0.02, "atol": 0.05}
    for a, b in zip(jax.tree.leaves(grads_c), jax.tree.leaves(grads), strict=True):
        np.testing.assert_allclose(a, b, **tolerance)


@pytest.mark.ci
def test_chunked_loss_never_stores_all_logits() -> None:
    config = small("gpt2", vocab_size=509, n_layer=1)
    model, params = make(config)
    tokens, targets = ids(config)

    def largest(chunk: int) -> int:
        """Return the size of the largest array with a vocabulary axis, except the table."""
        loss_fn = make_loss_fn(model.apply, chunk)
        text = jax.jit(jax.grad(lambda p: loss_fn(p, tokens, targets, None).sum())).lower(params).compile().as_text()
        shapes = {tuple(map(int, dims.split(","))) for dims in re.findall(r"f32\[([\d,]+)\]", text)}
        table = config.vocab_size * config.n_embd
        return max(int(np.prod(s)) for s in shapes if config.vocab_size in s and np.prod(s) != table)

    assert largest(0) >= B * T * config.vocab_size
    assert largest(2) == B * 2 * config.vocab_size
    assert largest(10 * T) == B * T * config.vocab_size, "the last chunk is not padded"
