"""Estimate memory, FLOPs and traffic of a training step from shapes and shardings, without compiling."""

from __future__ import annotations

import math
from dataclasses import replace

import jax.numpy as jnp

from jaxgpt.config import Config
from jaxgpt.errors import UserError
from jaxgpt.kernels import Target
from jaxgpt.parallel.mesh import resolve
from jaxgpt.plan.attention import key_bytes, key_elements, key_exchange
from jaxgpt.plan.collectives import Collective, merged
from jaxgpt.plan.cost import StepCost
from jaxgpt.plan.counts import Counts, counts_of, extrapolated_counts
from jaxgpt.plan.exchanges import StepSizes, implied, untied_table_elements
from jaxgpt.plan.microbatch import pair_rows, trace
from jaxgpt.plan.one_device import microbatches_of, one_device
from jaxgpt.plan.topology import Topology
from jaxgpt.plan.work import NEXT_TOKEN, Work

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
    counts = extrapolated_counts(config, topology.target, work)
    count = microbatches_of(config).accumulation
    memory = counts.memory | {"activations": _activation_bytes(config, topology, work, counts)}
    memory = {kind: memory[kind] for kind in KINDS if kind in memory}  # in the order of `KINDS`

    traffic = _memory_traffic(config, memory, counts)
    flops = count * counts.flops

    # Every program sends at least these bytes. Joined collectives have mean sizes, so the bytes are added before joining.
    collectives = _collectives(config, topology, work, counts)
    links = sum(each.sent * each.needed for each in collectives if not each.between_slices)
    network = sum(each.sent * each.needed for each in collectives if each.between_slices)
    return StepCost(
        memory=memory,
        available=topology.chip.hbm,
        model_flops=counts.model_flops,
        computed_flops=flops,
        recomputed_flops=count * max(counts.flops - counts.flops_without_remat, 0.0),
        hbm_bytes=traffic,
        collectives=merged(collectives),
        least={"compute": flops, "memory": traffic, "links": links, "network": network},
        useful_share=counts.useful_flops / counts.model_flops,
    )


def _memory_traffic(config: Config, memory: dict[str, float], counts: Counts) -> float:
    """Return the bytes that a step reads from and writes to device memory; `memory`: bytes of its arrays by kind."""
    # Per step, trained weights and optimizer state are read and written; frozen weights are only read.
    trained = memory["gradients"] + memory["optimizer"] + memory.get("average", 0.0)
    frozen = memory["parameters"] - memory["gradients"]

    # Per microbatch, gradients and activations are written and read. Weights are read in both passes, and frozen weights of the
    # objective in the forward pass.
    count = microbatches_of(config).accumulation
    width = jnp.dtype(config.train.compute_dtype).itemsize
    weights = 2 * counts.weights + counts.reference_weights
    per_microbatch = 2 * memory["gradients"] + 2 * counts.saved + width * weights
    return 2 * trained + frozen + count * per_microbatch


def _activation_bytes(config: Config, topology: Topology, work: Work, counts: Counts) -> float:
    """Estimate the bytes of activations at the peak of memory use: residuals, temporary arrays, and received keys."""
    # Experts hold the pairs of all devices along their axis (`kernels.experts`).
    other_pairs = (_growth_of_pairs(config, topology.target, work) - 1) * counts.saved_pairs
    temporary = _peak_bytes(config, topology, work.with_teacher_layers(1))
    return counts.saved + other_pairs + temporary + key_bytes(config, topology.target)


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
    one = counts_of(config, target, work, 1)
    two = counts_of(config, target, work, 2)
    saved_outside = one.saved - (two.saved - one.saved)
    growth = _growth_of_pairs(config, target, work)
    pairs_of_block = two.saved_pairs_without_remat - one.saved_pairs_without_remat
    of_block = 0.0
    if config.train.remat != "none":
        of_block = two.saved_without_remat - one.saved_without_remat + (2 * growth - 1) * pairs_of_block
    elif not topology.chip.tpu:
        of_block = growth * pairs_of_block
    return max(logits, of_block - saved_outside)


def _growth_of_pairs(config: Config, target: Target, work: Work) -> float:
    """Return the growth factor of a device's rows for pairs of token and expert due to expert parallelism.

    Each device has rows for the pairs of all devices along `expert`. The rows include the padding of tiles, which depends on
    the number of experts on a device.
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


def _collectives(config: Config, topology: Topology, work: Work, counts: Counts) -> tuple[Collective, ...]:
    """Return the collectives that the sharding table implies for a step; `counts`: costs with all layers."""
    part = one_device(config)
    vocab_size = part.model.vocab_size
    reference = work.frozen_model(config)
    reference_elements = 0.0
    if reference:
        reference_elements = counts.reference_weights - untied_table_elements(reference, vocab_size)
    sizes = StepSizes(
        config=config,
        slices=topology.slices,
        microbatches=microbatches_of(config).accumulation,
        windows=part.train.batch_size * work.windows,
        logit_chunks=_logit_chunks(config),
        key_exchange=key_exchange(config, topology.target),
        element_bytes=jnp.dtype(config.train.compute_dtype).itemsize,
        vocab_size=vocab_size,
        weight_elements=counts.weights - untied_table_elements(config.model, vocab_size),
        reference_elements=reference_elements,
        gradients=counts.gradients,
        key_elements=key_elements(config) * work.windows,
    )
    return tuple(implied(sizes))


def _logit_chunks(config: Config) -> int:
    """Return the number of chunks of the logits of a microbatch (`train.at_positions.chunked`)."""
    context = config.mesh.context
    chunk = config.train.loss_chunk or config.window
    of_device = math.ceil(chunk / context)
    return math.ceil(config.window / context / of_device)
