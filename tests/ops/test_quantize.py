"""Quantized weights: error, size and use in a model."""

from __future__ import annotations

import jax
import jax.numpy as jnp
import numpy as np
import pytest

from jaxgpt.config import ModelConfig
from jaxgpt.model import GPT
from jaxgpt.model.params import abstract_params
from jaxgpt.ops.quantize import QuantizedMatrix, dequantize, quantize, quantized_matmul

CONFIG = ModelConfig(vocab_size=40, block_size=16, n_embd=32, n_layer=2, n_head=4, n_kv_head=2, mlp="gated")


def random_params(config: ModelConfig) -> dict[str, jax.Array]:
    leaves, tree = jax.tree.flatten(abstract_params(config))
    rng = np.random.default_rng(0)
    params: dict[str, jax.Array] = jax.tree.unflatten(
        tree, [jnp.asarray(rng.normal(0, 0.2, leaf.shape), jnp.float32) for leaf in leaves]
    )
    return params


@pytest.mark.parametrize(
    "precision", ["int8", *(pytest.param(p, marks=pytest.mark.long) for p in ("float32", "bfloat16"))]
)
@pytest.mark.parametrize("tied", [True, pytest.param(False, marks=pytest.mark.long)])
def test_a_quantized_model_equals_one_with_dequantized_weights(precision: str, tied: bool) -> None:
    config = ModelConfig(**{**CONFIG.__dict__, "tie_embeddings": tied})
    params = random_params(config)
    ids = jnp.arange(12)[None]
    low = quantize(params, precision)  # type: ignore[arg-type]

    @jax.jit
    def forward(params: object) -> jax.Array:
        return GPT(config).apply({"params": params}, ids)

    found = forward(low)
    wide = dequantize(quantize(params, precision))  # type: ignore[arg-type]
    np.testing.assert_allclose(found, forward(wide), atol=1e-4)
    exact = forward(params)
    error = float(jnp.abs(found - exact).max() / jnp.abs(exact).max())
    assert (error < 1e-5) == (precision == "float32")
    assert error < 0.1


def test_int8_size_and_rounding_error() -> None:
    params = random_params(CONFIG)
    kernel = params["h_0"]["attn"]["o_proj"]["kernel"]  # type: ignore[index]
    low = quantize(params, "int8")["h_0"]["attn"]["o_proj"]["kernel"]
    assert isinstance(low, QuantizedMatrix)
    assert low.values.nbytes * 4 == kernel.nbytes
    wide = dequantize(quantize(params, "int8"))["h_0"]["attn"]["o_proj"]["kernel"]
    assert bool(jnp.all(jnp.abs(wide - kernel) <= low.scale[None, None, :] * 0.5001))
    assert int(jnp.abs(low.values).max()) == 127


def test_biases_norms_and_learned_positions_are_not_quantized() -> None:
    low = quantize(random_params(CONFIG), "int8")
    leaves = jax.tree.leaves_with_path(low, is_leaf=lambda w: isinstance(w, QuantizedMatrix))
    stored = {jax.tree_util.keystr(path, simple=True): isinstance(w, QuantizedMatrix) for path, w in leaves}
    assert stored == {name: name.endswith("kernel") or name.startswith("wte") for name in stored}


@pytest.mark.parametrize("precision", ["bfloat16", "int8"])
@pytest.mark.parametrize("rows", [1, 2, 12])
def test_sums_are_float32_whatever_the_dtype(precision: str, rows: int) -> None:
    w = quantize(random_params(CONFIG)["h_0"]["mlp"], precision)["up_proj"]["kernel"]  # type: ignore[arg-type, index]
    x = jax.random.normal(jax.random.key(0), (rows, CONFIG.n_embd)).astype(jnp.bfloat16)
    found = quantized_matmul(x, w, jnp.bfloat16)
    assert found.dtype == jnp.float32
    np.testing.assert_array_equal(found, quantized_matmul(x.astype(jnp.float32), w))


@pytest.mark.parametrize("precision", ["bfloat16", "int8"])
@pytest.mark.parametrize(("rows", "inputs"), [(1, 300), (1, 307), (2, 300), (14, 300)])  # 307 is prime
def test_activations_are_not_rounded(precision: str, rows: int, inputs: int) -> None:
    rng = np.random.default_rng(0)
    w = rng.normal(0, 1, (inputs, 50)).astype(np.float32)
    x = rng.normal(0, 1, (rows, inputs)).astype(np.float32)
    x[::2] *= 1e-3
    x[1::2] *= 1e3
    low = quantize({"h": {"kernel": jnp.asarray(w)}}, precision)["h"]["kernel"]  # type: ignore[arg-type]
    scale = np.ones(50) if low.scale is None else np.asarray(low.scale, np.float64)
    exact = x.astype(np.float64) @ (np.asarray(low.values, np.float64) * scale[:, None]).T
    found = jax.jit(quantized_matmul)(jnp.asarray(x), low)
    size = np.abs(x).sum(-1, keepdims=True)
    assert float((np.abs(found - exact) / size).max()) < 1e-6
