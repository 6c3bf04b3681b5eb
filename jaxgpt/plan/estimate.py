"""Estimate the cost of a training step from shapes and shardings, without compiling, in a second or two."""

from __future__ import annotations

import math
from collections.abc import Callable
from dataclasses import asdict, replace
from typing import Any, Literal, NamedTuple, TypeVar, cast

import jax
import jax.numpy as jnp
from jax.sharding import AbstractMesh, NamedSharding

from jaxgpt.config import Config
from jaxgpt.errors import UserError
from jaxgpt.parallel.mesh import AXES, batch_ways, microbatches, resolve
from jaxgpt.plan.cost import StepCost, Traffic, traffic_by_kind
from jaxgpt.plan.hlo import Collective
from jaxgpt.plan.residuals import residual_bytes
from jaxgpt.plan.topology import Topology
from jaxgpt.trainer.layout import Layout, make_layout
from jaxgpt.trainer.metrics import flops_per_token, parameter_count

T = TypeVar("T")
KINDS = ("parameters", "optimizer", "average", "batch", "gradients", "activations")


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


class _Counts(NamedTuple):
    """Costs of a step on one device. Each number grows linearly with the number of layers.

    Attributes:
        memory: bytes of memory by kind.
        flops: FLOPs.
        weights: elements of the weights that one device multiplies.
        gradients: elements of the gradients of these weights.
        table: elements of an untied token table.
    """

    memory: dict[str, float]
    flops: StepFlops
    weights: float
    gradients: float
    table: float


def estimate(config: Config, topology: Topology) -> StepCost:
    """Estimate the cost of a training step. Memory of parameters and optimizer is exact, the rest approximate.

    Activations: the residuals of the backward pass, found by tracing, and with rematerialization those of one block, which it
    recomputes. A compiled program needs less where it recomputes cheap operations, and more where it pads. Memory traffic:
    state, gradients and activations are written and read once, weights are read twice per microbatch. Communication: the
    collectives that the sharding table implies.

    Args:
        config: the run, with its mesh resolved.
        topology: the hardware.
    """
    layers, train = config.model.n_layer, config.train
    counts = _by_layers(lambda n: _counts(config, n), layers)
    memory = {kind: counts.memory[kind] for kind in KINDS if kind in counts.memory}
    if train.remat != "none":
        unsaved = replace(config, train=replace(train, remat="none"))
        one, two = (residual_bytes(abstract_layout(unsaved, n)) for n in (1, 2))
        memory["activations"] = min(memory["activations"], one + (layers - 2) * (two - one)) + two - one
    layout = abstract_layout(config)
    count = layout.microbatches.accumulation
    state = sum(v for k, v in memory.items() if k not in ("activations", "gradients", "batch"))
    moved = 2 * state + 2 * memory["gradients"] * count + count * (2 * memory["activations"] + 2 * memory["parameters"])
    return StepCost(
        memory,
        topology.chip.hbm,
        counts.flops.computed,
        moved,
        _implied_traffic(layout, topology, counts),
        useful_share=counts.flops.useful / counts.flops.computed,
    )


def _by_layers(count: Callable[[int], T], layers: int) -> T:
    """Return `count(layers)`, numbers that grow linearly, from those of one and of two layers, which are faster to trace."""
    if layers <= 2:
        return count(layers)
    one, two = count(1), count(2)
    result: T = jax.tree.map(lambda first, both: first + (layers - 1) * (both - first), one, two)
    return result


def abstract_layout(config: Config, layers: int = 0) -> Layout:
    """Return the layout on devices that are not here, with this number of layers; 0: the config's."""
    config = config.with_model(n_layer=layers) if layers else config
    return make_layout(config, cast(Any, AbstractMesh(tuple(asdict(config.mesh).values()), AXES)))


def _counts(config: Config, layers: int) -> _Counts:
    """Count for a model with this number of layers."""
    layout = abstract_layout(config, layers)
    weights, trained = (_multiplied(layout, t) for t in (layout.abstract_weights, layout.abstract_state.params))
    gradients = shard_bytes(layout.abstract_state.params)
    return _Counts(
        argument_bytes(layout) | {"gradients": gradients, "activations": residual_bytes(layout)},
        step_flops(layout),
        parameter_count(weights),
        parameter_count(trained),
        0.0 if config.model.tie_embeddings else weights["wte"]["embedding"].size,
    )


