"""Attention kernels that never store T x T scores equal `attend` with `causal_mask`, forward and backward."""

from __future__ import annotations

import functools
import re
from collections.abc import Callable

import flax.linen as nn
import jax
import jax.numpy as jnp
import numpy as np
import pytest
from helpers import make, random_ids, small
from hypothesis import given
from hypothesis import strategies as st

from jaxgpt.config import MeshConfig
from jaxgpt.model import GPT
from jaxgpt.model.scan import REMAT
from jaxgpt.ops.attention import AttentionKernel, attend, causal_mask
from jaxgpt.ops.flash import cudnn_attention, splash_attention
from jaxgpt.ops.tiled import tiled_attention, tiles
from jaxgpt.parallel import make_mesh, use_mesh
from jaxgpt.parallel.mesh import Rules, change_rules

splash = functools.partial(splash_attention, interpret=True)
# cuDNN needs a GPU; its wrapper also runs with XLA.
fused = functools.partial(cudnn_attention, implementation="xla")


def reference(q: jax.Array, k: jax.Array, v: jax.Array, scale: float, window: int) -> jax.Array:
    T = jnp.arange(q.shape[1])
    return attend(q, k, v, causal_mask(T, T, jnp.zeros(1, jnp.int32), window), scale)[0]


def inputs(T: int, N: int, K: int, B: int = 2, H: int = 8) -> tuple[jax.Array, ...]:
    keys = jax.random.split(jax.random.key(0), 4)
    heads = (N, K, K, N)
    return tuple(jax.random.normal(key, (B, T, n, H)) for key, n in zip(keys, heads, strict=True))


@functools.partial(jax.jit, static_argnums=(0, 1))
def forward_and_backward(kernel: AttentionKernel, window: int, q, k, v, dy):  # type: ignore[no-untyped-def]
    out, backward = jax.vjp(lambda q, k, v: kernel(q, k, v, 0.3, window), q, k, v)
    return out, *backward(dy)


def assert_same(found: tuple[jax.Array, ...], expected: tuple[jax.Array, ...]) -> None:
    for a, b in zip(found, expected, strict=True):
        np.testing.assert_allclose(a, b, atol=2e-5, rtol=1e-5)


@pytest.mark.parametrize(
    ("kernel", "T", "K", "window"),
    [
        pytest.param(fused, 12, 2, 0, marks=pytest.mark.long),
        (fused, 12, 1, 5),
        pytest.param(splash, 100, 2, 0, marks=pytest.mark.long),  # neither a whole number of tiles
        (splash, 130, 1, 3),
        (tiled_attention, 1, 2, 0),
        pytest.param(tiled_attention, 130, 2, 0, marks=pytest.mark.long),  # tiles of 65
        pytest.param(tiled_attention, 130, 1, 70, marks=pytest.mark.long),
        (tiled_attention, 390, 4, 100),  # three tiles; a query attends to two
    ],
)
def test_kernels_equal_attend(kernel: Callable[..., jax.Array], T: int, K: int, window: int) -> None:
    """Including grouped heads and windows."""
    args = inputs(T, 4, K)
    assert_same(forward_and_backward(kernel, window, *args), forward_and_backward(reference, window, *args))


@given(T=st.integers(1, 5000), window=st.integers(0, 5000))
def test_tiles_cover_the_mask(T: int, window: int) -> None:
    """Tiles partition the sequence, and the tiles of a query and of a key it attends to include each other."""
    spans = tiles(T, window)
    assert [a for a, *_ in spans] == [0, *(e for _, e, *_ in spans[:-1])]
    assert spans[-1][1] == T
    for a, e, first, end in spans:
        assert first <= max(0, a - (window or T) + 1)  # of the tile's first query
        assert end >= min(T, e - 1 + (window or T))  # of its last key


def test_tiled_attention_never_stores_t_x_t_scores() -> None:
    scores = re.compile(r"\[(\d+,)*256,256\]")
    args = inputs(256, 4, 4)
    held = {
        kernel: bool(scores.search(forward_and_backward.lower(kernel, 0, *args).compile().as_text()))
        for kernel in (tiled_attention, reference)
    }
    assert held == {tiled_attention: False, reference: True}


@pytest.mark.parametrize("K", [1, pytest.param(4, marks=pytest.mark.long)])
def test_tiles_in_bfloat16(K: int) -> None:
    """Scores, softmax and sums are float32, also with grouped heads."""
    args = [x.astype(jnp.bfloat16) for x in inputs(130, 4, K)]
    text = str(jax.make_jaxpr(forward_and_backward, static_argnums=(0, 1))(tiled_attention, 0, *args))
    types = re.findall(r"\w+:(\w+)\[[\d,]*\] = (?:exp|log|reduce_sum|reduce_max|div)\b", text)
    assert len(types) > 10
    assert set(types) == {"f32"}
    found = forward_and_backward(tiled_attention, 0, *args)
    for a, b in zip(found, forward_and_backward(reference, 0, *(x.astype(jnp.float32) for x in args)), strict=True):
        assert a.dtype == jnp.bfloat16
        np.testing.assert_allclose(a.astype(jnp.float32), b, atol=0.05, rtol=0.05)


