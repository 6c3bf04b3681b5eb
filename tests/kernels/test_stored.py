"""Stored weights: they multiply themselves, with the error and size of their precision."""

from __future__ import annotations

from dataclasses import replace
from typing import Any

import jax
import jax.numpy as jnp
import numpy as np
import pytest
from helpers import on_cpu

from jaxgpt import kernels
from jaxgpt.config import ModelConfig
from jaxgpt.kernels.stored import Stored
from jaxgpt.lm.weights import dequantize, quantize
from jaxgpt.model import GPT
from jaxgpt.model.params import abstract_params, map_matrices, map_weights
from jaxgpt.ops import Ops
from jaxgpt.ops.linear import linear

CONFIG = ModelConfig(vocab_size=40, block_size=16, n_embd=32, n_layer=2, n_head=4, n_kv_head=2, mlp="gated")
every_precision = pytest.mark.parametrize("precision", ["float32", "bfloat16", "int8"])


def random_params(config: ModelConfig) -> Any:
    rng = np.random.default_rng(0)

    def draw(leaf: Any) -> jax.Array:
        return jnp.asarray(rng.normal(0, 0.2, leaf.shape), jnp.float32)

    return jax.tree.map(draw, abstract_params(config))


def stored(w: np.ndarray | jax.Array, precision: str) -> Stored:
    """Return a matrix `[in, out]` in the model's stored form."""
    config = ModelConfig(vocab_size=2, n_layer=1, n_head=1, head_dim=2)
    params = {"h_0": {"attn": {"q_proj": {"kernel": jnp.asarray(w, jnp.float32)}}}}
    result: Stored = quantize(params, config, precision)["h_0"]["attn"]["q_proj"]["kernel"]  # type: ignore[arg-type]
    return result


@every_precision
@pytest.mark.parametrize(("ops", "tied"), [(Ops(), True), (kernels.CPU, False)], ids=["definitions", "cpu"])
def test_a_model_of_stored_weights_equals_one_of_dequantized_weights(precision: str, ops: Ops, tied: bool) -> None:
    """The README calls `GPT(lm.config.model).apply({"params": lm.params}, ids)`."""
    config = replace(CONFIG, tie_embeddings=tied)
    params = random_params(config)
    ids = jnp.arange(12)[None]
    low = quantize(params, config, precision)  # type: ignore[arg-type]
    forward = jax.jit(lambda model, params: model.apply({"params": params}, ids), static_argnums=0)

    found = forward(GPT(config, ops), low)
    expected = forward(GPT(config), dequantize(low))
    np.testing.assert_allclose(found, expected, atol=1e-4)

    exact = forward(GPT(config), params)
    error = float(jnp.abs(found - exact).max() / jnp.abs(exact).max())
    assert (error < 1e-5) == (precision == "float32")
    assert error < 0.1


@every_precision
def test_a_stored_matrix_behaves_like_its_array(precision: str) -> None:
    w = np.random.default_rng(0).normal(size=(6, 5)).astype(np.float32)
    low = stored(w, precision)
    dense = low.dense()
    tolerance = {"float32": 0, "bfloat16": 0.02, "int8": 0.02}
    np.testing.assert_allclose(dense, w, atol=tolerance[precision])
    assert low.shape == low.T.T.shape == dense.shape
    assert low.T.shape == dense.T.shape
    np.testing.assert_array_equal(low.T.dense(), dense.T)
    np.testing.assert_array_equal(jax.jit(Stored.dense)(low), dense)

    x = jnp.asarray(np.random.default_rng(1).normal(size=(2, 3, 6)), jnp.float32)
    np.testing.assert_allclose(x @ low, x @ dense, atol=1e-5)
    np.testing.assert_allclose(x[0, 0] @ low, x[0, 0] @ dense, atol=1e-5)

    ids = jnp.array([[1, 4]])
    np.testing.assert_array_equal(low.T.take(ids, 0), dense.T.take(ids, 0))


def test_int8_size_and_rounding_error() -> None:
    params = random_params(CONFIG)
    quantized = quantize(params, CONFIG, "int8")
    w = params["h_0"]["attn"]["o_proj"]["kernel"]
    low = quantized["h_0"]["attn"]["o_proj"]["kernel"]
    assert low.values_OI.nbytes * 4 == w.nbytes
    error = jnp.abs(low.dense() - w)
    assert bool(jnp.all(error <= low.scale_O[None] * 0.5001))
    assert int(jnp.abs(low.values_OI).max()) == 127


def test_int8_scales_of_zeros_are_above_0() -> None:
    """The smallest float32 divided by 127 is flushed to 0 on some devices, and 0 / 0 has no value."""
    zeros = jax.tree.map(jnp.zeros_like, random_params(CONFIG))
    low = quantize(zeros, CONFIG, "int8")["h_0"]["attn"]["o_proj"]["kernel"]
    assert bool(jnp.all(low.scale_O > 0))
    np.testing.assert_array_equal(low.dense(), 0)


def test_biases_norms_and_learned_positions_are_not_stored() -> None:
    low = quantize(random_params(CONFIG), CONFIG, "int8")
    leaves = jax.tree.leaves_with_path(low, is_leaf=is_stored)
    found = {jax.tree_util.keystr(path, simple=True): is_stored(w) for path, w in leaves}
    assert found == {name: name.endswith("kernel") or name.startswith("wte") for name in found}

    kinds = map_weights(lambda weight, _: weight.kind, abstract_params(CONFIG), CONFIG)  # type: ignore[union-attr]
    assert [kind in ("matrix", "table") for kind in jax.tree.leaves(kinds)] == list(found.values())


def is_stored(leaf: Any) -> bool:
    return isinstance(leaf, Stored)


