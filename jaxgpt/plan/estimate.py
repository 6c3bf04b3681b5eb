"""Estimate the cost of a training step from shapes and shardings, without compiling, in a second or two."""

from __future__ import annotations

import math
from collections.abc import Iterable
from dataclasses import asdict, replace
from typing import Any, cast, get_args, get_type_hints

import jax
import jax.extend.core
import jax.numpy as jnp
from jax.sharding import AbstractMesh

from jaxgpt.config import Config, TrainConfig
from jaxgpt.errors import UserError
from jaxgpt.ops.random import named_key
from jaxgpt.parallel.mesh import AXES, batch_ways, microbatches, resolve
from jaxgpt.plan.cost import StepCost, Traffic, traffic_by_kind
from jaxgpt.plan.hlo import Collective
from jaxgpt.plan.topology import Topology
from jaxgpt.trainer.layout import Layout, make_layout
from jaxgpt.trainer.metrics import flops_per_token, parameter_count
from jaxgpt.trainer.program import objective_of

ELEMENTWISE = frozenset(
    "abs add add_any and bitcast_convert_type broadcast_in_dim concatenate convert_element_type copy cos div empty2 eq erf "
    "exp exp2 ge gt integer_pow iota le log logistic lt max min mul ne neg not one_minus_square or platform_index polynomial "
    "pow reshape rsqrt select_n sign sin slice split sqrt square squeeze stop_gradient sub tanh transpose".split()
)


def resolve_mesh(config: Config, topology: Topology) -> tuple[Config, str]:
    """Return the config with its mesh resolved for a topology, and a note about the mesh for the user.

    Raises:
        UserError: if the mesh does not match the topology, its slices, the batch or the model.
    """
    mesh, note = resolve(config, topology.n_devices, tpu=bool(topology.chip.host))
    if mesh.data % topology.slices:
        raise UserError(
            f"mesh.data {mesh.data} is not a multiple of --slices {topology.slices}, and every slice holds a copy of the "
            f"weights: use --mesh.data {topology.slices} --mesh.fsdp -1"
        )
    return replace(config, mesh=mesh), note


def estimate(config: Config, topology: Topology) -> StepCost:
    """Estimate the cost of a training step. Memory of parameters and optimizer is exact, the rest approximate.

    Activations: the residuals of the backward pass, found by tracing; a compiled program needs less where it recomputes cheap
    operations, and more where it pads. Memory traffic: state, gradients and activations are written and read once, weights are
    read twice per microbatch. Communication: the collectives that the sharding table implies.

    Args:
        config: the run, with its mesh resolved.
        topology: the hardware.
    """
    layout = make_layout(config, cast(Any, AbstractMesh(tuple(asdict(config.mesh).values()), AXES)))
    memory = argument_bytes(layout) | {
        "gradients": shard_bytes(layout.abstract_state.params),
        "activations": _residual_bytes(layout),
    }
    count = layout.microbatches.accumulation
    state = sum(v for k, v in memory.items() if k not in ("activations", "gradients", "batch"))
    weights = memory["parameters"]
    moved = 2 * state + 2 * memory["gradients"] * count + count * (2 * memory["activations"] + 2 * weights)
    traffic = _implied_traffic(layout, topology)
    return StepCost(
        memory, topology.chip.hbm, step_flops(layout), moved, traffic, unpadded_share=unpadded_share(layout)
    )


