"""Every entry of every table equals its definition in `Ops()`: value, gradient, vmap, bfloat16, and on a mesh."""

from __future__ import annotations

import functools
from collections.abc import Callable
from typing import Any

import jax
import jax.numpy as jnp
import numpy as np
import pytest
from helpers import small

from jaxgpt.config import MeshConfig
from jaxgpt.kernels import CPU, PLAIN, KernelAttention
from jaxgpt.kernels.flash import cudnn_attention, splash_attention
from jaxgpt.ops import Ops
from jaxgpt.ops.attention import Positions, Visible, document_positions, row_positions
from jaxgpt.ops.rotary import Llama3Scaling, rope_frequencies
from jaxgpt.parallel import make_mesh, use_mesh

DEFINITIONS = Ops()
TABLES = {
    "cpu": CPU,
    "plain": PLAIN,
    "splash": Ops(attend=KernelAttention(functools.partial(splash_attention, interpret=True))),
    "cudnn": Ops(attend=KernelAttention(functools.partial(cudnn_attention, implementation="xla"), documents=False)),
}


def random(seed: int, *shapes: tuple[int, ...]) -> tuple[jax.Array, ...]:
    rng = np.random.default_rng(seed)
    return tuple(jnp.asarray(rng.normal(size=shape), jnp.float32) for shape in shapes)


def attention(T: int, K: int, visible: Visible, S: int = 0, edit: Any = None) -> tuple[Callable[..., Any], Any]:
    """Return a call of `attend` with 4 heads of width 8."""
    S = S or T
    read_BT11 = (visible.query.position_BT >= 0)[..., None, None]  # what padding attends to is not defined

    def call(f: Callable[..., jax.Array], dtype: Any, *qkv: jax.Array) -> jax.Array:
        return jnp.where(read_BT11, f(*(x.astype(dtype) for x in qkv), visible, 0.3, edit), jnp.zeros((), dtype))

    return call, random(T, (2, T, 4, 8), (2, K, S, 8), (2, K, 8, S))


def linear(inputs: int, outputs: int, bias: bool) -> tuple[Callable[..., Any], Any]:
    arrays = random(inputs, (4, 6, inputs), (inputs, outputs), *([(outputs,)] if bias else []))
    return lambda f, dtype, x, w, b=None: f(x.astype(dtype), w, b, dtype), arrays


def norm(kind: str, scale: bool, bias: bool) -> tuple[Callable[..., Any], Any]:
    arrays = random(5, (4, 64, 16), *([(16,)] * (scale + bias)))
    return lambda f, dtype, x, *weights: f(kind, x.astype(dtype), 1e-5, *weights), arrays


def padded(*starts: int, T: int) -> Positions:
    """Return the positions of left-padded rows, in which padding is a document of its own."""
    position_BT = jnp.maximum(jnp.arange(T)[None] - jnp.array(starts)[:, None], -1)
    return Positions(position_BT, (position_BT >= 0).astype(jnp.int32))


def documents(T: int, *cuts: tuple[int, ...]) -> Positions:
    return document_positions(jnp.stack([jnp.isin(jnp.arange(T), jnp.array(row)).cumsum() for row in cuts]))


CACHE = Positions(jnp.array([[-1, -1, 0, 1, 2, 3, 4, -1], [0, 1, 2, 3, 4, 5, 6, -1]]))  # left padding, an empty slot
ONE, THREE = (Positions(CACHE.position_BT[:, t:7]) for t in (6, 4))
IDS = jnp.arange(24).reshape(4, 6) % 11

# By entry and case: a call (function, dtype, *arrays) -> result, and its arrays, all of which are differentiated.
CASES: dict[str, dict[str, tuple[Callable[..., Any], Any]]] = {
    "linear": {
        "wide": linear(16, 32, bias=True),
        "narrow": linear(48, 2, bias=False),  # the output is smaller to transpose
    },
    "norm": {
        "layernorm": norm("layernorm", scale=True, bias=True),
        "rmsnorm": norm("rmsnorm", scale=True, bias=False),
        "stdnorm": norm("stdnorm", scale=False, bias=False),
    },
    "activate": {
        name: (lambda f, dtype, x, name=name: f(name, 3 * x.astype(dtype)), random(3, (4, 6, 16)))
        for name in ("gelu", "gelu_new", "silu", "relu", "relu2")
    },
    "rotation": {
        "": (
            lambda f, _, x: f(jnp.round(100 * jnp.abs(x)), rope_frequencies(8, 1e4, Llama3Scaling())),
            random(4, (4, 6)),
        )
    },
    "attend": {
        "short": attention(12, 1, Visible(row_positions(12), None, 5)),
        "whole": attention(130, 2, Visible(row_positions(130))),
        "window": attention(130, 1, Visible(row_positions(130), None, 3)),
        "wide window": attention(390, 4, Visible(row_positions(390), None, 100)),
        "documents": attention(130, 2, Visible(documents(130, (65, 66), (3, 103)), None, 30)),
        "left padding": attention(130, 2, Visible(padded(0, 70, T=130))),
        "one token": attention(1, 2, Visible(ONE, CACHE), 8),
        "one token, window": attention(1, 1, Visible(ONE, CACHE, 3), 8),
        "several tokens": attention(3, 2, Visible(THREE, CACHE), 8),
        "edit": attention(130, 2, Visible(row_positions(130)), edit=lambda _, x: jnp.sin(x)),
    },
    "log_likelihood": {"": (lambda f, _, logits: f(3 * logits, IDS), random(6, (4, 6, 11)))},
    "squared_norm": {
        str(shape): (lambda f, dtype, x: f(x.astype(dtype)), random(7, shape))
        for shape in ((), (1,), (65,), (3, 4096), (2, 31, 64))
    },
}


