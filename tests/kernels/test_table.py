"""Every entry of every table equals its definition in `Ops()`: value, gradient, vmap and bfloat16. test_devices.py: meshes."""

from __future__ import annotations

import functools
from typing import Any

import jax
import jax.numpy as jnp
import numpy as np
import pytest
from helpers import cudnn_on_a_cpu, splash_on_a_cpu

from jaxgpt.kernels import CPU, GPU, PLAIN
from jaxgpt.ops import Ops
from jaxgpt.ops.activations import ACTIVATIONS
from jaxgpt.ops.attention import Positions, Visible, attend, document_positions, row_positions
from jaxgpt.ops.norms import NORMS

long = pytest.mark.long


def assert_equal(entry: Any, definition: Any, *arrays: Any, atol: float = 1e-5, all_uses: bool = True) -> None:
    """Compare values and gradients with respect to all arrays; with `all_uses`, also values in bfloat16 and under vmap."""
    assert_close = functools.partial(np.testing.assert_allclose, rtol=1e-5, atol=atol)

    def value_and_gradient(function: Any) -> Any:
        @jax.jit
        def compute() -> Any:
            out, backward = jax.vjp(function, *arrays)
            weights = jnp.cos(jnp.arange(out.size)).reshape(out.shape)
            return out, backward(weights.astype(out.dtype))

        return compute()

    jax.tree.map(assert_close, value_and_gradient(entry), value_and_gradient(definition))
    if not all_uses:
        return

    low = [x.astype(jnp.bfloat16) for x in arrays]
    found = np.float32(jax.jit(entry)(*low))
    expected = np.float32(jax.jit(definition)(*low))
    np.testing.assert_allclose(found, expected, rtol=0.02, atol=0.02)

    twice = [jnp.stack([x, x[::-1]]) for x in arrays]
    found = jax.jit(jax.vmap(entry))(*twice)
    expected = jax.jit(jax.vmap(definition))(*twice)
    assert_close(found, expected)


def random(*shapes: tuple[int, ...]) -> list[jax.Array]:
    rng = np.random.default_rng(0)
    return [jnp.asarray(rng.normal(size=shape), jnp.float32) for shape in shapes]


@pytest.mark.parametrize("bias", [False, True])
def test_linear(bias: bool) -> None:
    x, w, b = random((4, 30, 24), (24, 40), (40,))

    def of(function: Any) -> Any:
        return lambda x, w, b: function(x, w, b if bias else None, x.dtype)

    assert_equal(of(CPU.linear), of(Ops().linear), x, w, b, atol=1e-4)


@pytest.mark.parametrize("name", ACTIVATIONS)
def test_activations(name: str) -> None:
    entry = functools.partial(PLAIN.activate, name)
    definition = functools.partial(Ops().activate, name)
    assert_equal(entry, definition, *random((4, 30, 24)))


def test_rotations() -> None:
    position_BT = jnp.arange(130)[None]
    frequencies = np.array([1.0, 0.1, 0.01])
    found = CPU.rotation(position_BT, frequencies)
    expected = Ops().rotation(position_BT, frequencies)
    for cos_or_sin, exact in zip(found, expected, strict=True):
        np.testing.assert_allclose(cos_or_sin, exact, rtol=1e-6, atol=1e-6)


@pytest.mark.parametrize("kind", NORMS)
@pytest.mark.parametrize("bias", [False, True])
def test_norms(kind: str, bias: bool) -> None:
    x, gain, b = random((3, 5, 24), (24,), (24,))

    def of(function: Any) -> Any:
        def norm(x: Any, gain: Any, b: Any) -> Any:
            """Gain and bias are float32 in every dtype of x."""
            return function(kind, x, 1e-5, gain.astype(jnp.float32), b.astype(jnp.float32) if bias else None)

        return norm

    assert_equal(of(GPU.norm), of(Ops().norm), 3 * x + 1, gain, b)


def test_every_entry_is_tested_here() -> None:
    elsewhere = {"experts"}  # test_experts_kernels.py
    definitions = Ops()
    changed = set()
    for ops in (CPU, GPU):
        changed |= {name for name in Ops._fields if getattr(ops, name) is not getattr(definitions, name)}
    assert changed - elsewhere == {"linear", "norm", "activate", "rotation", "attend"}


def padded(*starts: int, T: int) -> Positions:
    """Return the positions of left-padded rows; padding is a separate document."""
    position_BT = jnp.maximum(jnp.arange(T)[None] - jnp.array(starts)[:, None], -1)
    return Positions(position_BT, (position_BT >= 0).astype(jnp.int32))


def documents(T: int, *cuts: tuple[int, ...]) -> Positions:
    return document_positions(jnp.stack([jnp.isin(jnp.arange(T), jnp.array(row)).cumsum() for row in cuts]))


CACHE = Positions(jnp.array([[-1, -1, 0, 1, 2, 3, 4, -1], [0, 1, 2, 3, 4, 5, 6, -1]]))  # left padding, an empty slot
ONE = Positions(CACHE.position_BT[:, 6:7])
THREE = Positions(CACHE.position_BT[:, 4:7])
SEEN: dict[str, tuple[int, Visible]] = {  # key heads, visibility
    "short": (1, Visible(row_positions(12), None, 5)),
    "window": (1, Visible(row_positions(130), None, 3)),
    "wide window": (4, Visible(row_positions(390), None, 100)),
    "documents": (2, Visible(documents(130, (65, 66), (3, 103)), None, 30)),
    "left padding": (2, Visible(padded(0, 70, T=130))),
    "one token": (2, Visible(ONE, CACHE)),
    "one token, window": (1, Visible(ONE, CACHE, 3)),
    "several tokens": (2, Visible(THREE, CACHE)),
}


@pytest.mark.parametrize("case", [*SEEN, "edit"])
@pytest.mark.parametrize(
    "entry",
    [
        CPU.attend,
        pytest.param(splash_on_a_cpu, marks=long),
        pytest.param(cudnn_on_a_cpu, marks=long),
    ],
)
def test_attention(entry: Any, case: str) -> None:
    """Compare values and gradients, including cached tokens and padding. The output at padding is undefined."""
    K, visible = SEEN.get(case, SEEN["window"])
    edit = (lambda _, x: jnp.sin(x)) if case == "edit" else None
    keys = visible.key or visible.query
    T = visible.query.position_BT.shape[1]
    S = keys.position_BT.shape[1]
    read_BT11 = (visible.query.position_BT >= 0)[..., None, None]
    qkv = random((2, T, 4, 8), (2, K, S, 8), (2, K, 8, S))

    def read(function: Any) -> Any:
        return lambda *qkv: jnp.where(read_BT11, function(*qkv, visible, 0.3, edit), 0.0)

    with jax.numpy_dtype_promotion("standard"):  # JAX's own attention relies on it
        assert_equal(read(entry), read(attend), *qkv, atol=5e-5, all_uses=case in ("documents", "one token"))
