"""In a packed batch, each document has the same logits and gradients as alone."""

from __future__ import annotations

import functools
from collections.abc import Callable
from typing import Any

import jax
import jax.numpy as jnp
import numpy as np
import pytest
from helpers import every_model, make, random_ids, small, splash_on_a_cpu

from jaxgpt.config import MeshConfig, ModelConfig
from jaxgpt.kernels import CPU
from jaxgpt.kernels.remat import POLICIES
from jaxgpt.kernels.tiled import tiled_attention
from jaxgpt.model import GPT
from jaxgpt.model.scan import ScannedGPT, stack_layers
from jaxgpt.ops import Ops
from jaxgpt.ops.attention import Positions
from jaxgpt.parallel.mesh import make_mesh
from jaxgpt.parallel.rules import use_mesh
from jaxgpt.train.loss import cross_entropy, next_token_loss, split_windows
from jaxgpt.train.step import gradients

SPLASH = Ops(attend=splash_on_a_cpu)
LENGTHS = (5, 1, 6), (2, 9, 1)  # lengths of the documents of each row


def tiled(q: Any, k: Any, v: Any, visible: Any, scale: float, edit: Any = None) -> jax.Array:
    """Attend in tiles, even in short rows."""
    return tiled_attention(q, k, v, visible, scale)


TILED = Ops(attend=tiled)


def packed(config: ModelConfig, lengths: tuple[tuple[int, ...], ...] = LENGTHS) -> tuple[jax.Array, jax.Array]:
    """Return windows `[B, T, 3]` of concatenated documents, and the same documents `[n, T, 3]`, one per row."""
    T = sum(lengths[0])
    rows = []
    alone = []
    for sizes, ids in zip(lengths, np.asarray(random_ids(config, (len(lengths), T))), strict=True):
        ends = np.cumsum(sizes)
        targets = np.where(np.isin(np.arange(T) + 1, ends), -1, np.roll(ids, -1))
        rows.append(np.stack([ids, targets, np.repeat(np.arange(len(sizes)), sizes)], -1))
        for end, n in zip(ends, sizes, strict=True):
            alone.append(np.tile(np.array([0, -1, 0]), (T, 1)))
            alone[-1][:n, :2] = rows[-1][end - n : end, :2]
    return jnp.asarray(np.stack(rows), jnp.int32), jnp.asarray(np.stack(alone), jnp.int32)


def assert_close(found: Any, expected: Any, tolerance: float) -> None:
    for a, b in zip(jax.tree.leaves(found), jax.tree.leaves(expected), strict=True):
        np.testing.assert_allclose(a, b, atol=tolerance, rtol=tolerance)


def mean_gradient(model: GPT, accumulation: int = 1) -> Callable[..., Any]:
    """Return the means of the metrics and the gradient, as the train step computes them."""
    objective = next_token_loss(model.apply)
    return functools.partial(gradients, key=None, objective=objective, accumulation=accumulation)


def check(config: ModelConfig, ops: Ops = Ops(), lengths: Any = LENGTHS, gradient: bool = True) -> None:  # noqa: B008
    """Compare a packed batch with its documents, each alone in a row, computed by `attend` without document ids."""
    model, params = make(config)
    windows, alone = packed(config, lengths)

    def run(
        model: GPT, inputs: jax.Array, targets: jax.Array, positions: Positions | None = None
    ) -> tuple[jax.Array, Any]:
        def loss(params: Any) -> tuple[jax.Array, jax.Array]:
            logits = model.apply({"params": params}, inputs, None, positions)
            return cross_entropy(logits, targets).sum(), logits

        grads, logits = jax.jit(jax.grad(loss, has_aux=True) if gradient else lambda p: ((), loss(p)[1]))(params)
        return logits, grads

    logits, grads = run(GPT(config, ops), *split_windows(windows))
    expected, expected_grads = run(model, *split_windows(alone)[:2])
    sizes = [n for row in lengths for n in row]
    assert_close(
        jnp.concatenate(list(logits)), jnp.concatenate([x[:n] for x, n in zip(expected, sizes, strict=True)]), 2e-5
    )
    assert_close(grads, expected_grads, 1e-4)


@every_model
def test_a_document_is_computed_as_if_alone(name: str) -> None:
    """Test each kind of positions and a sliding window. The gradient uses the same operations, so one case is enough."""
    check(small(name, n_layer=1), gradient=name == "gemma")


def test_the_operations_of_a_cpu_compute_a_document_as_if_alone() -> None:
    check(small("gemma", n_layer=1), CPU)


@pytest.mark.parametrize(
    ("ops", "window"),
    [
        pytest.param(CPU, 30, marks=pytest.mark.ci),
        pytest.param(CPU, 0, marks=pytest.mark.long),
        pytest.param(SPLASH, 30, marks=pytest.mark.long),
    ],
)
def test_kernels_keep_documents_apart(ops: Ops, window: int) -> None:
    """Documents begin and end inside tiles of 65, at tile boundaries and beyond a sliding window; heads are grouped."""
    check(small("llama", block_size=130, sliding_window=window, n_layer=1), ops, ((65, 1, 40, 24), (3, 100, 27)))


@pytest.mark.ci
def test_accumulation_and_scanned_layers_keep_documents_apart() -> None:
    """Microbatches have different numbers of targets; sums are divided once."""
    config = small("gpt2")
    model, params = make(config)
    windows, _ = packed(config, (*LENGTHS, (12,), (1,) * 12))
    metrics, grads = jax.jit(mean_gradient(model))(params, windows)
    scanned = ScannedGPT(config, TILED, POLICIES["dots"])
    found = jax.jit(mean_gradient(scanned, accumulation=2))(stack_layers(params), windows)
    assert_close(found, (metrics, stack_layers(grads)), 1e-5)


@pytest.mark.ci
@pytest.mark.parametrize("ops", [CPU, Ops()])
def test_documents_on_a_mesh(ops: Ops) -> None:
    config = small("llama", n_kv_head=1)
    model, params = make(config)
    windows, _ = packed(config)
    expected = jax.jit(mean_gradient(model))(params, windows)
    with use_mesh(make_mesh(MeshConfig(data=2, fsdp=1, tensor=2)), config):
        assert_close(jax.jit(mean_gradient(GPT(config, ops)))(params, windows), expected, 1e-5)