def entries(default: set[str]) -> Any:
    """Parametrize with every entry of every table; cases of `attend` that are not in `default` take long."""

    def marks(table: str, entry: str, case: str) -> Any:
        short = entry != "attend" or (case == "window" if table == "splash" else case in default)
        return () if short else pytest.mark.long

    return pytest.mark.parametrize(
        ("table", "entry", "case"),
        [
            pytest.param(table, entry, case, id=f"{table}-{entry}-{case}", marks=marks(table, entry, case))
            for table, ops in TABLES.items()
            for entry, cases in CASES.items()
            for case in cases
            if getattr(ops, entry) is not getattr(DEFINITIONS, entry)
        ],
    )


all_entries, some_entries = entries({*CASES["attend"]} - {"whole"}), entries({"window", "one token", "edit"})


def value_and_gradient(function: Any, call: Callable[..., Any], dtype: Any, *arrays: jax.Array) -> Any:
    """Return the result and the gradient of a weighted sum of it."""
    result, backward = jax.vjp(lambda *arrays: call(function, dtype, *arrays), *arrays)
    weights = jax.tree.map(lambda y: jnp.cos(jnp.arange(y.size)).reshape(y.shape).astype(y.dtype), result)
    return result, backward(weights)


@functools.cache
def expected(entry: str, case: str, dtype: Any = jnp.float32) -> Any:
    call, arrays = CASES[entry][case]
    return jax.jit(lambda *arrays: value_and_gradient(getattr(DEFINITIONS, entry), call, dtype, *arrays))(*arrays)


def assert_same(found: Any, expected: Any, atol: float = 2e-5, rtol: float = 1e-5) -> None:
    def check(a: jax.Array, b: jax.Array) -> None:
        assert a.dtype == b.dtype
        a, b = (np.asarray(x, np.float64) for x in (a, b))
        np.testing.assert_allclose(a, b, rtol=rtol, atol=atol * max(1.0, np.abs(b).max(initial=0)))

    jax.tree.map(check, found, expected)


def test_every_entry_has_cases() -> None:
    for ops in TABLES.values():
        changed = {name for name in Ops._fields if getattr(ops, name) is not getattr(DEFINITIONS, name)}
        assert changed <= {*CASES, "over_devices"}  # for the latter, test_devices.py


@all_entries
def test_value_and_gradient(table: str, entry: str, case: str) -> None:
    call, arrays = CASES[entry][case]
    function = getattr(TABLES[table], entry)
    found = jax.jit(lambda *arrays: value_and_gradient(function, call, jnp.float32, *arrays))(*arrays)
    assert_same(found, expected(entry, case))


@some_entries
def test_vmap(table: str, entry: str, case: str) -> None:
    """The rows of a batch are those that the definition computes alone."""
    call, arrays = CASES[entry][case]
    function = getattr(TABLES[table], entry)
    both = jax.vmap(lambda *arrays: value_and_gradient(function, call, jnp.float32, *arrays))
    batch = [jnp.stack([x, x[::-1] if x.ndim else -x]) for x in arrays]
    found = jax.jit(both)(*batch)
    assert_same(jax.tree.map(lambda x: x[0], found), expected(entry, case))
    alone = functools.partial(value_and_gradient, getattr(DEFINITIONS, entry), call, jnp.float32)
    assert_same(jax.tree.map(lambda x: x[1], found), jax.jit(alone)(*(x[1] for x in batch)))


@some_entries
def test_bfloat16(table: str, entry: str, case: str) -> None:
    """The dtypes of the definition; and the values of float32 to the resolution of the inputs."""
    call, arrays = CASES[entry][case]
    arrays = [x.astype(jnp.bfloat16).astype(jnp.float32) for x in arrays]
    function = getattr(TABLES[table], entry)
    with jax.numpy_dtype_promotion("standard" if table == "cudnn" else "strict"):  # JAX's own function relies on it
        found = jax.jit(lambda *arrays: value_and_gradient(function, call, jnp.bfloat16, *arrays))(*arrays)
    same = jax.tree.map(lambda a, b: a.dtype == b.dtype, found, expected(entry, case, jnp.bfloat16))
    assert all(jax.tree.leaves(same))
    exact = functools.partial(value_and_gradient, getattr(DEFINITIONS, entry), call, jnp.float32)
    wide = jax.jit(exact)(*arrays)
    assert_same(jax.tree.map(lambda x: x.astype(jnp.float32), found), wide, atol=0.05, rtol=0.05)


@some_entries
def test_mesh(table: str, entry: str, case: str) -> None:
    """With rows on two devices, and heads or outputs on two."""
    call, arrays = CASES[entry][case]
    heads = arrays[1].shape[1] if entry == "attend" else 2
    config = small("gpt2", n_head=4, n_kv_head=heads)
    function = getattr(TABLES[table], entry)

    def on_mesh(*arrays: jax.Array) -> Any:
        if entry == "linear":  # the weight is divided by outputs
            arrays = (arrays[0], jax.lax.with_sharding_constraint(arrays[1], jax.P(None, "tensor")), *arrays[2:])
        if arrays[0].ndim > 1 and arrays[0].shape[0] % 2 == 0:
            arrays = (jax.lax.with_sharding_constraint(arrays[0], jax.P("data")), *arrays[1:])
        return value_and_gradient(function, call, jnp.float32, *arrays)

    with use_mesh(make_mesh(MeshConfig(data=2, fsdp=1, tensor=2)), config):
        found = jax.jit(on_mesh)(*arrays)
    assert_same(found, expected(entry, case))
