"""Estimate memory, FLOPs and traffic of a training step from shapes and shardings, without compiling."""

from __future__ import annotations

import math
from dataclasses import replace
from typing import Any, Literal, NamedTuple

import jax
import jax.numpy as jnp

from jaxgpt.config import Config
from jaxgpt.counts import flops_per_token, parameter_count
from jaxgpt.errors import UserError
from jaxgpt.kernels import CONTEXT_KERNELS
from jaxgpt.parallel.mesh import resolve
from jaxgpt.parallel.rows import batch_ways
from jaxgpt.plan.cost import StepCost, Traffic, traffic_by_kind
from jaxgpt.plan.hlo import Collective
from jaxgpt.plan.residuals import abstract_program, one_device, residual_bytes
from jaxgpt.plan.topology import Topology
from jaxgpt.trainer.program import Program

KINDS = ("parameters", "optimizer", "average", "batch", "gradients", "activations")


def resolve_mesh(config: Config, topology: Topology) -> tuple[Config, str]:
    """Return the config with its mesh resolved for a topology, and a note about the mesh for the user.

    Raises:
        UserError: if the mesh does not match the topology, its slices or the model.
    """
    mesh, note = resolve(config, topology.n_devices, tpu=topology.chip.tpu)
    if mesh.data % topology.slices:
        raise UserError(
            f"mesh.data {mesh.data} is not a multiple of --slices {topology.slices}, and every slice holds a copy of the "
            f"weights: use --mesh.data {topology.slices} --mesh.fsdp -1"
        )
    return replace(config, mesh=mesh), note


class _Counts(NamedTuple):
    """Costs of a step on one device. Each number is an affine function of the number of layers."""

    memory: dict[str, float]  # bytes by kind
    flops: tuple[float, float]  # the results of `step_flops`
    weights: float  # number of elements of all weights, gathered along fsdp and sharded along tensor
    gradients: float  # number of elements of the gradients, gathered and sharded like the weights


def estimate(config: Config, topology: Topology) -> StepCost:
    """Estimate a training step's cost; memory of parameters and optimizer is exact except for padding.

    Activations: the residuals of the backward pass, found by tracing; with rematerialization, plus the residuals of one
    recomputed block. A compiled program needs less memory if it recomputes cheap operations, and more if it pads arrays.
    Memory traffic: read and write the state once per step, and gradients and activations once per microbatch; read weights
    twice per microbatch. Communication: the collectives that the sharding table implies. The config's mesh must be resolved.
    """
    layers = config.model.n_layer
    # Extrapolate from one and two layers, which are faster to trace than all layers.
    one = _counts(config, 1)
    two = _counts(config, 2)
    counts = jax.tree.map(lambda first, both: first + (layers - 1) * (both - first), one, two)
    memory = {kind: counts.memory[kind] for kind in KINDS if kind in counts.memory}

    # Rematerialization: the saved activations of all blocks, and all activations of the block that is recomputed.
    if config.train.remat != "none":
        first = residual_bytes(one_device(abstract_program(config, 1)), remat=False)
        both = residual_bytes(one_device(abstract_program(config, 2)), remat=False)
        saved = min(memory["activations"], first + (layers - 2) * (both - first))
        memory["activations"] = saved + both - first
    memory["activations"] += _key_bytes(config)

    program = abstract_program(config)
    count = program.microbatches.accumulation
    state = sum(v for k, v in memory.items() if k not in ("activations", "gradients", "batch"))
    moved = 2 * state + 2 * memory["gradients"] * count + count * (2 * memory["activations"] + 2 * memory["parameters"])
    computed, useful = counts.flops
    return StepCost(
        memory=memory,
        available=topology.chip.hbm,
        model_flops=computed,
        hbm_bytes=moved,
        traffic=_implied_traffic(program, topology, counts),
        useful_share=useful / computed,
    )


def _key_bytes(config: Config) -> float:
    """Estimate the bytes of the keys and values that a device receives for a block along context, and of their gradients.

    Gathered keys: of whole windows, with float32 gradients. Keys in a ring: of one device, twice, because the next ones arrive
    during the computation.
    """
    context = config.mesh.context
    program = abstract_program(config)
    if program.ops.attend not in CONTEXT_KERNELS.values():
        return 0.0
    copies = 1 if program.ops.attend is CONTEXT_KERNELS["gathered"] else 2 / context
    width = jnp.dtype(config.train.compute_dtype).itemsize
    return copies * _keys_and_values(program) * (width + 4)


