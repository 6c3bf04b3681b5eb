"""Gathered and ring attention equal the definition, for any order of the tokens, and store no T x T scores."""

from __future__ import annotations

import functools
import math
import re
from collections.abc import Iterator
from typing import Any

import jax
import jax.numpy as jnp
import numpy as np
import pytest
from helpers import small
from hypothesis import given
from hypothesis import strategies as st

from jaxgpt.config import MeshConfig
from jaxgpt.kernels import halo, online
from jaxgpt.kernels.flash import LANES
from jaxgpt.kernels.halo import balanced_order, halo_size
from jaxgpt.kernels.remat import POLICIES
from jaxgpt.kernels.sharded import MixedAttention, gathered_attention, halo_attention, ring_attention
from jaxgpt.ops.attention import Positions, Visible, attend, document_positions, padded_positions, row_positions
from jaxgpt.parallel.mesh import make_mesh
from jaxgpt.parallel.rules import Rules, change_rules, use_mesh

B, N, K, H = 2, 4, 2, 4
KERNELS = pytest.mark.parametrize("kernel", [gathered_attention, ring_attention])
long = pytest.mark.long


def arrays(T: int) -> list[jax.Array]:
    rng = np.random.default_rng(0)
    return [jnp.asarray(rng.normal(size=shape), jnp.float32) for shape in ((B, T, N, H), (B, K, T, H), (B, K, H, T))]


def documents(T: int) -> Positions:
    """Return the positions of rows of several documents; the last document is padding."""
    rng = np.random.default_rng(1)
    ids_BT = np.sort(rng.integers(0, 4, (B, T)), axis=1)
    return document_positions(jnp.asarray(np.where(ids_BT == 3, -1, ids_BT), jnp.int32))


def forward_and_backward(kernel: Any, place: Positions, window: int, order: np.ndarray, *qkv: jax.Array) -> Any:
    """Return the output and the gradients of q, k and v, computed in another order of the tokens."""
    place = jax.tree.map(lambda x_BT: x_BT[:, order], place)

    def value(q: jax.Array, k: jax.Array, v: jax.Array) -> jax.Array:
        out = kernel(q[:, order], k[:, :, order], v[..., order], Visible(place, None, window), 0.3)
        return out[:, np.argsort(order)]

    out, backward = jax.vjp(value, *qkv)
    # The outputs of padding on the left are not defined.
    is_token_BT11 = (place.position_BT >= 0)[:, np.argsort(order), None, None]
    return jnp.where(is_token_BT11, out, 0), *backward(jnp.where(is_token_BT11, jnp.sin(out), 0))


def assert_close(found: Any, expected: Any) -> None:
    for a, b in zip(found, expected, strict=True):
        np.testing.assert_allclose(a, b, atol=1e-5, rtol=1e-5)


@KERNELS
@pytest.mark.parametrize(
    ("sizes", "window", "with_documents", "rules"),
    [
        pytest.param({"fsdp": 2, "context": 2, "tensor": 2}, 5, True, {}, marks=pytest.mark.ci),
        pytest.param({"context": 8}, 0, False, {}, marks=long),
        pytest.param({"context": 4}, 5, True, {}, marks=long),
        pytest.param({"context": 2, "tensor": 4}, 0, True, {}, marks=long),  # fewer key heads than devices
        pytest.param({"context": 2, "tensor": 2}, 0, True, {"length": ("context", "tensor")}, marks=long),
        pytest.param({"context": 2, "tensor": 2}, 0, True, {"length": ()}, marks=long),
    ],
    ids=str,
)
@pytest.mark.parametrize("balanced", [True, pytest.param(False, marks=long)])
def test_a_kernel_equals_the_definition_on_a_mesh(
    kernel: Any, sizes: dict[str, int], window: int, with_documents: bool, rules: Rules, balanced: bool
) -> None:
    T = 32
    place = documents(T) if with_documents else row_positions(T)
    order = balanced_order(T, sizes["context"]) if balanced else np.arange(T)
    expected = jax.jit(lambda *qkv: forward_and_backward(attend, place, window, np.arange(T), *qkv))(*arrays(T))
    config = small("gpt2", block_size=T, n_kv_head=K)
    call = jax.jit(lambda *qkv: forward_and_backward(kernel, place, window, order, *qkv))
    with use_mesh(make_mesh(MeshConfig(**{"data": 1, **sizes})), config, change_rules(rules), length=T):
        found = call(*arrays(T))
    assert_close(found, expected)


