"""Sums in parts and as products: equal to plain sums, under every transformation, and without a copy of what is summed."""

from __future__ import annotations

import functools
from collections.abc import Callable

import jax
import jax.numpy as jnp
import numpy as np
import pytest

from jaxgpt.config import MeshConfig
from jaxgpt.ops.sums import broadcast_to_tokens, sum_of_squares
from jaxgpt.parallel import make_mesh

B, T = 2, 8
Broadcast = Callable[[jax.Array, tuple[int, ...]], jax.Array]


def random(seed: int, shape: tuple[int, ...]) -> jax.Array:
    return jax.random.normal(jax.random.key(seed), shape)


@pytest.mark.parametrize(
    ("weight", "shape"),
    [
        ((5,), (B, T, 5)),
        ((5,), (B, 192, 5)),
        ((5,), (B, 7, 5)),
        ((2, 3), (B, T, 2, 3)),
        ((3,), (B, T, 2, 3)),
        ((5,), (T, 5)),
    ],
)
def test_a_weight_of_every_token(weight: tuple[int, ...], shape: tuple[int, ...]) -> None:
    """Values, gradients, forward mode, second derivatives and gradients per example equal those of `jnp.broadcast_to`."""
    w, x, batch = random(0, weight), random(1, shape), random(2, (3, *shape))

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


def test_a_gradient_in_bfloat16_is_summed_in_float32() -> None:
    """On a mesh that splits the weights too; sums in bfloat16 are wrong by about a tenth here."""
    dy = random(0, (1, 4096, 8)).astype(jnp.bfloat16) + 1
    with jax.set_mesh(make_mesh(MeshConfig(data=1, fsdp=2))):
        found = jax.jit(lambda w, dy: jax.vjp(lambda w: broadcast_to_tokens(w, dy.shape), w)[1](dy)[0])(dy[0, 0], dy)
    np.testing.assert_allclose(found.astype(jnp.float32), dy.astype(jnp.float32).sum((0, 1)), rtol=2**-8)


def temporary_bytes(f: Callable[..., jax.Array], *args: jax.Array) -> int:
    analysis = jax.jit(f).lower(*args).compile().memory_analysis()
    assert analysis
    return int(analysis.temp_size_in_bytes)


def test_squares_are_not_written_to_memory() -> None:
    x = jnp.ones((4, 256, 128))
    assert temporary_bytes(sum_of_squares, x) <= x.nbytes / 6
    assert temporary_bytes(lambda x: jnp.square(x).sum(), x) >= x.nbytes  # otherwise XLA no longer needs this


def test_the_gradient_of_a_bias_is_a_product_that_copies_nothing() -> None:
    b, dy = jnp.zeros(128), jnp.ones((4, 256, 128))

    def gradient(b: jax.Array, dy: jax.Array) -> jax.Array:
        (db,) = jax.vjp(lambda b: broadcast_to_tokens(b, dy.shape), b)[1](dy)
        return db

    assert " dot(" in jax.jit(gradient).lower(b, dy).compile().as_text()
    assert temporary_bytes(gradient, b, dy) <= dy.nbytes / 64
