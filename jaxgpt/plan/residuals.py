"""The part of a run that one device computes, and the bytes saved for its backward pass."""

from __future__ import annotations

import math
from collections.abc import Iterable
from dataclasses import replace
from functools import cache
from typing import Any

import jax
import jax.extend.core
from jax.sharding import AbstractMesh

from jaxgpt.config import Config, MeshConfig
from jaxgpt.ops.random import named_key
from jaxgpt.parallel.mesh import sizes_of
from jaxgpt.parallel.rows import microbatches, row_shards
from jaxgpt.parallel.rules import AXES, rules_for
from jaxgpt.trainer.program import Program, make_program

ELEMENTWISE = frozenset(
    "abs add add_any and bitcast_convert_type broadcast_in_dim concatenate convert_element_type copy cos div empty2 eq erf "
    "exp exp2 ge gt integer_pow iota le log logistic lt max min mul ne neg not one_minus_square or platform_index polynomial "
    "pow reshape rsqrt select_n sign sin slice split sqrt square squeeze stop_gradient sub tanh transpose".split()
)


@cache
def abstract_program(config: Config, layers: int = 0) -> Program:
    """Return the program on absent devices with this number of layers; 0: the config's number."""
    if layers:
        config = config.with_model(n_layer=layers)
    mesh: Any = AbstractMesh(tuple(sizes_of(config.mesh).values()), AXES)
    return make_program(config, mesh)


@cache
def one_device(program: Program) -> Program:
    """Return the program of one device: its share of rows, heads, hidden units and vocabulary, over whole windows.

    The model has its full width, because weights are gathered along fsdp. If `tensor` does not divide an axis, every
    device computes the complete axis. `mesh.context` is kept: `residual_bytes` divides by it.
    """
    config = program.config
    model = config.model
    tensor = program.mesh.shape["tensor"]
    rules = rules_for(model, program.mesh, program.rules)
    if not model.attn_proj:  # unsharded heads, added to the complete residual stream
        rules |= {"heads": (), "kv_heads": ()}

    def part(axis: str, size: int) -> int:
        return size // tensor if "tensor" in rules[axis] else size

    kv_heads = part("kv_heads", model.kv_heads)
    config = config.with_model(
        n_head=math.lcm(part("heads", model.n_head), kv_heads),  # a multiple of the key/value heads
        n_kv_head=kv_heads,
        head_dim=model.head_width,
        n_inner=part("mlp", model.mlp_width),
        vocab_size=part("vocab", model.vocab_size),
    )

    ways = row_shards(sizes_of(config.mesh))
    rows = microbatches(config.train, ways).rows // ways
    train = replace(config.train, batch_size=rows, accumulation=1)
    mesh = MeshConfig(data=1, fsdp=1, context=config.mesh.context, tensor=1)
    return abstract_program(replace(config, train=train, mesh=mesh))


def residual_bytes(program: Program, remat: bool = True) -> float:
    """Estimate the bytes of the residuals in device memory, plus the gradient of the largest residual.

    Args:
        program: a program of one device, with one microbatch.
        remat: whether to rematerialize as configured.
    """
    train = program.config.train if remat else replace(program.config.train, remat="none")
    run = abstract_program(replace(program.config, train=train))
    key = named_key(0, "dropout") if program.config.model.dropout > 0 else None

    def residuals(params: Any, frozen: Any, windows: jax.Array) -> Any:
        def loss(params: Any) -> jax.Array:
            return run.objective(params, windows, key, frozen).minimized.sum()

        _, backward = jax.vjp(loss, params)
        return backward

    # The backward function is a tree of arrays: the residuals.
    arguments = program.abstract_state.params, program.abstract_frozen, program.batch()
    plain = jax.tree.map(lambda s: jax.ShapeDtypeStruct(s.shape, s.dtype), arguments)
    jaxpr = jax.make_jaxpr(residuals)(*plain).jaxpr
    sizes = [0.0]
    for aval in _roots(jaxpr, jaxpr.outvars):
        sizes.append(math.prod(aval.shape) * aval.dtype.itemsize)
    return (sum(sizes) + max(sizes)) / program.config.mesh.context


def _roots(jaxpr: Any, results: Iterable[Any]) -> list[Any]:
    """Return the shapes and dtypes of the arrays to store for results of a jaxpr, except its arguments.

    A result of elementwise operations counts as their inputs: compilers recompute such operations where they are needed.
    Results in host memory are omitted.
    """
    made_by = {id(out): eqn for eqn in jaxpr.eqns for out in eqn.outvars}
    pending = list(results)
    seen = set[int]()
    found = []
    while pending:
        var = pending.pop()
        eqn = made_by.get(id(var))
        on_host = getattr(var.aval, "memory_space", None) == jax.memory.Space.Host
        if eqn is None or id(var) in seen or on_host:
            continue
        seen.add(id(var))
        if _elementwise(eqn, eqn.outvars.index(var)):
            pending += [each for each in eqn.invars if not isinstance(each, jax.extend.core.Literal)]
        elif hasattr(var.aval, "dtype"):
            found.append(var.aval)
    return found


def _elementwise(eqn: Any, result: int) -> bool:
    """Return whether a result of an equation is computed elementwise.

    In a call, all equations that lead to the result must be elementwise.
    """
    if eqn.primitive.name in ELEMENTWISE:
        return True
    body = _body(eqn)
    return body is not None and not _roots(body, [body.outvars[result]])


def _body(eqn: Any) -> Any:
    """Return the jaxpr that an equation calls; None: no call, or an unknown kind of call."""
    platforms = eqn.params.get("branches_platforms")
    if platforms:  # the accelerator branch of `jax.lax.platform_dependent`
        for names, branch in zip(platforms, eqn.params["branches"], strict=True):
            if "cpu" not in (names or ()):
                return branch.jaxpr
        return None
    if eqn.primitive.name in ("jit", "pjit", "custom_jvp_call"):
        return next((value.jaxpr for value in eqn.params.values() if hasattr(value, "jaxpr")), None)
    return None