@pytest.mark.parametrize(
    ("sizes", "window", "with_documents", "lanes"),
    [
        pytest.param({"context": 4}, 5, True, 1),
        pytest.param({"fsdp": 2, "context": 2, "tensor": 2}, 6, True, 2, marks=pytest.mark.ci),
        pytest.param({"context": 4}, 9, False, 128, marks=long),  # the window has all tokens of the previous device
        pytest.param({"context": 4}, 10, True, 1, marks=long),  # and one more: all keys are gathered
        pytest.param({"context": 4}, 0, True, 1, marks=long),
    ],
    ids=str,
)
def test_a_halo_is_enough_for_a_window(
    sizes: dict[str, int], window: int, with_documents: bool, lanes: int, monkeypatch: pytest.MonkeyPatch
) -> None:
    """With tokens in their order, a device needs only the keys of the previous device."""
    monkeypatch.setattr(halo, "LANES", lanes)
    T = 32
    place = documents(T) if with_documents else row_positions(T)
    order = np.arange(T)
    expected = jax.jit(lambda *qkv: forward_and_backward(attend, place, window, order, *qkv))(*arrays(T))
    call = jax.jit(lambda *qkv: forward_and_backward(halo_attention, place, window, order, *qkv))
    with use_mesh(make_mesh(MeshConfig(**{"data": 1, **sizes})), small("gpt2", block_size=T, n_kv_head=K), length=T):
        found = call(*arrays(T))
        text = str(jax.make_jaxpr(call)(*arrays(T)))
    assert_close(found, expected)
    has_halo = halo_size(window, T // sizes["context"]) > 0
    assert ("all_gather" in text) is not has_halo


@pytest.mark.parametrize(
    ("sizes", "window", "with_documents", "rules"),
    [
        pytest.param({"context": 4}, 4, True, {}, marks=pytest.mark.ci),
        pytest.param({"fsdp": 2, "context": 2, "tensor": 2}, 5, False, {}, marks=long),
        pytest.param({"context": 4}, 5, True, {}, marks=long),  # the window has all tokens of the previous chunk
        pytest.param({"context": 4}, 6, True, {}, marks=long),  # and one more: all keys are gathered
        pytest.param({"context": 2, "tensor": 2}, 3, True, {"length": ("context", "tensor")}, marks=long),
    ],
    ids=str,
)
def test_layers_with_a_window_receive_a_halo_of_each_chunk(
    sizes: dict[str, int], window: int, with_documents: bool, rules: Rules, monkeypatch: pytest.MonkeyPatch
) -> None:
    """In balanced order, a device needs only the keys before its two chunks."""
    monkeypatch.setattr(halo, "LANES", 1)
    T = 32
    context = sizes["context"]
    place = documents(T) if with_documents else row_positions(T)
    expected = jax.jit(lambda *qkv: forward_and_backward(attend, place, window, np.arange(T), *qkv))(*arrays(T))
    kernel = MixedAttention(gathered_attention, context)
    call = jax.jit(lambda *qkv: forward_and_backward(kernel, place, window, balanced_order(T, context), *qkv))
    config = small("gpt2", block_size=T, n_kv_head=K)
    with use_mesh(make_mesh(MeshConfig(**{"data": 1, **sizes})), config, change_rules(rules), length=T):
        found = call(*arrays(T))
        text = str(jax.make_jaxpr(call)(*arrays(T)))
    assert_close(found, expected)
    has_halo = halo_size(window, T // (2 * context)) > 0 and not rules
    assert ("all_gather" in text) is not has_halo


@given(st.integers(0, 5000), st.integers(1, 4096))
def test_a_halo_has_the_window_of_the_first_token(window: int, tokens: int) -> None:
    halo = halo_size(window, tokens)
    assert halo <= tokens
    if halo:
        assert window - 1 <= halo < window - 1 + LANES
    else:
        assert window <= 1 or window - 1 > tokens


@pytest.fixture
def small_tiles() -> Iterator[None]:
    with pytest.MonkeyPatch.context() as patch:
        patch.setattr(online, "TILE", 3)
        yield


@pytest.mark.parametrize(
    ("T", "window", "place"),
    [
        (11, 0, row_positions(11)),
        pytest.param(12, 4, documents(12), marks=long),
        pytest.param(7, 0, padded_positions(jnp.asarray([[-1, -1, 3, 3, 3, 3, 3], [3] * 7])), marks=long),
        pytest.param(1, 0, row_positions(1), marks=long),
    ],
    ids=["odd", "documents", "left padding", "one token"],
)
def test_any_number_of_tokens(T: int, window: int, place: Positions, small_tiles: None) -> None:
    """Tiles that do not divide the tokens are padded; without a mesh, one device computes the row, in any order."""
    order = np.random.default_rng(2).permutation(T)
    expected = jax.jit(lambda *qkv: forward_and_backward(attend, place, window, np.arange(T), *qkv))(*arrays(T))
    found = jax.jit(lambda *qkv: forward_and_backward(ring_attention, place, window, order, *qkv))(*arrays(T))
    assert_close(found, expected)


@KERNELS
def test_bfloat16(kernel: Any) -> None:
    T = 16
    qkv = [x.astype(jnp.bfloat16) for x in arrays(T)]
    found, expected = (
        jax.jit(lambda *qkv, each=each: forward_and_backward(each, row_positions(T), 0, np.arange(T), *qkv))(*qkv)
        for each in (kernel, attend)
    )
    for a, b in zip(found, expected, strict=True):
        assert a.dtype == b.dtype == jnp.bfloat16
        np.testing.assert_allclose(np.asarray(a, np.float32), np.asarray(b, np.float32), atol=5e-2, rtol=5e-2)


@KERNELS
def test_calls_with_a_cache_or_an_edit_use_the_definition(kernel: Any) -> None:
    T = 8
    seen = []

    def edit(name: str, x: jax.Array) -> jax.Array:
        seen.append(name)
        return x

    q, k, v = arrays(T)
    place = row_positions(T)
    np.testing.assert_array_equal(kernel(q, k, v, Visible(place), 0.3, edit), attend(q, k, v, Visible(place), 0.3))
    assert seen == ["scores", "pattern"]
    last = Visible(Positions(place.position_BT[:, -1:]), place)
    np.testing.assert_array_equal(kernel(q[:, -1:], k, v, last, 0.3), attend(q[:, -1:], k, v, last, 0.3))


def sizes_of(jaxpr: Any) -> Iterator[int]:
    """Yield the number of elements of each array in a jaxpr and in the jaxprs that it calls."""
    for eqn in jaxpr.eqns:
        for var in eqn.outvars:
            yield getattr(var.aval, "size", 0)
        for value in jax.tree.leaves(list(eqn.params.values()), is_leaf=lambda x: hasattr(x, "eqns")):
            inner = getattr(value, "jaxpr", value)
            if hasattr(inner, "eqns"):
                yield from sizes_of(inner)


def test_no_array_has_t_x_t_elements() -> None:
    T = 4096
    shapes = [jax.ShapeDtypeStruct(shape, jnp.float32) for shape in ((1, T, 1, 4), (1, 1, T, 4), (1, 1, 4, T))]

    def loss(*qkv: jax.Array) -> jax.Array:
        return gathered_attention(*qkv, Visible(row_positions(T)), 0.3).sum()

    jaxpr = jax.make_jaxpr(jax.grad(loss, argnums=(0, 1, 2)))(*shapes)
    assert max(sizes_of(jaxpr.jaxpr)) <= online.TILE**2


@KERNELS
@pytest.mark.parametrize(("remat", "forward"), [("dots", 1), ("full", 2)])
def test_dots_saves_the_results(kernel: Any, remat: str, forward: int) -> None:
    """With `dots`, the backward pass does not compute the outputs again; it gathers or moves the keys again."""

    @functools.partial(jax.checkpoint, policy=POLICIES[remat])
    def block(q: jax.Array, k: jax.Array, v: jax.Array) -> jax.Array:
        return jnp.tanh(kernel(q, k, v, Visible(row_positions(8)), 0.3)).sum()

    config = small("gpt2", block_size=8, n_kv_head=K)
    with use_mesh(make_mesh(MeshConfig(data=1, context=2)), config, length=8):
        text = str(jax.make_jaxpr(jax.grad(block))(*arrays(8)))
    # Only the forward pass computes a maximum of scores; ring attention has it in and after its loop.
    maxima = text.count("reduce_max[")
    assert maxima == forward * (2 if kernel is ring_attention else 1)


@given(st.integers(1, 8), st.integers(1, 5))
def test_the_balanced_order_divides_attention_equally(devices: int, size: int) -> None:
    """Each device has the same number of pairs of a query and a visible key."""
    T = 2 * devices * size
    order = balanced_order(T, devices)
    assert sorted(order.tolist()) == list(range(T))
    pairs_by_device = (order.reshape(devices, -1) + 1).sum(1)
    assert len(set(pairs_by_device.tolist())) == 1


@given(st.integers(1, 5000), st.integers(1, 64))
def test_the_size_of_a_tile_is_limited(tokens: int, rows: int) -> None:
    size = online.tile_size(tokens, rows, 4)
    assert 1 <= size <= min(online.TILE, (tokens + 1) // 2)
    assert rows * 4 * size**2 <= online.SCORES or size <= online.LEAST_LIMIT


@given(st.integers(8, 16), st.integers(0, 2), st.integers(1, 64))
def test_each_half_of_the_tokens_has_whole_tiles(twos: int, threes: int, rows: int) -> None:
    """Otherwise a tile would have early and late positions, and would be skipped less often."""
    tokens = 2**twos * 3**threes
    size = online.tile_size(tokens, rows, 4)
    assert tokens // 2 % size == 0
    assert size >= min(tokens // 2, online.LEAST_LIMIT)


@pytest.mark.parametrize("kernel", [gathered_attention, ring_attention])
def test_a_scan_over_layers_stores_nothing_for_pairs_of_tokens(kernel: Any) -> None:
    """JAX would compute the masks of all pairs of tiles once, and store them."""
    T, H = 64, 2
    config = small("llama", block_size=T, n_embd=N * H, head_dim=H)
    visible = Visible(row_positions(T))

    def loss(x_BTD: jax.Array, gain_L: jax.Array) -> jax.Array:
        def layer(x_BTD: jax.Array, gain: jax.Array) -> tuple[jax.Array, None]:
            q_BTNH = (gain * x_BTD).reshape(1, T, N, H)
            k_BNTH = q_BTNH.transpose(0, 2, 1, 3)
            out_BTNH = kernel(q_BTNH, k_BNTH, k_BNTH.mT, visible, 0.5, None)
            return out_BTNH.reshape(x_BTD.shape), None

        out_BTD, _ = jax.lax.scan(layer, x_BTD, gain_L)
        return out_BTD.sum()

    with use_mesh(make_mesh(MeshConfig(data=1, context=4)), config, rows=1, length=T):
        text = str(jax.make_jaxpr(jax.grad(loss))(jnp.ones((1, T, N * H)), jnp.ones(2)))
    sizes = [math.prod(map(int, shape.split(","))) for shape in re.findall(r"[a-z]\d*\[([\d,]+)\]", text)]
    assert max(sizes) < N * (T // 4) * T  # scores of a device
