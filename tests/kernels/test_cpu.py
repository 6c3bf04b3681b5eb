"""Operations for the CPU change no result (test_table.py), and keep from memory what they promise."""

from __future__ import annotations

import functools
import re
from collections.abc import Callable

import jax
import jax.numpy as jnp
import numpy as np
import pytest

from jaxgpt.config import MeshConfig
from jaxgpt.kernels import cpu
from jaxgpt.kernels.cpu import broadcast_to_tokens, product, squared_norm, transposed_copy
from jaxgpt.ops import linear as definitions
from jaxgpt.ops.rotary import Llama3Scaling, rope_frequencies, rotate
from jaxgpt.parallel import make_mesh

B, T = 2, 8
Broadcast = Callable[[jax.Array, tuple[int, ...]], jax.Array]


def random(seed: int, shape: tuple[int, ...]) -> jax.Array:
    return jax.random.normal(jax.random.key(seed), shape)


def test_transposed_copy_is_materialized() -> None:
    x = jnp.arange(12.0).reshape(3, 4)
    np.testing.assert_array_equal(transposed_copy(x), np.arange(12.0).reshape(3, 4).T)
    fused_with_its_source = jax.jit(lambda x: transposed_copy(jnp.tanh(x)) @ x).lower(x).compile().as_text()
    assert "call(" in fused_with_its_source


def test_rope_sines_are_computed_once() -> None:
    """Fused into their consumers, they would be computed once per head."""

    def turned(x_BTNH: jax.Array) -> jax.Array:
        positions = jnp.arange(x_BTNH.shape[1])[None]
        return rotate(x_BTNH, cpu.rotation(positions, rope_frequencies(4, 10_000.0, Llama3Scaling())))

    program = jax.jit(turned).lower(jnp.ones((2, 5, 3, 4))).compile().as_text()
    assert re.search(r"\[(1,)?5,2\]\S* sine\(", program)
    assert "call(" in program


@pytest.mark.parametrize(
    ("x", "w"),
    [((2, 5, 6), (6, 7)), ((2, 5, 6), (6, 12)), ((2, 5, 32), (32, 2)), ((2, 9, 32), (32, 6)), ((6,), (6, 7))],
)
def test_products_and_their_gradients_equal_tensordot(x: tuple[int, ...], w: tuple[int, ...]) -> None:
    """Also where dy is narrower than x, which is then the one to be transposed."""
    x_, w_ = random(0, x), random(1, w)
    y, ours = jax.vjp(product, x_, w_)
    expected, theirs = jax.vjp(lambda x, w: jnp.tensordot(x, w, 1), x_, w_)
    np.testing.assert_allclose(y, expected, atol=1e-5)
    for mine, other in zip(ours(random(2, y.shape)), theirs(random(2, y.shape)), strict=True):
        np.testing.assert_allclose(mine, other, atol=1e-4, rtol=1e-5)


@pytest.mark.parametrize("shape", [(B, T, 5), (B, 192, 5), (B, 7, 5), (B, T, 2, 5), (T, 5)])
def test_a_weight_of_every_token(shape: tuple[int, ...]) -> None:
    """Values, gradients, forward mode, second derivatives and gradients per example equal those of `jnp.broadcast_to`."""
    w, x, batch = random(0, (5,)), random(1, shape), random(2, (3, *shape))

    @functools.partial(jax.jit, static_argnums=0)
    def all_of(broadcast: Broadcast) -> list[jax.Array]:
        def f(w: jax.Array, x: jax.Array) -> jax.Array:
            return jnp.sin(x * broadcast(w, shape)).sum()

        return [
            broadcast(w, shape),
            jax.grad(f)(w, x),
            jax.jvp(lambda w: broadcast(w, shape), (w,), (w * w,))[1],
            jax.hessian(f)(w, x),
            jax.vmap(jax.grad(f), (None, 0))(w, batch),
        ]

    for ours, plain in zip(all_of(broadcast_to_tokens), all_of(jnp.broadcast_to), strict=True):
        np.testing.assert_allclose(ours, plain, rtol=1e-5, atol=1e-5)


@pytest.mark.parametrize("function", [cpu.linear, definitions.linear])
def test_the_gradient_of_a_bias_in_bfloat16_is_summed_in_float32(function: Callable[..., jax.Array]) -> None:
    """On a mesh that splits the weights too; sums in bfloat16 are wrong by about a tenth here."""
    dy = random(0, (1, 4096, 8)).astype(jnp.bfloat16) + 1
    x, w, b = jnp.zeros((1, 4096, 2)), jnp.zeros((2, 8)), jnp.zeros(8)
    with jax.set_mesh(make_mesh(MeshConfig(data=1, fsdp=2))):
        found = jax.jit(lambda b, dy: jax.vjp(lambda b: function(x, w, b, jnp.bfloat16), b)[1](dy)[0])(b, dy)
    np.testing.assert_allclose(found.astype(jnp.float32), dy.astype(jnp.float32).sum((0, 1)), rtol=2**-8)


def temporary_bytes(f: Callable[..., jax.Array], *args: jax.Array) -> int:
    analysis = jax.jit(f).lower(*args).compile().memory_analysis()
    assert analysis
    return int(analysis.temp_size_in_bytes)


def test_squares_are_not_written_to_memory() -> None:
    x = jnp.ones((4, 256, 128))
    assert temporary_bytes(squared_norm, x) <= x.nbytes / 6
    assert temporary_bytes(definitions.squared_norm, x) >= x.nbytes  # otherwise XLA no longer needs this


def test_the_gradient_of_a_bias_is_a_product_that_copies_nothing() -> None:
    b, dy = jnp.zeros(128), jnp.ones((4, 256, 128))

    def gradient(b: jax.Array, dy: jax.Array) -> jax.Array:
        (db,) = jax.vjp(lambda b: broadcast_to_tokens(b, dy.shape), b)[1](dy)
        return db

    assert " dot(" in jax.jit(gradient).lower(b, dy).compile().as_text()
    assert temporary_bytes(gradient, b, dy) <= dy.nbytes / 64