def _keys_and_values(program: Program) -> float:
    """Return the number of elements of the keys and values of a block, in whole windows of a microbatch of one device."""
    part = one_device(program).config
    heads = part.model.kv_heads
    if program.config.mesh.tensor > 1 and program.config.model.kv_heads % program.config.mesh.tensor:
        heads = part.model.n_head  # repeated for each query head
    return 2.0 * part.train.batch_size * part.window * heads * part.model.head_width


def _counts(config: Config, layers: int) -> _Counts:
    """Count the costs of a model with this number of layers."""
    program = abstract_program(config, layers)
    part = one_device(program)
    gradients = shard_bytes(program.abstract_state.params)
    memory = argument_bytes(program) | {"gradients": gradients, "activations": residual_bytes(part)}
    return _Counts(
        memory=memory,
        flops=step_flops(program),
        weights=parameter_count(part.abstract_weights),
        gradients=parameter_count(part.abstract_state.params),
    )


def suggestions(config: Config, topology: Topology) -> list[tuple[str, float]]:
    """Return flags that reduce memory, with the estimated bytes per device, smallest first.

    If no single option fits in device memory, the first item is the fastest combination that fits, if any.
    """
    options = [*_meshes(config, topology), *_remats(config, "dots", "offload", "full")]
    half = _windows(config) // 2
    if half > 0:
        options.append(_with_windows("", config, half))

    now = estimate(config, topology).total
    found = []
    for flags, changed in options:
        total = estimate(changed, topology).total
        if total < now:
            found.append((flags, total))
    found.sort(key=lambda each: each[1])
    if any(total <= topology.chip.hbm for _, total in found):
        return found
    return _combination(config, topology) + found


def _combination(config: Config, topology: Topology) -> list[tuple[str, float]]:
    """Return flags and bytes of the fastest mesh, remat and microbatches that fit in memory, or []."""
    fitting = []
    for on, run in [("", config), *_meshes(config, topology)]:
        for saved, changed in [("", run), *_remats(run, "dots", "full")]:
            flags = f"{on} {saved}".strip()
            cost = estimate(changed, topology)

            # Activations are proportional to the windows of a microbatch: use as many windows as fit.
            windows = _windows(changed)
            activations = cost.memory["activations"]
            fewer = math.floor(windows * (cost.available - cost.total + activations) / activations)
            if 1 <= fewer < windows:
                flags, changed = _with_windows(flags, changed, fewer)
                cost = estimate(changed, topology)
            if not cost.fits:
                continue

            # The roofline excludes recomputation, which with remat full takes one forward pass.
            seconds = cost.bounds(topology.chip)["seconds_serial"]
            if changed.train.remat == "full":
                seconds += cost.seconds(topology.chip)["compute"] / 3
            fitting.append((seconds, flags, cost.total))
    if not fitting:
        return []
    _, flags, total = min(fitting)
    return [(flags, total)]


