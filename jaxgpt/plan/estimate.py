"""Estimate memory, FLOPs and traffic of a training step from shapes and shardings, without compiling."""

from __future__ import annotations

import math
from dataclasses import replace
from functools import cache, partial
from itertools import combinations
from typing import Any, NamedTuple

import jax
import jax.numpy as jnp

from jaxgpt.config import Config
from jaxgpt.counts import flops_per_token
from jaxgpt.errors import UserError
from jaxgpt.kernels import CONTEXT_KERNELS, Target, choose_attention, halos_of
from jaxgpt.model.params import abstract_params
from jaxgpt.parallel.mesh import resolve, sizes_of
from jaxgpt.parallel.rows import Microbatches, batch_ways, microbatches, row_shards
from jaxgpt.parallel.rules import RULES
from jaxgpt.plan.collectives import Collective
from jaxgpt.plan.cost import StepCost, merged
from jaxgpt.plan.exchanges import Step, implied
from jaxgpt.plan.residuals import NEXT_TOKEN, Work, abstract_program, batch_of, one_device, pair_rows, trace
from jaxgpt.plan.topology import Topology
from jaxgpt.train.loss import of_objective
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
    """Costs of a microbatch or state on one device. Each number is an affine function of the number of layers."""

    memory: dict[str, float]  # bytes of the arguments of the step and of the gradients, by kind
    flops: float  # model FLOPs of a step
    useful: float  # this device's equal share of the model's FLOPs
    computed: float  # FLOPs of a microbatch, with recomputation
    plain: float  # FLOPs of a microbatch, without recomputation
    saved: float  # bytes saved for the backward pass
    unsaved: float  # bytes saved without rematerialization
    of_pairs: float  # bytes of `saved` in arrays with a row for each pair of token and expert
    unsaved_pairs: float  # bytes of `unsaved` in such arrays
    gathered: float  # number of elements of the weights, gathered along fsdp
    reference: float  # number of elements of the frozen weights of the objective, gathered along fsdp
    reduced: dict[tuple[str, ...], float]  # elements of the gradients' shards, by the axes over which they are summed
    scattered: float  # elements of the shards of gradients that are scattered along fsdp


def estimate(config: Config, topology: Topology, work: Work = NEXT_TOKEN) -> StepCost:
    """Estimate a training step's cost; memory of parameters and optimizer is exact except for padding.

    Activations are the residuals of the backward pass with the attention kernel of the chip, found by tracing, and temporary
    arrays, such as the residuals of one recomputed block with rematerialization. A compiled program needs less memory if it
    recomputes cheap operations, and more if it pads arrays.

    The memory traffic consists of the state, read and written once per step, the gradients and activations, written and read
    once per microbatch, and the weights in the compute dtype, read twice per microbatch. The communication consists of the
    collectives that the sharding table implies (`plan.exchanges`).

    Args:
        config: settings of the run, with a resolved mesh.
        topology: the hardware.
        work: objective and batches of a step.
    """
    target = topology.target
    # Extrapolate from one and two layers, which are faster to trace than all layers.
    short = work.with_frozen_layers(1)
    one = _counts(config, target, short, 1)
    two = _counts(config, target, short, 2)
    counts = jax.tree.map(partial(extrapolated, layers=config.model.n_layer), one, two)
    if work.frozen_model:
        more = _counts(config, target, work.with_frozen_layers(2), 1)
        others = work.frozen_model.n_layer - 1
        counts = jax.tree.map(lambda total, a, b: total + others * (b - a), counts, one, more)

    # Experts hold the pairs of all devices along their axis (`kernels.experts`).
    other_pairs = (_growth_of_pairs(config, target, work) - 1) * counts.of_pairs
    activations = counts.saved + other_pairs + _peak_bytes(config, topology, short) + _key_bytes(config, target)
    memory = counts.memory | {"activations": activations}
    memory = {kind: memory[kind] for kind in KINDS if kind in memory}

    # Per step, trained weights and optimizer state are read and written; frozen weights are only read.
    trained = memory["gradients"] + memory["optimizer"] + memory.get("average", 0.0)
    frozen = memory["parameters"] - memory["gradients"]

    # Per microbatch, gradients and activations are written and read. Weights are read in both passes, and frozen weights of the
    # objective in the forward pass.
    count = microbatches_of(config).accumulation
    width = jnp.dtype(config.train.compute_dtype).itemsize
    weights = 2 * counts.gathered + counts.reference  # elements read in both passes
    per_microbatch = 2 * memory["gradients"] + 2 * counts.saved + width * weights
    moved = 2 * trained + frozen + count * per_microbatch

    collectives = _collectives(config, topology, work, counts)
    links = sum(each.sent * each.needed for each in collectives if not each.between_slices)
    network = sum(each.sent * each.needed for each in collectives if each.between_slices)
    computed = count * counts.computed
    return StepCost(
        memory=memory,
        available=topology.chip.hbm,
        model_flops=counts.flops,
        computed_flops=computed,
        recomputed_flops=count * max(counts.computed - counts.plain, 0.0),
        hbm_bytes=moved,
        collectives=collectives,
        least={"compute": computed, "memory": moved, "links": links, "network": network},
        useful_share=counts.useful / counts.flops,
    )


