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
    """The sizes that determine the collectives of a step."""

    config: Config  # settings of the run, with a resolved mesh
    slices: int  # number of slices, along data
    microbatches: int  # number of microbatches
    width: int  # bytes of an element in the compute dtype
    rows: int  # windows of a microbatch on a device
    vocab: int  # size of the vocabulary on a device
    weights: float  # elements of the weights, gathered along fsdp
    gradients: GradientElements
    keys: float  # elements of the keys and values of a block, in whole windows
    key_exchange: KeyExchange
    logit_chunks: int  # chunks of the logits of a microbatch (train.loss_chunk)
    reference: ModelConfig | None  # architecture of the frozen weights that the objective reads; None: no such weights
    reference_weights: float  # elements of the weights of `reference`, gathered along fsdp

    @property
    def mesh(self) -> dict[str, int]:
        """Size of each axis of the mesh."""
        return sizes_of(self.config.mesh)

    @property
    def stream(self) -> float:
        """Elements of the residual stream of a microbatch on a device."""
        return self.rows * self.config.window / self.mesh["context"] * self.config.model.n_embd

    @property
    def table(self) -> float:
        """Elements of an untied token table, which is not gathered: its rows are exchanged instead."""
        return self.table_of(self.config.model)

    def table_of(self, model: ModelConfig) -> float:
        """Return the elements of an untied token table of a model, like `table`."""
        return 0.0 if model.tie_embeddings else self.vocab * model.n_embd


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
    size = step.width * (step.weights - step.table)
    group = step.mesh["fsdp"]
    count = step.microbatches
    yield Collective("all-gather", size, group, 2 * count, axes=("fsdp",), site="weights", avoidable=2 * count - 1)
    if step.reference:
        size = step.width * (step.reference_weights - step.table_of(step.reference))
        site = "weights of the reference"
        yield Collective("all-gather", size, group, count, axes=("fsdp",), site=site, avoidable=count - 1)


def gradient_sums(step: StepSizes) -> Iterator[Collective]:
    """Yield the sums of the gradients: a reduce-scatter along fsdp, then all-reduces over the other axes and slices."""
    count = step.microbatches
    table = 0.0 if step.config.lora.rank else step.table / step.mesh["fsdp"]
    elements = step.gradients._replace(scattered=step.gradients.scattered - table)
    # A program may add the gradients of all microbatches first.
    yield from _sums(step, elements, count, avoidable=count - 1, site="gradients")


def repeated_chunks(step: StepSizes) -> Iterator[Collective]:
    """Yield the collectives of each chunk of logits after the first: the gathers of the head, and the sum of its gradient."""
    count = step.microbatches * (step.logit_chunks - 1)
    group = step.mesh["fsdp"]
    head = step.vocab * step.config.model.n_embd
    size = step.width * head
    site = "head, for each chunk"
    # All are avoidable: a program may keep the gathered head, and add the gradients of all chunks first.
    yield Collective("all-gather", size, group, 2 * count, axes=("fsdp",), site=site, avoidable=2 * count)
    if not step.config.lora.rank:
        shard = head / group
        elements = GradientElements(summed={("data", "expert", "context"): shard}, scattered=shard)
        yield from _sums(step, elements, count, avoidable=count, site=site)


def _sums(step: StepSizes, gradients: GradientElements, count: int, avoidable: int, site: str) -> Iterator[Collective]:
    """Yield the collectives that sum gradients, each executed `count` times.

    Args:
        step: the sizes of the step.
        gradients: elements of the gradients.
        count: number of executions.
        avoidable: number of these executions that a program may avoid.
        site: name of the gradients.
    """
    size = step.width * gradients.scattered
    yield Collective("reduce-scatter", size, step.mesh["fsdp"], count, axes=("fsdp",), site=site, avoidable=avoidable)

    for names, elements in gradients.summed.items():
        axes = tuple(axis for axis in names if step.mesh[axis] > 1)
        group = math.prod(step.mesh[axis] for axis in axes)
        size = step.width * elements
        if not size or group == 1:
            continue
        if step.slices > 1 and "data" in axes:
            # Between slices, each device sums one shard of the gradients, already summed within its slice.
            group //= step.slices
            yield Collective(
                kind="all-reduce",
                bytes=size / group,
                group=step.slices,
                times=count,
                between_slices=True,
                axes=("data",),
                site=site,
                avoidable=avoidable,
            )
        yield Collective("all-reduce", size, group, count, axes=axes, site=site, avoidable=avoidable)


def embedding_exchanges(step: StepSizes) -> Iterator[Collective]:
    """Yield the exchanges of token embeddings along fsdp, forward and backward, because the table is sharded."""
    times = 2 * step.microbatches
    size = step.width * step.stream
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

    # Bytes per element of each sum of a block, forward and backward.
    widths = [step.width, step.width]  # attention
    if model.n_experts:
        widths += [4, step.width]
    else:
        widths += [step.width, step.width]
    if model.n_experts and model.shared_experts:
        widths += [step.width, step.width]
        avoidable = times  # a program may first add the gradients of the input of the experts and of this MLP

    for width in sorted(set(widths)):
        yield Collective(
            kind="all-reduce",
            bytes=width * step.stream,
            group=step.mesh["tensor"],
            times=widths.count(width) * times,
            axes=("tensor",),
            site="activations of blocks",
            avoidable=avoidable if width == step.width else 0,
        )


def expert_exchanges(step: StepSizes) -> Iterator[Collective]:
    """Yield the exchanges of expert parallelism: tokens to the experts and float32 outputs back, and their gradients."""
    times = step.config.model.n_layer * step.microbatches
    group = step.mesh["expert"]
    size = step.width * step.stream * group
    yield Collective("all-gather", size, group, 2 * times, axes=("expert",), site="tokens of experts")
    for width in (step.width, 4):
        size = width * step.stream
        yield Collective("reduce-scatter", size, group, times, axes=("expert",), site="tokens of experts")


def key_exchanges(step: StepSizes) -> Iterator[Collective]:
    """Yield the exchanges of keys and values along context, forward and backward, and of their gradients.

    With gathered keys, each device receives the summed gradients of its keys and values. With a halo, only the devices with the
    tokens before a chunk send keys and values to it. In a ring, keys and values visit all other devices, and the float32 sums
    of their gradients return to the device of the keys after the last hop.
    """
    group = step.mesh["context"]
    axes = ("context",)
    size = step.width * step.keys
    exchange = step.key_exchange
    if exchange.halo_layers:
        times = exchange.halo_layers * step.microbatches
        sent = size * exchange.halo / step.config.window
        yield Collective("collective-permute", sent, group, 2 * times, axes=axes, site="keys and values")
        yield Collective("collective-permute", sent, group, times, axes=axes, site="gradients of keys")

    times = (step.config.model.n_layer - exchange.halo_layers) * step.microbatches
    if exchange.all_keys == "gathered":
        yield Collective("all-gather", size, group, 2 * times, axes=axes, site="keys and values")
        yield Collective("reduce-scatter", size / group, group, times, axes=axes, site="gradients of keys")
    if exchange.all_keys == "ring":
        hops = 2 * (group - 1) * times
        yield Collective("collective-permute", size / group, group, hops, axes=axes, site="keys and values")
        float32_size = 4.0 * step.keys / group
        yield Collective("collective-permute", float32_size, group, group * times, axes=axes, site="gradients of keys")


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