def test_stored_matrices_are_converted_whole() -> None:
    stored = quantize(random_params(CONFIG), CONFIG, "float32")

    def expected_dtype(weight: Any, _: Any) -> Any:
        return jnp.float32 if weight.kind == "vector" else jnp.bfloat16

    half = map_matrices(lambda w: w.astype(jnp.bfloat16), stored, CONFIG)
    leaves = jax.tree.leaves(half, is_leaf=is_stored)
    dtypes = [getattr(leaf, "values_OI", leaf).dtype for leaf in leaves]
    assert dtypes == jax.tree.leaves(map_weights(expected_dtype, stored, CONFIG))
    assert isinstance(half["h_0"]["attn"]["o_proj"]["kernel"], Stored)


@pytest.mark.parametrize("precision", ["bfloat16", "int8"])
@pytest.mark.parametrize("rows", [1, 2, 12])
@pytest.mark.parametrize("function", [linear, kernels.CPU.linear])
def test_sums_are_float32_whatever_the_dtype(precision: str, rows: int, function: Any) -> None:
    """The product has the dtype of its input, and is rounded once."""
    w = quantize(random_params(CONFIG), CONFIG, precision)["h_0"]["mlp"]["up_proj"]["kernel"]  # type: ignore[arg-type]
    x = jax.random.normal(jax.random.key(0), (rows, CONFIG.n_embd)).astype(jnp.bfloat16)
    assert (x @ w).dtype == jnp.bfloat16
    # Each product of bfloat16 numbers is exact; a different order of the sums may change the rounding.
    exact = x.astype(jnp.float32) @ w
    product = np.asarray(x @ w, np.float32)
    np.testing.assert_allclose(product, exact, rtol=2**-8, atol=1e-6)
    rounded = np.asarray(exact.astype(jnp.bfloat16), np.float32)
    equal = np.mean(product == rounded)
    assert equal == 1 if precision == "int8" else equal > 0.99
    np.testing.assert_array_equal(function(x, w, None, jnp.bfloat16), x @ w)


@pytest.mark.parametrize("precision", ["bfloat16", "int8"])
@pytest.mark.parametrize(("rows", "inputs"), [(1, 300), (1, 307), (1, 20_000), (2, 300), (5, 300), (14, 300)])
def test_activations_are_not_rounded(precision: str, rows: int, inputs: int) -> None:
    rng = np.random.default_rng(0)
    w = rng.normal(0, 1, (inputs, 50)).astype(np.float32)
    x = rng.normal(0, 1, (rows, inputs)).astype(np.float32)
    x[::2] *= 1e-3
    x[1::2] *= 1e3
    low = stored(w, precision)
    scale_O = np.asarray(low.scale_O, np.float64)
    w_OI = np.asarray(low.values_OI, np.float64) * scale_O[:, None]
    exact = x.astype(np.float64) @ w_OI.T
    found = jax.jit(lambda x, low: x @ low)(jnp.asarray(x), low)
    size = np.abs(x).sum(-1, keepdims=True)
    assert float((np.abs(found - exact) / size).max()) < 1e-6


@pytest.mark.parametrize(("rows", "inputs"), [(1, 60_000), (5, 60_000), (5, 140_000)])
def test_integer_sums_do_not_overflow(rows: int, inputs: int) -> None:
    x = jnp.ones((rows, inputs))
    low = stored(np.ones((inputs, 2)), "int8")
    np.testing.assert_allclose(x @ low, inputs, rtol=1e-6)


@on_cpu
def test_the_digits_of_a_row_are_computed_once() -> None:
    """They are not computed again in the loop over the weights, which computes the sums of both digits."""
    low = stored(np.ones((300, 50)), "int8")
    x = jnp.ones((1, 300))
    product = jax.jit(lambda x, low: jnp.tanh(x) @ low)
    functions = (product.lower(x, low).compile().as_text() or "").split("\n\n")
    [loop] = [text for text in functions if "(s32[50]{0}, s32[50]{0}) reduce(" in text]
    assert "s8[50,300]" in loop
    assert "round" not in loop


def test_other_platforms_multiply_in_float32() -> None:
    low = stored(np.ones((300, 50)), "int8")
    x = jnp.ones((1, 300))
    for platform, digits in (("cpu", True), ("tpu", False), ("cuda", False)):
        traced = jax.jit(lambda x, low: x @ low).trace(x, low)
        text = traced.lower(lowering_platforms=(platform,)).as_text()
        assert ("xi32>" in text) == digits, platform


@on_cpu
def test_prompts_are_multiplied_in_int8_where_it_is_faster(monkeypatch: pytest.MonkeyPatch) -> None:
    low = stored(np.ones((300, 50)), "int8")
    x = jnp.ones((14, 300))
    for minor, instructions, faster in ((12, "avx512_vnni", True), (12, "avx2", False), (10, "avx512_vnni", False)):
        monkeypatch.setattr(jax, "__version_info__", (0, minor, 0))
        monkeypatch.setattr("jaxgpt.kernels.stored.cpu_supports", instructions.__eq__)
        text = jax.jit(lambda x, low: x @ low).lower(x, low).as_text()
        assert ("xi32>" in text) == faster


@pytest.mark.parametrize("rows", [1, 5, 14])
def test_activations_have_the_gradient_of_the_dequantized_product(rows: int) -> None:
    low = stored(np.random.default_rng(0).normal(size=(30, 20)), "int8")
    x = jnp.ones((rows, 30))
    gradient = jax.grad(lambda x, w: ((x @ w) ** 2).sum())
    np.testing.assert_allclose(gradient(x, low), gradient(x, low.dense()), rtol=1e-4)
