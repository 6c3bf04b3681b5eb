"""The collectives that the sharding table implies for a training step: one function for each reason to communicate."""

from __future__ import annotations

import math
from collections.abc import Callable, Iterator, Mapping
from typing import NamedTuple

from jaxgpt.config import Config, ModelConfig
from jaxgpt.parallel.mesh import sizes_of
from jaxgpt.plan.collectives import Collective


class Step(NamedTuple):
    """The sizes that determine the collectives of a step."""

    config: Config  # settings of the run, with a resolved mesh
    slices: int  # number of slices, along data
    microbatches: int  # number of microbatches
    width: int  # bytes of a number in the compute dtype
    rows: int  # windows of a microbatch on a device
    vocab: int  # ids of a device
    weights: float  # elements of the weights, gathered along fsdp
    # Elements of the shards of gradients, by the axes over which they are summed.
    reduced: Mapping[tuple[str, ...], float]
    scattered: float  # elements of the shards of gradients that are scattered along fsdp
    keys: float = 0.0  # elements of the keys and values of a block, in whole windows
    context_attention: str = ""  # gathered, halo, ring, or "": positions are not divided by a kernel
    halo_layers: int = 0  # number of layers in which a device receives only the keys before its tokens
    halo: int = 0  # number of tokens with these keys
    logit_chunks: int = 1  # chunks of the logits of a microbatch (train.loss_chunk)
    reference: ModelConfig | None = None  # architecture of the frozen weights that the objective reads
    reference_weights: float = 0.0  # elements of these weights, gathered along fsdp

    @property
    def sizes(self) -> dict[str, int]:
        """Size of each axis of the mesh."""
        return sizes_of(self.config.mesh)

    @property
    def tokens(self) -> float:
        """Elements of the residual stream of a microbatch on a device."""
        return self.rows * self.config.window / self.sizes["context"] * self.config.model.n_embd

    @property
    def table(self) -> float:
        """Elements of an untied token table, which is not gathered: its rows are exchanged instead."""
        return self.table_of(self.config.model)

    def table_of(self, model: ModelConfig) -> float:
        """Return the elements of an untied token table of a model, like `table`."""
        return 0.0 if model.tie_embeddings else self.vocab * model.n_embd


def implied(step: Step) -> Iterator[Collective]:
    """Yield the collectives of a step, per device; groups of one device do not communicate."""
    for exchange in EXCHANGES:
        yield from (one for one in exchange(step) if one.group > 1 and one.times)


def weights(step: Step) -> Iterator[Collective]:
    """Yield the gathers of the weights along fsdp, in both passes of each microbatch, and of the reference's weights.

    All gathers except the first are avoidable: a program may keep the gathered weights in memory.
    """
    size = step.width * (step.weights - step.table)
    group = step.sizes["fsdp"]
    count = step.microbatches
    yield Collective("all-gather", size, group, 2 * count, axes=("fsdp",), site="weights", avoidable=2 * count - 1)
    if step.reference:
        size = step.width * (step.reference_weights - step.table_of(step.reference))
        site = "weights of the reference"
        yield Collective("all-gather", size, group, count, axes=("fsdp",), site=site, avoidable=count - 1)


def gradients(step: Step) -> Iterator[Collective]:
    """Yield the sums of the gradients: a reduce-scatter along fsdp, then all-reduces over the other axes and slices."""
    count = step.microbatches
    free = count - 1  # a program may add the gradients of all microbatches first
    table = 0.0 if step.config.lora.rank else step.table / step.sizes["fsdp"]
    yield from _sums(step, step.scattered - table, step.reduced, count, free, "gradients")


def logit_chunks(step: Step) -> Iterator[Collective]:
    """Yield what each chunk of logits after the first repeats: the gathers of the head, and the sum of its gradient."""
    count = step.microbatches * (step.logit_chunks - 1)
    group = step.sizes["fsdp"]
    head = step.vocab * step.config.model.n_embd
    size = step.width * head
    site = "head, for each chunk"
    # All are avoidable: a program may keep the gathered head, and add the gradients of all chunks first.
    yield Collective("all-gather", size, group, 2 * count, axes=("fsdp",), site=site, avoidable=2 * count)
    if not step.config.lora.rank:
        shard = head / group
        yield from _sums(step, shard, {("data", "expert", "context"): shard}, count, count, site)


