"""The bytes that the forward pass saves for the backward pass, by tracing."""

from __future__ import annotations

import math
from collections import Counter
from collections.abc import Collection, Iterable
from typing import Any

import jax
import jax.extend.core
import jax.numpy as jnp

from jaxgpt.ops.random import named_key
from jaxgpt.parallel.mesh import batch_ways, rules_for
from jaxgpt.trainer.layout import Layout
from jaxgpt.trainer.program import objective_of

ELEMENTWISE = frozenset(
    "abs add add_any and bitcast_convert_type broadcast_in_dim concatenate convert_element_type copy cos div empty2 eq erf "
    "exp exp2 ge gt integer_pow iota le log logistic lt max min mul ne neg not one_minus_square or platform_index polynomial "
    "pow reshape rsqrt select_n sign sin slice split sqrt square squeeze stop_gradient sub tanh transpose".split()
)


def residual_bytes(layout: Layout) -> float:
    """Estimate the bytes on one device of a microbatch's residuals in device memory, plus the gradient of the largest one."""
    config, model = layout.config, layout.config.model
    rows = layout.microbatches.rows
    key = named_key(0, "dropout") if model.dropout > 0 else None

    def residuals(params: Any, frozen: Any, windows: jax.Array) -> Any:
        return jax.vjp(lambda p: objective_of(layout, frozen)(p, windows, key).loss_B.sum(), params)[1]

    trees = (layout.abstract_state.params, layout.abstract_base)
    params, frozen = jax.tree.map(lambda s: jax.ShapeDtypeStruct(s.shape, s.dtype), trees)
    windows = jax.ShapeDtypeStruct((rows, *layout.batch().shape[1:]), jnp.int32)
    jaxpr = jax.make_jaxpr(residuals)(params, frozen, windows).jaxpr
    rules, sizes = rules_for(model, layout.mesh, layout.rules), [0.0]
    axes = [("heads", (model.n_head,)), ("heads", (model.kv_heads, model.n_head // model.kv_heads))]
    axes += [("kv_heads", (model.kv_heads,)), ("mlp", (model.mlp_width,)), ("vocab", (model.vocab_size,))]
    split = [lengths for name, lengths in axes if "tensor" in rules[name]]
    for aval, divided in _roots(jaxpr, jaxpr.outvars, split):
        if rows in aval.shape[:2] or rows * config.window in aval.shape[:2]:
            part = config.mesh.tensor if divided else 1
            sizes.append(math.prod(aval.shape) * aval.dtype.itemsize / batch_ways(layout.mesh) / part)
    return sum(sizes) + max(sizes)


def _roots(jaxpr: Any, results: Iterable[Any], split: Collection[tuple[int, ...]] = ()) -> list[tuple[Any, bool]]:
    """Return the shapes and dtypes of the arrays that must be stored for results of a jaxpr, its arguments excluded.

    A result of elementwise operations counts as their inputs: compilers recompute such operations where they are needed.
    Results in host memory are omitted.

    Args:
        jaxpr: the forward pass.
        results: some of its results.
        split: lengths of axes that the mesh divides, if an array has all of a tuple.

    Returns:
        The shape and dtype of each array, and whether it is divided, or leads to an array that is: `[B, T, N * H]`, reshaped to
        `[B, T, N, H]`.
    """
    made_by = {id(out): eqn for eqn in jaxpr.eqns for out in eqn.outvars}
    pending = [(var, False) for var in results]
    seen: set[tuple[int, bool]] = set()
    found: dict[int, tuple[Any, bool]] = {}
    while pending:
        var, divided = pending.pop()
        eqn = made_by.get(id(var))
        if (
            eqn is None
            or (id(var), divided) in seen
            or getattr(var.aval, "memory_space", None) == jax.memory.Space.Host
        ):
            continue
        seen.add((id(var), divided))
        shape = getattr(var.aval, "shape", ())[1:]
        divided = divided or any(Counter(lengths) <= Counter(shape) for lengths in split)
        if _elementwise(eqn, eqn.outvars.index(var)):
            pending += [(v, divided) for v in eqn.invars if not isinstance(v, jax.extend.core.Literal)]
        elif hasattr(var.aval, "dtype"):
            found[id(var)] = var.aval, divided or found.get(id(var), (None, False))[1]
    return list(found.values())


def _elementwise(eqn: Any, result: int) -> bool:
    """Return whether a result of an equation, or all of a call that leads to it, is computed elementwise."""
    if eqn.primitive.name in ELEMENTWISE:
        return True
    body = _body(eqn)
    return body is not None and not _roots(body, [body.outvars[result]])


def _body(eqn: Any) -> Any:
    """Return the jaxpr of a call (of `jax.lax.platform_dependent`, the one for accelerators), or None for other equations."""
    if platforms := eqn.params.get("branches_platforms"):
        branches = zip(platforms, eqn.params["branches"], strict=True)
        return next((branch.jaxpr for names, branch in branches if "cpu" not in (names or ())), None)
    if eqn.primitive.name in ("jit", "pjit", "custom_jvp_call"):
        return next((value.jaxpr for value in eqn.params.values() if hasattr(value, "jaxpr")), None)
    return None