def _peak_bytes(config: Config, topology: Topology, work: Work) -> float:
    """Estimate the bytes of temporary activations at the peak of memory use, without the residuals of the forward pass.

    The peak is after the forward pass, with the gradient of the logits, or in the backward pass of a block. At that time, the
    arrays outside the blocks, such as the logits, are no longer needed.
    """
    target = topology.target
    part = one_device(config)

    # On GPUs, and with a sharded vocabulary, the gradient of the logits replaces the logits.
    is_copied = topology.chip.tpu and part.model.vocab_size == config.model.vocab_size
    logits = trace(part, target, work.on_one_device(config), 2).largest if is_copied else 0.0

    # While a block is recomputed, its pairs of token and expert, for all devices along `expert`, and their gradients exist at
    # the same time. On GPUs, this also holds without recomputation: loops over tiles write the gradients to new arrays.
    one = _counts(config, target, work, 1)
    two = _counts(config, target, work, 2)
    outside = one.saved - (two.saved - one.saved)
    growth = _growth_of_pairs(config, target, work)
    of_pairs = two.unsaved_pairs - one.unsaved_pairs
    of_block = 0.0
    if config.train.remat != "none":
        of_block = two.unsaved - one.unsaved + (2 * growth - 1) * of_pairs
    elif not topology.chip.tpu:
        of_block = growth * of_pairs
    return max(logits, of_block - outside)