def suggestions(config: Config, topology: Topology) -> list[tuple[str, float]]:
    """Return flags that reduce memory, with the estimated bytes per device, smallest first."""
    train, mesh = config.train, config.mesh
    tries: list[tuple[str, Config]] = []
    for remat in get_args(get_type_hints(TrainConfig)["remat"]):
        if remat not in (train.remat, "none"):
            tries.append((f"--train.remat {remat}", replace(config, train=replace(train, remat=remat))))
    ways = mesh.data * mesh.fsdp  # number of shards of a batch
    if half := microbatches(train, ways).rows // ways // 2:
        count = math.ceil(train.batch_size / half)
        tries.append((f"--train.accumulation {count}", replace(config, train=replace(train, accumulation=count))))
    if mesh.data > topology.slices:
        wide = replace(mesh, data=topology.slices, fsdp=mesh.fsdp * mesh.data // topology.slices)
        tries.append((f"--mesh.data {wide.data} --mesh.fsdp {wide.fsdp}", replace(config, mesh=wide)))
    current, found = estimate(config, topology).total, []
    for flags, changed in tries:
        try:
            total = estimate(resolve_mesh(changed, topology)[0], topology).total
        except UserError:
            continue
        if total < current:
            found.append((flags, total))
    return sorted(found, key=lambda each: each[1])


def argument_bytes(layout: Layout) -> dict[str, float]:
    """Count the bytes of a step's inputs by kind, on one device."""
    state = layout.abstract_state
    average = {"average": shard_bytes(state.ema)} if state.ema is not None else {}
    return {
        "parameters": shard_bytes((state.params, layout.abstract_base)),
        "optimizer": shard_bytes(state.opt_state),
        **average,
        "batch": 4.0 * math.prod(layout.batch().shape) / batch_ways(layout.mesh),
    }


def step_flops(layout: Layout) -> float:
    """Compute the FLOPs of a step on one device by the formula for the model, padding included."""
    config = layout.config
    tokens = math.prod(layout.microbatches) * config.window
    flops = flops_per_token(config.model, layout.abstract_weights, config.window, config.lora)
    return flops * tokens / math.prod(asdict(config.mesh).values())


def unpadded_share(layout: Layout) -> float:
    """Compute the share of a step's windows that are not padding."""
    return layout.config.train.batch_size / math.prod(layout.microbatches)


def shard_bytes(tree: Any) -> float:
    """Compute the bytes that a tree of sharded arrays, or of their shapes, takes on one device."""
    return float(
        sum(
            math.prod(leaf.sharding.shard_shape(leaf.shape) if leaf.sharding else leaf.shape) * leaf.dtype.itemsize
            for leaf in jax.tree.leaves(tree)
        )
    )


def _residual_bytes(layout: Layout) -> float:
    """Estimate the bytes on one device of a microbatch's residuals, plus the gradient of the largest one."""
    config, model = layout.config, layout.config.model
    rows = layout.microbatches.rows
    key = named_key(0, "dropout") if model.dropout > 0 else None

    def residuals(params: Any, frozen: Any, windows: jax.Array) -> Any:
        return jax.vjp(lambda p: objective_of(layout, frozen)(p, windows, key).loss_B.sum(), params)[1]

    trees = (layout.abstract_state.params, layout.abstract_base)
    params, frozen = jax.tree.map(lambda s: jax.ShapeDtypeStruct(s.shape, s.dtype), trees)
    windows = jax.ShapeDtypeStruct((rows, *layout.batch().shape[1:]), jnp.int32)
    jaxpr = jax.make_jaxpr(residuals)(params, frozen, windows).jaxpr
    ways, split = batch_ways(layout.mesh), {model.n_head, model.kv_heads, model.mlp_width, model.vocab_size}
    sizes = [0.0]
    for aval in _roots(jaxpr, jaxpr.outvars):
        shape = aval.shape
        if rows in shape[:2] or rows * config.window in shape[:2]:
            part = config.mesh.tensor if split & set(shape[1:]) else 1
            sizes.append(math.prod(shape) * aval.dtype.itemsize / ways / part)
    return sum(sizes) + max(sizes)


def _roots(jaxpr: Any, results: Iterable[Any]) -> list[Any]:
    """Return the shapes and dtypes of the arrays that must be stored for results of a jaxpr, its arguments excluded.

    A result of elementwise operations counts as their inputs: compilers recompute such operations where they are needed.
    """
    made_by = {id(out): eqn for eqn in jaxpr.eqns for out in eqn.outvars}
    pending, seen, found = list(results), set(), []
    while pending:
        var = pending.pop()
        eqn = made_by.get(id(var))
        if eqn is None or id(var) in seen:
            continue
        seen.add(id(var))
        if _elementwise(eqn, eqn.outvars.index(var)):
            pending += [v for v in eqn.invars if not isinstance(v, jax.extend.core.Literal)]
        elif hasattr(var.aval, "dtype"):
            found.append(var.aval)
    return found


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


def _implied_traffic(layout: Layout, topology: Topology) -> dict[str, Traffic]:
    """Estimate the collectives of a step from the sharding table, in the compute dtype.

    Per microbatch, over fsdp: weights are gathered twice, gradients scattered, embeddings exchanged forward and back (an untied
    token table is not gathered); over data: gradients are summed; over tensor: four sums of activations per block.
    """
    config, mesh = layout.config, layout.config.mesh
    width = jnp.dtype(config.train.compute_dtype).itemsize
    count, layers = layout.microbatches.accumulation, config.model.n_layer
    whole, grads = (
        parameter_count(t) * width / mesh.tensor for t in (layout.abstract_weights, layout.abstract_state.params)
    )
    table = 0 if config.model.tie_embeddings else layout.abstract_weights["wte"]["embedding"].size * width / mesh.tensor
    rows = layout.microbatches.rows // batch_ways(layout.mesh)
    block = rows * config.window * config.model.n_embd * width
    within = max(mesh.data // topology.slices, 1)
    collectives = (
        Collective("all-gather", whole - table, mesh.fsdp, 2 * count),
        Collective("reduce-scatter", (grads - table * (not layout.abstract_base)) / mesh.fsdp, mesh.fsdp, count),
        Collective("all-to-all", block, mesh.fsdp, 2 * count),
        Collective("all-reduce", grads / mesh.fsdp, within, count),
        # Between slices, each device sums its shard of the gradients of its slice.
        Collective("all-reduce", grads / mesh.fsdp / within, topology.slices, count, True),
        Collective("all-reduce", block, mesh.tensor, 4 * layers * count),
    )
    return traffic_by_kind(one for one in collectives if one.group > 1)
