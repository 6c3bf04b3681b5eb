"""Products on a CPU. tests/kernels/test_table.py compares their results with the definitions."""

from __future__ import annotations

from collections.abc import Callable
from typing import Any

import jax
import jax.numpy as jnp
import numpy as np
import pytest
from helpers import on_cpu

from jaxgpt.config import MeshConfig
from jaxgpt.kernels import cpu
from jaxgpt.kernels.cpu import transposed_copy
from jaxgpt.model.cache import KeysValues
from jaxgpt.ops import attention
from jaxgpt.ops import linear as definitions
from jaxgpt.ops.attention import Positions, Visible, row_positions
from jaxgpt.ops.rotary import Llama3Scaling, rope_frequencies, rope_rotation, rotate
from jaxgpt.parallel.mesh import make_mesh


def random(seed: int, shape: tuple[int, ...]) -> jax.Array:
    return jax.random.normal(jax.random.key(seed), shape)


def test_transposed_copy_is_materialized() -> None:
    x = jnp.arange(12.0).reshape(3, 4)
    np.testing.assert_array_equal(transposed_copy(x), np.arange(12.0).reshape(3, 4).T)
    product = jax.jit(lambda x: transposed_copy(jnp.tanh(x)) @ x)
    fused_with_its_source = product.lower(x).compile().as_text()
    assert "call(" in fused_with_its_source


@pytest.mark.skipif(jax.__version_info__ < (0, 12), reason="XLA converts all bfloat16 products to float32")
def test_products_with_a_transposed_copy_stay_in_bfloat16() -> None:
    """The compiler converts the operands to float32 if it sees the transposition, which this copy hides."""
    x_RI = jnp.ones((64, 32), jnp.bfloat16)
    x_IR = jnp.ones((32, 64), jnp.bfloat16)
    y_RO = jnp.ones((64, 48), jnp.bfloat16)

    def product_dtype(product: Callable[..., jax.Array], x: jax.Array) -> str:
        text = jax.jit(product).lower(x, y_RO).compile().as_text() or ""
        products = [line for line in text.splitlines() if " dot(" in line]
        _, result = products[0].split(" = ")[:2]
        return result[:3]

    without_transposition = product_dtype(jnp.matmul, x_IR)
    assert product_dtype(lambda x, y: transposed_copy(x) @ y, x_RI) == without_transposition
    seen = product_dtype(lambda x, y: cpu.call_without_inlining(jnp.transpose, x) @ y, x_RI)
    assert seen == "f32", "the compiler no longer needs the reshapes of transposed_copy"


def test_rope_sines_are_computed_once() -> None:
    """Without the kernel, the compiler fuses the sines into their consumers and computes them once per head."""

    def per_head(rotation: Any) -> bool:
        frequencies = rope_frequencies(4, 10_000.0, Llama3Scaling())

        def turned(x_BTNH: jax.Array) -> jax.Array:
            positions = jnp.arange(x_BTNH.shape[1])[None]
            return rotate(x_BTNH, rotation(positions, frequencies))

        program = jax.jit(turned).lower(jnp.ones((2, 5, 3, 4))).compile().as_text()
        functions = program.split("\n\n")
        return any("sine(" in text and "[2,5,3," in text for text in functions)

    assert per_head(rope_rotation)
    assert not per_head(cpu.rotation)


@pytest.mark.parametrize("function", [cpu.linear, definitions.linear])
def test_the_gradient_of_a_bias_in_bfloat16_is_summed_in_float32(function: Callable[..., jax.Array]) -> None:
    """Sums in bfloat16 would have an error of about 10% here. One mesh splits the weights."""
    dy = random(0, (1, 4096, 8)).astype(jnp.bfloat16) + 1
    x = jnp.zeros((1, 4096, 2))
    w = jnp.zeros((2, 8))
    b = jnp.zeros(8)

    @jax.jit
    def gradient(b: jax.Array, dy: jax.Array) -> jax.Array:
        _, backward = jax.vjp(lambda b: function(x, w, b, jnp.bfloat16), b)
        [db] = backward(dy)
        return db

    with jax.set_mesh(make_mesh(MeshConfig(data=1, fsdp=2))):
        found = gradient(b, dy)
    expected = dy.astype(jnp.float32).sum((0, 1))
    np.testing.assert_allclose(found.astype(jnp.float32), expected, rtol=2**-8)


@on_cpu
def test_attention_from_one_token_copies_no_cache() -> None:
    """In a loop, the definition copies the cache; if a new version of XLA does not, the call is unnecessary."""
    k = jnp.ones((1, 2, 512, 32))
    v = jnp.ones((1, 2, 32, 512))
    q = jnp.ones((1, 1, 4, 32))

    def temporary_bytes(attend: Callable[..., jax.Array]) -> int:
        def step(cache: KeysValues, slot: jax.Array) -> tuple[KeysValues, jax.Array]:
            new = KeysValues(cache.k_BKSH[:, :, :1] + 1, cache.v_BKHS[..., :1] + 1)
            cache = cache.write(slot, new)
            visible = Visible(Positions(slot[None, None]), row_positions(512))
            return cache, attend(q, *cache, visible, 0.3)

        loop = jax.jit(lambda cache: jax.lax.scan(step, cache, jnp.arange(9)))
        program = loop.lower(KeysValues(k, v)).compile()
        return program.memory_analysis().temp_size_in_bytes  # type: ignore[union-attr]

    assert temporary_bytes(cpu.attend) < 0.8 * temporary_bytes(attention.attend)