def suggestions(config: Config, topology: Topology) -> list[tuple[str, float]]:
    """Return flags that reduce memory, with the estimated bytes per device, smallest first.

    If no single option fits, the first is the fastest combination that fits, if any.
    """
    options = [*_meshes(config, topology), *_remats(config, "dots", "offload", "full")]
    if (half := _windows(config) // 2) > 0:
        options.append(_with_windows("", config, half))
    now, found = estimate(config, topology).total, []
    for flags, changed in options:
        if (total := estimate(changed, topology).total) < now:
            found.append((flags, total))
    found.sort(key=lambda each: each[1])
    if any(total <= topology.chip.hbm for _, total in found):
        return found
    return _combination(config, topology) + found


def _combination(config: Config, topology: Topology) -> list[tuple[str, float]]:
    """Return the flags of the combination that fits with the shortest step by the roofline, and its bytes, or []."""
    fitting = []
    for on, run in [("", config), *_meshes(config, topology)]:
        for saved, changed in [("", run), *_remats(run, "dots", "full")]:
            flags, cost, windows = f"{on} {saved}".strip(), estimate(changed, topology), _windows(changed)
            activations = cost.memory["activations"]
            fewer = math.floor(windows * (cost.available - cost.total + activations) / activations)
            if 1 <= fewer < windows:
                flags, changed = _with_windows(flags, changed, fewer)
                cost = estimate(changed, topology)
            if cost.fits:
                again = cost.seconds(topology.chip)["compute"] / 3 * (changed.train.remat == "full")  # a forward pass
                fitting.append((cost.bounds(topology.chip)["seconds_serial"] + again, flags, cost.total))
    return [min(fitting)[1:]] if fitting else []


def _meshes(config: Config, topology: Topology) -> list[tuple[str, Config]]:
    """Return the flags of the mesh that splits weights over a whole slice, and the config with it, or []."""
    mesh = config.mesh
    wide = replace(mesh, data=topology.slices, fsdp=mesh.fsdp * mesh.data // topology.slices)
    try:
        changed, _ = resolve_mesh(replace(config, mesh=wide), topology)
    except UserError:  # the width may not be divisible
        return []
    return [(f"--mesh.data {wide.data} --mesh.fsdp {wide.fsdp}", changed)] if wide != mesh else []


def _remats(config: Config, *kinds: Literal["dots", "offload", "full"]) -> list[tuple[str, Config]]:
    """Return the flags of kinds of rematerialization, and the config with each."""
    others = [kind for kind in kinds if kind != config.train.remat]
    return [(f"--train.remat {kind}", replace(config, train=replace(config.train, remat=kind))) for kind in others]


def _windows(config: Config) -> int:
    """Return the number of windows per device and microbatch."""
    ways = config.mesh.data * config.mesh.fsdp
    return microbatches(config.train, ways).rows // ways


def _with_windows(flags: str, config: Config, windows: int) -> tuple[str, Config]:
    """Add the flags for at most this number of windows per device and microbatch."""
    count = math.ceil(config.train.batch_size / windows)
    changed = replace(config, train=replace(config.train, accumulation=count))
    return f"{flags} --train.accumulation {count}".strip(), changed


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


class StepFlops(NamedTuple):
    """FLOPs of a step on one device by the formula for the model.

    Attributes:
        computed: all that the device computes, including padding and products that other devices compute as well.
        useful: an equal share of the model's.
    """

    computed: float
    useful: float


def step_flops(layout: Layout) -> StepFlops:
    """Compute the FLOPs of a step on one device."""
    config, ways = layout.config, batch_ways(layout.mesh)
    computed = token_flops(layout, config.window) * math.prod(layout.microbatches) / ways
    model = flops_per_token(config.model, layout.abstract_weights, config.window, config.lora)
    useful = model * config.train.batch_size / ways / layout.mesh.shape["tensor"]
    return StepFlops(config.window * computed, config.window * useful)


def token_flops(layout: Layout, T: int) -> float:
    """Compute the FLOPs of training on one token that one device computes, in a context of T tokens."""
    config, weights = layout.config, _multiplied(layout, layout.abstract_weights)
    attention = flops_per_token(config.model, {}, T)
    return flops_per_token(config.model, weights, T, config.lora) - attention + attention / layout.mesh.shape["tensor"]


def _multiplied(layout: Layout, tree: Any) -> Any:
    """Return the shapes of the parts of weights that a device multiplies: weights are gathered along fsdp, not tensor."""
    mesh = cast(Any, AbstractMesh((1, 1, layout.mesh.shape["tensor"]), AXES))

    def part(leaf: jax.ShapeDtypeStruct) -> jax.ShapeDtypeStruct:
        sharding = NamedSharding(mesh, cast(NamedSharding, leaf.sharding).spec)
        return jax.ShapeDtypeStruct(sharding.shard_shape(leaf.shape), leaf.dtype)

    return jax.tree.map(part, tree)


def shard_bytes(tree: Any) -> float:
    """Compute the bytes that a tree of sharded arrays, or of their shapes, takes on one device."""
    return float(
        sum(
            math.prod(leaf.sharding.shard_shape(leaf.shape) if leaf.sharding else leaf.shape) * leaf.dtype.itemsize
            for leaf in jax.tree.leaves(tree)
        )
    )


def _implied_traffic(layout: Layout, topology: Topology, counts: _Counts) -> dict[str, Traffic]:
    """Estimate the collectives of a step from the sharding table, in the compute dtype.

    Per microbatch, over fsdp: weights are gathered twice, gradients scattered, embeddings exchanged forward and back (an untied
    token table is not gathered); over data: gradients are summed; over tensor: four sums of activations per block.
    """
    config, mesh = layout.config, layout.config.mesh
    width = jnp.dtype(config.train.compute_dtype).itemsize
    count = layout.microbatches.accumulation
    weights, grads, table = (width * each for each in (counts.weights, counts.gradients, counts.table))
    rows = layout.microbatches.rows // batch_ways(layout.mesh)
    block = rows * config.window * config.model.n_embd * width
    within = max(mesh.data // topology.slices, 1)
    collectives = (
        Collective("all-gather", weights - table, mesh.fsdp, 2 * count),
        Collective("reduce-scatter", (grads - table * (not config.lora.rank)) / mesh.fsdp, mesh.fsdp, count),
        Collective("all-to-all", block, mesh.fsdp, 2 * count),
        Collective("all-reduce", grads / mesh.fsdp, within, count),
        # Between slices, each device sums its shard of the gradients of its slice.
        Collective("all-reduce", grads / mesh.fsdp / within, topology.slices, count, True),
        Collective("all-reduce", block, mesh.tensor, 4 * config.model.n_layer * count),
    )
    return traffic_by_kind(one for one in collectives if one.group > 1)