def test_scores_in_bfloat16_are_not_rounded() -> None:
    """The weights of `attend` are those of float32 with the same inputs."""
    q, k, v, _ = (4 * x.astype(jnp.bfloat16) for x in inputs(16, 2, 2, H=32))
    mask = causal_mask(jnp.arange(16), jnp.arange(16), jnp.zeros(1, jnp.int32))
    rough, exact = (
        jax.jit(attend, static_argnums=4)(q.astype(dtype), k.astype(dtype), v.astype(dtype), mask, 0.18)[1]
        for dtype in (jnp.bfloat16, jnp.float32)
    )
    np.testing.assert_allclose(rough, exact, atol=1e-5)


@pytest.mark.parametrize(("remat", "loops"), [("dots", 2), ("full", 3)])
def test_remat_dots_saves_tiled_attention(remat: str, loops: int) -> None:
    """Its results are saved under the name that the `dots` policy saves, so they are not recomputed."""

    @functools.partial(jax.checkpoint, policy=REMAT[remat])
    def block(q: jax.Array, k: jax.Array, v: jax.Array) -> jax.Array:
        return jnp.tanh(tiled_attention(q, k, v, 0.3, 0)).sum()

    assert str(jax.make_jaxpr(jax.grad(block))(*inputs(130, 4, 4)[:3])).count("scan[") == loops


@pytest.mark.parametrize("remat", ["dots", "offload"])
def test_remat_dots_saves_cudnn_attention(remat: str) -> None:
    """JAX has no public name for it: this fails if the primitive is renamed."""
    from jax._src.cudnn.fused_attention_stablehlo import _dot_product_attention_fwd_p_wrapper as forward

    assert REMAT[remat](forward) is True


@pytest.mark.parametrize(
    ("K", "kernel", "rules"),
    [
        (1, splash, {}),
        (1, fused, {}),
        (4, tiled_attention, {"length": ("tensor",)}),
        (4, tiled_attention, {"heads": (), "kv_heads": (), "head_dim": ("tensor",)}),
        pytest.param(4, tiled_attention, {}, marks=pytest.mark.long),
        pytest.param(4, splash, {}, marks=pytest.mark.long),
        pytest.param(1, tiled_attention, {}, marks=pytest.mark.long),
        pytest.param(4, splash, {"length": ("tensor",)}, marks=pytest.mark.long),
        pytest.param(4, fused, {"length": ("tensor",)}, marks=pytest.mark.long),
    ],
)
def test_a_kernel_on_a_mesh(K: int, kernel: AttentionKernel, rules: Rules) -> None:
    """Each device computes its rows and heads over whole sequences, also with fewer key heads than devices."""
    config = small("gpt2", n_head=4, n_kv_head=K, block_size=40)
    mesh = make_mesh(MeshConfig(data=2, fsdp=1, tensor=2))
    args = inputs(40, 4, K)
    # A function of its own: JAX's cache of traces does not depend on the rules.
    call = jax.jit(lambda *args: forward_and_backward.__wrapped__(kernel, 0, *args))
    with use_mesh(mesh, config, change_rules(rules)):
        found = call(*args)
        placed = nn.spmd.logical_to_mesh_axes(("batch", None, "heads", None))
    if not rules:  # XLA may place the result of others elsewhere
        assert found[0].sharding.is_equivalent_to(jax.sharding.NamedSharding(mesh, placed), 4)
    assert_same(found, forward_and_backward(reference, 0, *args))


@pytest.mark.parametrize(
    ("name", "kernel"),
    [("scaled", fused), pytest.param("modern", fused, marks=pytest.mark.long), ("modern", tiled_attention)],
)
def test_a_model_computes_the_same_with_a_kernel(name: str, kernel: AttentionKernel) -> None:
    config = small(name)
    model, params = make(config)
    tokens = random_ids(config, (2, 9))
    found, expected = (jax.jit(m.apply)({"params": params}, tokens) for m in (GPT(config, kernel=kernel), model))
    np.testing.assert_allclose(found, expected, atol=1e-5, rtol=1e-5)


@pytest.mark.skipif(not any(d.platform == "gpu" for d in jax.devices()), reason="needs a GPU: JAX_PLATFORMS=cuda")
@pytest.mark.parametrize(("K", "window"), [(4, 0), (2, 0), (4, 5)])
def test_cudnn_on_a_gpu(K: int, window: int) -> None:
    args = [x.astype(jnp.bfloat16) for x in inputs(64, 4, K, H=64)]
    found = forward_and_backward(cudnn_attention, window, *args)
    expected = forward_and_backward(reference, window, *(x.astype(jnp.float32) for x in args))
    for a, b in zip(found, expected, strict=True):
        np.testing.assert_allclose(a.astype(jnp.float32), b, atol=0.05, rtol=0.05)
