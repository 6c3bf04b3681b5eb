"""With JAX_ENABLE_X64, all dtypes stay the same, and the same seed gives the same run."""

from __future__ import annotations

from dataclasses import replace
from typing import Any

import jax
import numpy as np
import pytest
from helpers import small_run

from jaxgpt.config import ModelConfig, OptimConfig
from jaxgpt.lm.weights import quantize
from jaxgpt.trainer.build import build


def types_of(state: Any) -> set[str]:
    return {str(leaf.dtype) for leaf in jax.tree.leaves(state)}


def trained() -> tuple[Any, dict[str, Any], np.ndarray]:
    """Return the state and metrics after two steps, and window losses, for a model that covers every dtype."""
    optim = OptimConfig(warmup_steps=2, ema_decay=0.9, spike_factor=3.0)
    config = replace(small_run(accumulation=2, steps_per_call=2), optim=optim).with_model(
        vocab_size=17, dropout=0.2, n_layer=1
    )
    program = build(config)
    state = program.init()
    types = jax.tree.map(lambda leaf: leaf.dtype, state)
    assert types_of(state) == {"float32", "int32"}
    ids = np.random.default_rng(0).integers(0, 17, (3, 8, 17), np.int32)
    state, metrics = program.step(state, program.batches.put_for_call(list(ids[:2])))
    assert jax.tree.map(lambda leaf: leaf.dtype, state) == types
    losses = program.sums(state.params, program.put(ids[2])).loss_B
    return jax.device_get(state), jax.device_get(metrics), np.asarray(losses)


@pytest.mark.ci
def test_training() -> None:
    expected = trained()
    with jax.enable_x64(True):
        found = trained()
    for a, b in zip(jax.tree.leaves(found), jax.tree.leaves(expected), strict=True):
        assert a.dtype == b.dtype
    # Not the weights: the gradient of the keys' bias is rounding error, which Adam scales to full-size updates.
    for name in ("loss", "grad_norm", "lr"):
        np.testing.assert_allclose(found[1][name], expected[1][name], rtol=1e-5)
    np.testing.assert_allclose(found[2], expected[2], rtol=1e-5)


def test_a_product_with_int8_weights() -> None:
    x = np.random.default_rng(0).normal(size=(1, 32)).astype(np.float32)
    params = {"h_0": {"mlp": {"up_proj": {"kernel": np.ones((32, 3), np.float32)}}}}
    w = quantize(params, ModelConfig(n_layer=1), "int8")["h_0"]["mlp"]["up_proj"]["kernel"]
    with jax.enable_x64(True):
        found = jax.jit(lambda x, w: x @ w)(jax.numpy.asarray(x), w)
    assert found.dtype == np.float32
    np.testing.assert_allclose(found, x.sum(keepdims=True).repeat(3, 1), rtol=1e-5)


@pytest.mark.parametrize("name", ["muon", "lion", "sgd", "adafactor"])
def test_states_of_other_optimizers(name: Any) -> None:
    config = replace(small_run(), optim=OptimConfig(name=name)).with_model(vocab_size=17, n_layer=1)
    with jax.enable_x64(True):
        assert types_of(build(config).abstract.state) <= {"float32", "int32"}
