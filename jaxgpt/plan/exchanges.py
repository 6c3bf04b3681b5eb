"""The collectives that the sharding table implies for a training step: one function for each reason to communicate."""

from __future__ import annotations

import math
from collections.abc import Callable, Iterator
from typing import NamedTuple

from jaxgpt.config import Config, ModelConfig
from jaxgpt.parallel.mesh import sizes_of
from jaxgpt.plan.attention import KeyExchange
from jaxgpt.plan.collectives import Collective
from jaxgpt.plan.counts import GradientElements


class StepSizes(NamedTuple):
    """The sizes that determine the collectives of a step. Numbers of windows, rows and elements are numbers per device."""

    config: Config  # settings of the run, with a resolved mesh
    slices: int  # number of slices, along data
    microbatches: int  # number of microbatches of the step
    windows: int  # number of windows of a microbatch
    logit_chunks: int  # number of chunks of the logits of a microbatch (train.loss_chunk)
    key_exchange: KeyExchange
    element_bytes: int  # bytes of an element in the compute dtype
    vocab_size: int  # rows of the token table, which `tensor` may divide
    weight_elements: float  # elements of the weights that are gathered along fsdp: all except an untied token table
    reference_elements: float  # elements of the objective's frozen weights, also gathered; 0: no frozen weights
    gradients: GradientElements
    key_elements: float  # elements of the keys and values of a block, in whole windows

    @property
    def mesh(self) -> dict[str, int]:
        """Size of each axis of the mesh."""
        return sizes_of(self.config.mesh)

    @property
    def stream_elements(self) -> float:
        """Elements of the residual stream of a microbatch."""
        return self.windows * self.config.window / self.mesh["context"] * self.config.model.n_embd


def untied_table_elements(model: ModelConfig, vocab_size: int) -> float:
    """Return the elements of an untied token table of `vocab_size` rows; 0 for tied embeddings.

    Along fsdp, an untied table is not gathered: the embeddings of its rows are exchanged instead (`embedding_exchanges`).
    """
    return 0.0 if model.tie_embeddings else vocab_size * model.n_embd


def implied(step: StepSizes) -> Iterator[Collective]:
    """Yield the collectives of a step, per device; groups of one device do not communicate."""
    for exchange in EXCHANGES:
        for collective in exchange(step):
            if collective.group > 1 and collective.times:
                yield collective


def weight_gathers(step: StepSizes) -> Iterator[Collective]:
    """Yield the gathers of the weights along fsdp, in both passes of each microbatch, and of the reference's weights.

    All gathers except the first are avoidable: a program may keep the gathered weights in memory.
    """
    group = step.mesh["fsdp"]
    count = step.microbatches
    size = step.element_bytes * step.weight_elements
    yield Collective("all-gather", size, group, 2 * count, axes=("fsdp",), site="weights", avoidable=2 * count - 1)
    if step.reference_elements:
        reference_size = step.element_bytes * step.reference_elements
        site = "weights of the reference"
        yield Collective("all-gather", reference_size, group, count, axes=("fsdp",), site=site, avoidable=count - 1)


def gradient_sums(step: StepSizes) -> Iterator[Collective]:
    """Yield the sums of the gradients: a reduce-scatter along fsdp, then all-reduces over the other axes and slices."""
    count = step.microbatches
    gradients = step.gradients
    if not step.config.lora.rank:
        # The gradient of an untied token table is exchanged in rows (`embedding_exchanges`), not scattered.
        table = untied_table_elements(step.config.model, step.vocab_size) / step.mesh["fsdp"]
        gradients = gradients._replace(scattered=gradients.scattered - table)
    # A program may add the gradients of all microbatches first.
    yield from _sums(step, gradients, count, avoidable=count - 1, site="gradients")


def repeated_chunks(step: StepSizes) -> Iterator[Collective]:
    """Yield the collectives of each chunk of logits after the first: the gathers of the head, and the sum of its gradient."""
    count = step.microbatches * (step.logit_chunks - 1)
    group = step.mesh["fsdp"]
    head_elements = step.vocab_size * step.config.model.n_embd
    size = step.element_bytes * head_elements
    site = "head, for each chunk"
    # All are avoidable: a program may keep the gathered head, and add the gradients of all chunks first.
    yield Collective("all-gather", size, group, 2 * count, axes=("fsdp",), site=site, avoidable=2 * count)
    if not step.config.lora.rank:
        shard = head_elements / group
        gradient = GradientElements(summed={("data", "expert", "context"): shard}, scattered=shard)
        yield from _sums(step, gradient, count, avoidable=count, site=site)