def _sums(
    step: Step, scattered: float, reduced: Mapping[tuple[str, ...], float], count: int, avoidable: int, site: str
) -> Iterator[Collective]:
    """Yield the collectives that sum gradients, each executed `count` times.

    Args:
        step: the sizes of the step.
        scattered: elements of the shards of gradients that are scattered along fsdp.
        reduced: elements of the shards of gradients, by the axes over which they are summed.
        count: number of executions.
        avoidable: number of these executions that a program may avoid.
        site: name of the gradients.
    """
    size = step.width * scattered
    yield Collective("reduce-scatter", size, step.sizes["fsdp"], count, axes=("fsdp",), site=site, avoidable=avoidable)

    for names, elements in reduced.items():
        axes = tuple(axis for axis in names if step.sizes[axis] > 1)
        group = math.prod(step.sizes[axis] for axis in axes)
        size = step.width * elements
        if not size or group == 1:
            continue
        if step.slices > 1 and "data" in axes:
            # Between slices, each device sums one shard of the gradients, already summed within its slice.
            group //= step.slices
            yield Collective("all-reduce", size / group, step.slices, count, True, ("data",), site, avoidable=avoidable)
        yield Collective("all-reduce", size, group, count, axes=axes, site=site, avoidable=avoidable)


def embeddings(step: Step) -> Iterator[Collective]:
    """Yield the exchanges of token embeddings along fsdp, forward and backward: the table is sharded."""
    times = 2 * step.microbatches
    size = step.width * step.tokens
    yield Collective(
        "all-to-all", size, step.sizes["fsdp"], times, axes=("fsdp",), site="token embeddings", avoidable=times
    )


def blocks(step: Step) -> Iterator[Collective]:
    """Yield the all-reduces of tensor parallelism in each block, in both passes.

    The forward pass sums the outputs of attention and MLP, and the backward pass sums the gradients of their inputs.

    The outputs of experts are summed in float32; the MLP of the shared experts has its own sums.
    """
    model = step.config.model
    times = model.n_layer * step.microbatches
    of_attention = of_mlp = [step.width, step.width]
    of_experts = [4, step.width]
    widths = [*of_attention, *of_mlp]
    free = 0
    if model.n_experts:
        widths = [*of_attention, *of_experts]
        if model.shared_experts:
            widths += of_mlp
            free = times  # a program may first add the gradients of the input of the experts and of this MLP
    group = step.sizes["tensor"]
    for width in sorted(set(widths)):
        count = widths.count(width) * times
        size = width * step.tokens
        avoidable = free if width == step.width else 0
        site = "activations of blocks"
        yield Collective("all-reduce", size, group, count, axes=("tensor",), site=site, avoidable=avoidable)


def experts(step: Step) -> Iterator[Collective]:
    """Yield the exchanges of expert parallelism: tokens to the experts and float32 outputs back, and their gradients."""
    times = step.config.model.n_layer * step.microbatches
    group = step.sizes["expert"]
    size = step.width * step.tokens * group
    yield Collective("all-gather", size, group, 2 * times, axes=("expert",), site="tokens of experts")
    for width in (step.width, 4):
        size = width * step.tokens
        yield Collective("reduce-scatter", size, group, times, axes=("expert",), site="tokens of experts")


def keys(step: Step) -> Iterator[Collective]:
    """Yield the exchanges of keys and values along context, forward and backward, and of their gradients.

    With gathered keys, each device receives the summed gradients of its keys and values. With a halo, only the devices with the
    tokens before a chunk send keys and values to it. In a ring, keys and values visit all other devices, and the float32 sums
    of their gradients return to their own device after the last one.
    """
    group = step.sizes["context"]
    size = step.width * step.keys
    if step.halo_layers:
        times = step.halo_layers * step.microbatches
        sent = size * step.halo / step.config.window
        yield Collective("collective-permute", sent, group, 2 * times, axes=("context",), site="keys and values")
        yield Collective("collective-permute", sent, group, times, axes=("context",), site="gradients of keys")

    times = (step.config.model.n_layer - step.halo_layers) * step.microbatches
    if step.context_attention == "gathered":
        yield Collective("all-gather", size, group, 2 * times, axes=("context",), site="keys and values")
        yield Collective("reduce-scatter", size / group, group, times, axes=("context",), site="gradients of keys")
    if step.context_attention == "ring":
        hops = 2 * (group - 1) * times
        yield Collective("collective-permute", size / group, group, hops, axes=("context",), site="keys and values")
        size = 4.0 * step.keys / group
        yield Collective("collective-permute", size, group, group * times, axes=("context",), site="gradients of keys")


# The functions are in the order of a step. For a new axis of the mesh, add a function.
EXCHANGES: tuple[Callable[[Step], Iterator[Collective]], ...] = (
    embeddings,
    weights,
    blocks,
    experts,
    keys,
    logit_chunks,
    gradients,
)
