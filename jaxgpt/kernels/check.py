"""Compare an operation with its definition: value, gradients, under `vmap`, in bfloat16 and on a mesh."""

from __future__ import annotations

from collections.abc import Callable, Iterator
from functools import partial
from typing import Any

import flax.linen as nn
import jax
import jax.numpy as jnp
import numpy as np
from jax.sharding import NamedSharding, PartitionSpec

from jaxgpt.ops import Ops
from jaxgpt.ops.attention import Positions, Visible, document_positions, row_positions

DEFINITIONS = Ops()
B, N, K, H = 4, 4, 2, 8  # rows, heads, key heads, head width
RULES = (("batch", "data"), ("heads", None), ("kv_heads", None))

Function = Callable[..., jax.Array]


def differences(name: str, entry: Callable[..., Any], tokens: int = 130) -> dict[str, float]:
    """Return the largest differences between an entry of `Ops` and its definition, relative to the largest number.

    Args:
        name: field of `Ops`, such as "attend".
        entry: the operation.
        tokens: length of the sequences.

    Returns:
        The differences of `value`, `gradient`, `vmap`, `bfloat16` and, with several devices, `mesh`. Sums in a different order
        differ by 1e-7 to 1e-5 in float32.
    """
    worst: dict[str, float] = {}
    for function, definition, arrays in _cases(name, entry, tokens):
        for check, (found, expected) in _compare(function, definition, arrays):
            worst[check] = max(worst.get(check, 0.0), _distance(found, expected))
    return worst


def _compare(
    function: Function, definition: Function, arrays: tuple[Any, ...]
) -> Iterator[tuple[str, tuple[Any, Any]]]:
    def both(change: Callable[[Function], Callable[..., Any]], *args: Any) -> tuple[Any, Any]:
        return jax.jit(change(function))(*args), jax.jit(change(definition))(*args)

    yield "value", both(lambda f: f, *arrays)
    trained = tuple(i for i, x in enumerate(arrays) if jnp.issubdtype(x.dtype, jnp.floating))
    if trained:
        yield "gradient", both(lambda f: jax.grad(_weighted(f), trained), *arrays)
        twice = jax.tree.map(lambda x: jnp.stack([x, x[::-1]]), arrays)
        yield "vmap", both(jax.vmap, *twice)
        rough = jax.tree.map(lambda x: x.astype(jnp.bfloat16) if x.dtype == jnp.float32 else x, arrays)
        yield "bfloat16", both(lambda f: f, *rough)
    devices = jax.devices()
    if (ways := min(len(devices), B)) > 1 and all(x.shape[0] == B for x in arrays[:1]):
        mesh = jax.make_mesh((ways,), ("data",), devices=devices[:ways])
        rows = NamedSharding(mesh, PartitionSpec("data"))
        shared = NamedSharding(mesh, PartitionSpec())
        placed = [jax.device_put(x, rows if x.shape[0] == B and x.ndim > 1 else shared) for x in arrays]
        with jax.set_mesh(mesh), nn.logical_axis_rules(RULES):
            found = jax.jit(lambda *args: function(*args))(*placed)  # a new function: traces do not depend on the mesh
        yield "mesh", (found, jax.jit(definition)(*arrays))


def _weighted(function: Function) -> Function:
    """Return the sum of a function's result, each element multiplied by a different number."""

    def total(*args: Any) -> jax.Array:
        return sum(
            (leaf * jnp.cos(jnp.arange(leaf.size)).reshape(leaf.shape)).sum()
            for leaf in jax.tree.leaves(function(*args))
        )

    return total


def _distance(found: Any, expected: Any) -> float:
    pairs = list(zip(jax.tree.leaves(found), jax.tree.leaves(expected), strict=True))
    if any(a.shape != b.shape or a.dtype != b.dtype or not jnp.isfinite(a).all() for a, b in pairs):
        return float("inf")
    arrays = [(np.asarray(a, np.float64), np.asarray(b, np.float64)) for a, b in pairs]
    return max(float(np.abs(a - b).max() / max(np.abs(b).max(), 1e-30)) for a, b in arrays)


def _cases(name: str, entry: Any, T: int) -> Iterator[tuple[Function, Function, tuple[Any, ...]]]:
    """Yield functions of arrays, with the entry and with its definition, and the arrays."""
    definition = getattr(DEFINITIONS, name)
    keys = iter(jax.random.split(jax.random.key(0), 32))
    draw: Callable[..., jax.Array] = lambda *shape: jax.random.normal(next(keys), shape)  # noqa: E731

    def pair(make: Callable[[Any], Function], *arrays: Any) -> tuple[Function, Function, tuple[Any, ...]]:
        return make(entry), make(definition), arrays

    match name:
        case "attend":
            q, k, v = draw(B, T, N, H), draw(B, K, T, H), draw(B, K, H, T)
            documents = document_positions(jnp.broadcast_to(jnp.arange(T) // 50, (B, T)))
            for window in (0, T // 3):
                yield pair(partial(_attend, window), q, k, v, *row_positions(T)[:1])
            yield pair(partial(_attend, 0), q, k, v, *documents)
        case "linear":
            yield pair(_linear, draw(B, T, 24), draw(24, 40), draw(40))
            yield pair(_linear, draw(B, T, 24), draw(24, 40))
        case "norm":
            for kind in ("layernorm", "rmsnorm", "stdnorm"):
                yield pair(partial(_norm, kind), draw(B, T, 24), draw(24), draw(24))
        case "activate":
            for kind in ("gelu", "gelu_new", "silu", "relu", "relu2"):
                yield pair(partial(_activate, kind), draw(B, T, 24))
        case "rotation":
            positions = jnp.broadcast_to(jnp.arange(T), (B, T))
            yield pair(lambda f: lambda positions: f(positions, np.array([1.0, 0.1, 0.01])), positions)


def _attend(window: int, f: Any) -> Function:
    return lambda q, k, v, *positions: f(q, k, v, Visible(Positions(*positions), window=window), 0.3, None)


def _linear(f: Any) -> Function:
    return lambda x, w, b=None: f(x, w, b, x.dtype)


def _activate(kind: str, f: Any) -> Function:
    return partial(f, kind)


def _norm(kind: str, f: Any) -> Function:
    return lambda x, scale, bias: f(kind, x, 1e-5, scale, bias, None)