def _sums(step: StepSizes, gradients: GradientElements, count: int, avoidable: int, site: str) -> Iterator[Collective]:
    """Yield the collectives that sum gradients, each executed `count` times.

    Args:
        step: the sizes of the step.
        gradients: elements of the gradients.
        count: number of executions.
        avoidable: number of these executions that a program may avoid.
        site: name of the gradients.
    """
    scattered_size = step.element_bytes * gradients.scattered
    yield Collective(
        "reduce-scatter", scattered_size, step.mesh["fsdp"], count, axes=("fsdp",), site=site, avoidable=avoidable
    )

    for names, elements in gradients.summed.items():
        axes = tuple(axis for axis in names if step.mesh[axis] > 1)
        group = math.prod(step.mesh[axis] for axis in axes)
        size = step.element_bytes * elements
        if not size or group == 1:
            continue
        crosses_slices = step.slices > 1 and "data" in axes
        group_in_slice = group // step.slices if crosses_slices else group
        if crosses_slices:
            # Between slices, each device sums one shard of the gradients, already summed within its slice.
            yield Collective(
                kind="all-reduce",
                bytes=size / group_in_slice,
                group=step.slices,
                times=count,
                between_slices=True,
                axes=("data",),
                site=site,
                avoidable=avoidable,
            )
        yield Collective("all-reduce", size, group_in_slice, count, axes=axes, site=site, avoidable=avoidable)


def embedding_exchanges(step: StepSizes) -> Iterator[Collective]:
    """Yield the exchanges of token embeddings along fsdp, forward and backward, because the table is sharded."""
    times = 2 * step.microbatches
    size = step.element_bytes * step.stream_elements
    yield Collective(
        "all-to-all", size, step.mesh["fsdp"], times, axes=("fsdp",), site="token embeddings", avoidable=times
    )


def block_sums(step: StepSizes) -> Iterator[Collective]:
    """Yield the all-reduces of tensor parallelism in each block, in both passes.

    The forward pass sums the outputs of attention and MLP, and the backward pass sums the gradients of their inputs.

    The outputs of experts are summed in float32; the MLP of the shared experts has separate sums.
    """
    model = step.config.model
    times = model.n_layer * step.microbatches
    avoidable = 0

    # List the bytes per element of each sum of a block, forward and backward.
    compute = step.element_bytes
    widths = [compute, compute]  # attention
    if model.n_experts:
        widths += [4, compute]
    else:
        widths += [compute, compute]
    if model.n_experts and model.shared_experts:
        widths += [compute, compute]
        avoidable = times  # a program may first add the gradients of the input of the experts and of this MLP

    for width in sorted(set(widths)):
        yield Collective(
            kind="all-reduce",
            bytes=width * step.stream_elements,
            group=step.mesh["tensor"],
            times=widths.count(width) * times,
            axes=("tensor",),
            site="activations of blocks",
            avoidable=avoidable if width == compute else 0,
        )


def expert_exchanges(step: StepSizes) -> Iterator[Collective]:
    """Yield the exchanges of expert parallelism: tokens to the experts and float32 outputs back, and their gradients."""
    times = step.config.model.n_layer * step.microbatches
    group = step.mesh["expert"]
    gathered_size = step.element_bytes * step.stream_elements * group
    yield Collective("all-gather", gathered_size, group, 2 * times, axes=("expert",), site="tokens of experts")
    for width in (step.element_bytes, 4):
        size = width * step.stream_elements
        yield Collective("reduce-scatter", size, group, times, axes=("expert",), site="tokens of experts")


def key_exchanges(step: StepSizes) -> Iterator[Collective]:
    """Yield the exchanges of keys and values along context, forward and backward, and of their gradients.

    With gathered keys, each device receives the summed gradients of its keys and values. With a halo, only the devices with the
    tokens before a chunk send keys and values to it. In a ring, keys and values visit all other devices, and the float32 sums
    of their gradients return to the device of the keys after the last hop.
    """
    group = step.mesh["context"]
    axes = ("context",)
    size = step.element_bytes * step.key_elements
    exchange = step.key_exchange

    in_halo_layers = exchange.halo_layers * step.microbatches
    if in_halo_layers:
        halo_size = size * exchange.halo / step.config.window
        yield Collective("collective-permute", halo_size, group, 2 * in_halo_layers, axes=axes, site="keys and values")
        yield Collective("collective-permute", halo_size, group, in_halo_layers, axes=axes, site="gradients of keys")

    in_other_layers = (step.config.model.n_layer - exchange.halo_layers) * step.microbatches
    if exchange.all_keys == "gathered":
        yield Collective("all-gather", size, group, 2 * in_other_layers, axes=axes, site="keys and values")
        yield Collective("reduce-scatter", size / group, group, in_other_layers, axes=axes, site="gradients of keys")
    if exchange.all_keys == "ring":
        hops = 2 * (group - 1) * in_other_layers
        yield Collective("collective-permute", size / group, group, hops, axes=axes, site="keys and values")
        gradient_hops = group * in_other_layers
        gradient_size = 4.0 * step.key_elements / group
        yield Collective("collective-permute", gradient_size, group, gradient_hops, axes=axes, site="gradients of keys")


# The functions are in the order of a step. For a new axis of the mesh, add a function.
EXCHANGES: tuple[Callable[[StepSizes], Iterator[Collective]], ...] = (
    embedding_exchanges,
    weight_gathers,
    block_sums,
    expert_exchanges,
    key_exchanges,
    repeated_chunks,
    gradient_sums,
)