def _meshes(config: Config, topology: Topology) -> list[tuple[str, Config]]:
    """Return flags that shard weights over a complete slice, and the config with this mesh, or []."""
    mesh = config.mesh
    wide = replace(mesh, data=topology.slices, fsdp=mesh.fsdp * mesh.data // topology.slices)
    try:
        changed, _ = resolve_mesh(replace(config, mesh=wide), topology)
    except UserError:  # such as an n_embd that fsdp does not divide
        return []
    if wide == mesh:
        return []
    return [(f"--mesh.data {wide.data} --mesh.fsdp {wide.fsdp}", changed)]


def _remats(config: Config, *kinds: Literal["dots", "offload", "full"]) -> list[tuple[str, Config]]:
    """Return the flag and the config of each kind of rematerialization in `kinds` except the current kind."""
    options = []
    for kind in kinds:
        if kind != config.train.remat:
            changed = replace(config, train=replace(config.train, remat=kind))
            options.append((f"--train.remat {kind}", changed))
    return options


def _windows(config: Config) -> int:
    """Return the number of windows per device and microbatch."""
    part = one_device(abstract_program(config))
    return part.config.train.batch_size


def _with_windows(flags: str, config: Config, windows: int) -> tuple[str, Config]:
    """Limit microbatches to `windows` per device: add --train.accumulation to the flags and the config."""
    count = math.ceil(config.train.batch_size / windows)
    changed = replace(config, train=replace(config.train, accumulation=count))
    return f"{flags} --train.accumulation {count}".strip(), changed


def argument_bytes(program: Program) -> dict[str, float]:
    """Count the bytes of a step's inputs on one device, by kind."""
    state = program.abstract_state
    average = {"average": shard_bytes(state.ema)} if state.ema is not None else {}
    return {
        "parameters": shard_bytes((state.params, program.abstract_frozen)),
        "optimizer": shard_bytes(state.opt_state),
        **average,
        "batch": 4.0 * math.prod(program.batch().shape) / batch_ways(program.mesh),
    }


def step_flops(program: Program) -> tuple[float, float]:
    """Compute the FLOPs of a step on one device with `flops_per_token`.

    Returns:
        The FLOPs that the device computes, including padding and products that other devices repeat, and its equal share
        of the model's FLOPs.
    """
    config = program.config
    rows = math.prod(program.microbatches) / batch_ways(program.mesh)
    computed = config.window / config.mesh.context * rows * token_flops(program, config.window)
    model = flops_per_token(program.model, program.abstract_weights, config.window, config.lora)
    useful = model * config.train.batch_size / program.mesh.size
    return computed, config.window * useful


def token_flops(program: Program, T: int) -> float:
    """Compute one device's FLOPs of training on one token, in a context of T tokens."""
    part = one_device(program)
    return flops_per_token(part.config.model, part.abstract_weights, T, part.config.lora)


def shard_bytes(tree: Any) -> float:
    """Compute the bytes that a tree of sharded arrays, or of their shapes, takes on one device."""
    total = 0
    for leaf in jax.tree.leaves(tree):
        shape = leaf.sharding.shard_shape(leaf.shape)
        total += math.prod(shape) * leaf.dtype.itemsize
    return float(total)


def _implied_traffic(program: Program, topology: Topology, counts: _Counts) -> dict[str, Traffic]:
    """Estimate the collectives of a step from the sharding table, in the compute dtype.

    Each collective runs in every microbatch. Over fsdp: weights are gathered twice, gradients are reduce-scattered, and
    embeddings are exchanged (all-to-all) forward and backward. An untied token table is not gathered. Over data: gradients are
    all-reduced. Over tensor: activations are all-reduced four times per block. Over expert: the tokens of each block are
    gathered, and the outputs of the experts reduce-scattered, forward and backward. Over context: gradients are all-reduced, as
    over data; keys and values of each block are gathered forward and backward, and their gradients reduce-scattered. In a ring,
    they are sent to each other device forward and backward, and the gradients in float32 to each device.
    """
    config = program.config
    mesh = config.mesh
    part = one_device(program).config
    count = program.microbatches.accumulation

    # Bytes in the compute dtype; the table counts only if it is untied.
    width = jnp.dtype(config.train.compute_dtype).itemsize
    weights = width * counts.weights
    grads = width * counts.gradients
    table = 0 if config.model.tie_embeddings else width * part.model.vocab_size * config.model.n_embd
    block = width * part.train.batch_size * config.window / mesh.context * config.model.n_embd
    within = max(mesh.data // topology.slices, 1) * mesh.context
    collectives = (
        Collective("all-gather", weights - table, mesh.fsdp, 2 * count),
        Collective("reduce-scatter", (grads - table * (not config.lora.rank)) / mesh.fsdp, mesh.fsdp, count),
        Collective("all-to-all", block, mesh.fsdp, 2 * count),
        Collective("all-reduce", grads / mesh.fsdp, within, count),
        # Between slices, each device all-reduces one shard of the gradients, already summed within its slice.
        Collective("all-reduce", grads / mesh.fsdp / within, topology.slices, count, True),
        Collective("all-reduce", block, mesh.tensor, 4 * config.model.n_layer * count),
        # Tokens are gathered forward, and the gradients of the sums backward; sums are float32.
        Collective("all-gather", block * mesh.expert, mesh.expert, 2 * config.model.n_layer * count),
        Collective("reduce-scatter", block, mesh.expert, 2 * config.model.n_layer * count),
        *_key_collectives(program),
    )
    return traffic_by_kind(one for one in collectives if one.group > 1)


def _key_collectives(program: Program) -> list[Collective]:
    """Return the collectives of keys, values and their gradients over context, for all blocks."""
    config = program.config
    context = config.mesh.context
    times = config.model.n_layer * program.microbatches.accumulation
    elements = _keys_and_values(program)
    keys = jnp.dtype(config.train.compute_dtype).itemsize * elements
    if program.ops.attend is CONTEXT_KERNELS["gathered"]:
        return [
            Collective("all-gather", keys, context, 2 * times),
            Collective("reduce-scatter", keys / context, context, times),
        ]
    if program.ops.attend is CONTEXT_KERNELS["ring"]:
        return [
            Collective("collective-permute", keys / context, context, 2 * (context - 1) * times),
            Collective("collective-permute", 4.0 * elements / context, context, context * times),
        ]
    return []