def _growth_of_pairs(config: Config, target: Target, work: Work) -> float:
    """Return by which factor the rows for pairs of token and expert grow, because a device holds the pairs of all devices.

    Tiles also have padding, for fewer experts.
    """
    model = config.model
    if not model.n_experts:
        return 1.0
    part = one_device(config)
    tokens = part.train.batch_size * work.windows * part.window // config.mesh.context
    pairs = tokens * model.experts_per_token
    ways = config.mesh.expert
    of_one = pair_rows(target, pairs, model.n_experts)
    of_all = pair_rows(target, ways * pairs, model.n_experts // ways)
    return of_all / of_one


def _collectives(config: Config, topology: Topology, work: Work, counts: _Counts) -> tuple[Collective, ...]:
    """Return the collectives that the sharding table implies for a step; `counts`: costs with all layers."""
    part = one_device(config)
    step = Step(
        config=config,
        slices=topology.slices,
        microbatches=microbatches_of(config).accumulation,
        width=jnp.dtype(config.train.compute_dtype).itemsize,
        rows=part.train.batch_size * work.windows,
        vocab=part.model.vocab_size,
        weights=counts.gathered,
        reduced=counts.reduced,
        scattered=counts.scattered,
        keys=_keys_and_values(config) * work.windows,
        context_attention=_context_attention(config, topology.target),
        halo_layers=_halo_layers(config, topology.target),
        halo=halos_of(config).tokens,
        logit_chunks=_logit_chunks(config),
        reference=(work.frozen_model or config.model) if work.frozen else None,
        reference_weights=counts.reference,
    )
    return merged(implied(step))


def extrapolated(one: float, two: float, layers: int) -> float:
    """Compute an affine function of the number of layers from its values at one and two layers."""
    return one + (layers - 1) * (two - one)


def _logit_chunks(config: Config) -> int:
    """Return the number of chunks of the logits of a microbatch (`train.loss.chunked`)."""
    context = config.mesh.context
    chunk = config.train.loss_chunk or config.window
    of_device = math.ceil(chunk / context)
    return math.ceil(config.window / context / of_device)


def _context_attention(config: Config, target: Target) -> str:
    """Return how keys reach the queries along context: gathered, halo or ring; "": no attention divides positions.

    In layers with a halo (`_halo_layers`), gathered and ring do not apply.
    """
    attention = choose_attention(config, target).attend
    for name, kernel in CONTEXT_KERNELS.items():
        if kernel is attention and name == "splash":
            return "halo" if halos_of(config).in_all_layers else "gathered"
        if kernel is attention:
            return name
    return ""


def _halo_layers(config: Config, target: Target) -> int:
    """Return the number of layers in which a device receives only the keys before its tokens."""
    attention = _context_attention(config, target)
    halos = halos_of(config)
    is_mixed = attention in ("gathered", "ring") and not halos.in_all_layers
    return halos.layers if attention == "halo" or is_mixed else 0


def _key_bytes(config: Config, target: Target) -> float:
    """Estimate the bytes of the keys and values that a device receives for a block along context, and of their gradients.

    Gathered keys span complete windows, with float32 gradients. A ring holds the keys of two devices, because the next
    keys arrive during the computation. A layer without a halo needs the most.
    """
    share = 1 / config.mesh.context
    copies = {"gathered": 1.0, "halo": share + halos_of(config).tokens / config.window, "ring": 2 * share, "": 0.0}
    attention = _context_attention(config, target)
    if _halo_layers(config, target) == config.model.n_layer:
        attention = "halo"
    width = jnp.dtype(config.train.compute_dtype).itemsize
    return copies[attention] * _keys_and_values(config) * (width + 4)


def _keys_and_values(config: Config) -> float:
    """Return the number of elements of the keys and values of a block, in whole windows of a microbatch of one device."""
    part = one_device(config)
    heads = part.model.kv_heads
    if config.mesh.tensor > 1 and config.model.kv_heads % config.mesh.tensor:
        heads = part.model.n_head  # repeated for each query head
    return 2.0 * part.train.batch_size * part.window * heads * part.model.head_width


@cache
def _counts(config: Config, target: Target, work: Work, layers: int) -> _Counts:
    """Count the costs of a model with this number of layers."""
    program = abstract_program(config, target, work, layers)
    part = one_device(config)
    of_part = work.on_one_device(config)
    traced = trace(part, target, of_part, layers)
    plain = traced
    if config.train.remat != "none":
        plain = trace(part, target, of_part, layers, remat=False)
    flops, useful = step_flops(program, work)

    # The gradient of a leaf is summed over the axes of rows and positions that do not shard it, and scattered along fsdp.
    summed = (*RULES["batch"], *RULES["length"])
    reduced = dict.fromkeys(_subsets(summed), 0.0)
    scattered = 0.0
    params = program.abstract_state.params
    for leaf in jax.tree.leaves(params):
        axes = _axes(leaf)
        size = shard_elements(leaf)
        unsharded = tuple(axis for axis in summed if axis not in axes)
        reduced[unsharded] += size
        if "fsdp" in axes:
            scattered += size

    return _Counts(
        memory=argument_bytes(program, work) | {"gradients": shard_bytes(params)},
        flops=flops,
        useful=useful,
        computed=traced.flops,
        plain=plain.flops,
        saved=traced.saved,
        unsaved=plain.saved,
        of_pairs=traced.of_pairs,
        unsaved_pairs=plain.of_pairs,
        gathered=gathered(program),
        reference=gathered_elements(of_objective(program.abstract_frozen), program.mesh) if work.frozen else 0.0,
        reduced=reduced,
        scattered=scattered,
    )


def gathered(program: Program) -> float:
    """Count the elements of a device's weights while they are gathered along fsdp."""
    return gathered_elements(program.abstract_weights, program.mesh)


def gathered_elements(weights: Any, mesh: Any) -> float:
    """Count the elements of weights on one device of a mesh while they are gathered along fsdp."""
    total = 0.0
    for leaf in jax.tree.leaves(weights):
        ways = mesh.shape["fsdp"] if "fsdp" in _axes(leaf) else 1
        total += ways * shard_elements(leaf)
    return total


def shard_elements(tree: Any) -> float:
    """Count the elements of sharded arrays on one device."""
    return float(sum(math.prod(leaf.sharding.shard_shape(leaf.shape)) for leaf in jax.tree.leaves(tree)))


def _axes(leaf: Any) -> set[str]:
    """Return the axes of the mesh that shard an array."""
    return set(jax.tree.leaves(tuple(leaf.sharding.spec)))


def _subsets(axes: tuple[str, ...]) -> list[tuple[str, ...]]:
    """Return all selections of axes, from none to all, each in the order of `axes`."""
    return [chosen for n in range(len(axes) + 1) for chosen in combinations(axes, n)]


def microbatches_of(config: Config) -> Microbatches:
    """Return the number of microbatches of a step on a resolved mesh, and their rows."""
    return microbatches(config.train, row_shards(sizes_of(config.mesh)))


def argument_bytes(program: Program, work: Work = NEXT_TOKEN) -> dict[str, float]:
    """Count the bytes of a step's inputs on one device, by kind."""
    state = program.abstract_state
    kinds = {
        "parameters": shard_bytes((state.params, program.abstract_frozen)),
        "optimizer": shard_bytes(state.opt_state),
    }
    if state.ema is not None:
        kinds["average"] = shard_bytes(state.ema)
    kinds["batch"] = shard_bytes(batch_of(program, work))
    return kinds


class StepFlops(NamedTuple):
    """FLOPs of a step on one device.

    Attributes:
        computed: FLOPs that the device computes, including padding and products that other devices repeat.
        useful: an equal share of the model's FLOPs.
    """

    computed: float
    useful: float


def step_flops(program: Program, work: Work = NEXT_TOKEN) -> StepFlops:
    """Compute the FLOPs of a step on one device with `flops_per_token`."""
    config = program.config
    tokens = config.window * work.windows  # tokens of a row

    # Padding is computed as well, and devices along tensor may repeat products.
    device_rows = math.prod(program.microbatches) / batch_ways(program.mesh)
    device_tokens = tokens / config.mesh.context
    computed = device_tokens * device_rows * token_flops(config, config.window)

    per_token = flops_per_token(program.model, program.abstract_weights, config.window, config.lora)
    useful = per_token * config.train.batch_size / program.mesh.size
    return StepFlops(computed=computed, useful=tokens * useful)


def token_flops(config: Config, T: int) -> float:
    """Compute one device's FLOPs of training on one token, in a context of T tokens."""
    part = one_device(config)
    weights = abstract_params(part.model)
    return flops_per_token(part.model, weights, T, part.lora)


def shard_bytes(tree: Any) -> float:
    """Compute the bytes that a tree of sharded arrays, or of their shapes, takes on one device."""
    total = 0
    for leaf in jax.tree.leaves(tree):
        shape = leaf.sharding.shard_shape(leaf.shape)
        total += math.prod(shape) * leaf.dtype.itemsize
    return float(total)
