"""Every entry of every table equals its definition in `Ops()`: value, gradient, vmap, bfloat16, and on a mesh."""

from __future__ import annotations

import functools
from typing import Any

import jax
import jax.numpy as jnp
import numpy as np
import pytest

from jaxgpt.kernels import CPU, PLAIN, KernelAttention
from jaxgpt.kernels.check import differences
from jaxgpt.kernels.flash import cudnn_attention, splash_attention
from jaxgpt.ops import Ops
from jaxgpt.ops.attention import Positions, Visible, attend, document_positions, row_positions

SPLASH = KernelAttention(functools.partial(splash_attention, interpret=True))
CUDNN = KernelAttention(functools.partial(cudnn_attention, implementation="xla"), documents=False)  # cuDNN needs a GPU
long = pytest.mark.long


@pytest.mark.parametrize(
    ("name", "entry"),
    [
        ("linear", CPU.linear),
        ("activate", PLAIN.activate),
        ("rotation", CPU.rotation),
        ("attend", CPU.attend),
        pytest.param("attend", SPLASH, marks=long),
        pytest.param("attend", CUDNN, marks=long),
    ],
)
def test_an_entry_equals_its_definition(name: str, entry: Any) -> None:
    with jax.numpy_dtype_promotion("standard"):  # JAX's own attention relies on it
        found = differences(name, entry)
    of_numbers = set() if name == "rotation" else {"gradient", "vmap", "bfloat16"}  # positions are integers
    assert set(found) == {"value", "mesh"} | of_numbers
    assert found.pop("bfloat16", 0.0) < 0.02
    assert max(found.values()) < 1e-5


def test_every_entry_is_listed_above() -> None:
    changed = {name for name in Ops._fields for ops in (CPU, PLAIN) if getattr(ops, name) is not getattr(Ops(), name)}
    assert changed == {"linear", "activate", "rotation", "attend"}


def padded(*starts: int, T: int) -> Positions:
    """Return the positions of left-padded rows; padding is a separate document."""
    position_BT = jnp.maximum(jnp.arange(T)[None] - jnp.array(starts)[:, None], -1)
    return Positions(position_BT, (position_BT >= 0).astype(jnp.int32))


def documents(T: int, *cuts: tuple[int, ...]) -> Positions:
    return document_positions(jnp.stack([jnp.isin(jnp.arange(T), jnp.array(row)).cumsum() for row in cuts]))


CACHE = Positions(jnp.array([[-1, -1, 0, 1, 2, 3, 4, -1], [0, 1, 2, 3, 4, 5, 6, -1]]))  # left padding, an empty slot
ONE, THREE = (Positions(CACHE.position_BT[:, t:7]) for t in (6, 4))
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
@pytest.mark.parametrize("entry", [CPU.attend, pytest.param(SPLASH, marks=long), pytest.param(CUDNN, marks=long)])
def test_attention(entry: Any, case: str) -> None:
    """Values and gradients, including cached tokens and padding. The output at padding is undefined."""
    K, visible = SEEN.get(case, SEEN["window"])
    edit = (lambda _, x: jnp.sin(x)) if case == "edit" else None
    T, S = (x.position_BT.shape[1] for x in (visible.query, visible.key or visible.query))
    read_BT11 = (visible.query.position_BT >= 0)[..., None, None]
    rng = np.random.default_rng(0)
    qkv = [jnp.asarray(rng.normal(size=shape), jnp.float32) for shape in ((2, T, 4, 8), (2, K, S, 8), (2, K, 8, S))]

    def value_and_gradient(function: Any) -> Any:
        out, backward = jax.vjp(lambda *qkv: jnp.where(read_BT11, function(*qkv, visible, 0.3, edit), 0.0), *qkv)
        return out, backward(jnp.cos(jnp.arange(out.size)).reshape(out.shape))

    found, expected = (jax.jit(functools.partial(value_and_gradient, f))() for f in (entry, attend))
    jax.tree.map(functools.partial(np.testing.assert_allclose, rtol=1e-5, atol=5e-5), found, expected)
