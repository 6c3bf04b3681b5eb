"""Costs of a step on one device: counted for one and two layers, which is fast, and extrapolated to all layers."""

from __future__ import annotations

from functools import cache, partial
from itertools import combinations
from typing import NamedTuple

import jax

from jaxgpt.config import Config
from jaxgpt.kernels import Target
from jaxgpt.parallel.rules import RULES
from jaxgpt.plan.abstract import abstract_program, argument_bytes, step_flops
from jaxgpt.plan.microbatch import trace
from jaxgpt.plan.one_device import one_device
from jaxgpt.plan.shards import gathered_elements, shard_bytes, shard_elements, sharding_axes
from jaxgpt.plan.work import Work
from jaxgpt.train.adapters import of_objective
from jaxgpt.trainer.program import Program


class GradientElements(NamedTuple):
    """The elements of the gradients' shards on a device.

    Attributes:
        summed: numbers of elements, keyed by the axes over which the elements are summed.
        scattered: elements of the shards that are scattered along fsdp.
    """

    summed: dict[tuple[str, ...], float]
    scattered: float


class Counts(NamedTuple):
    """Costs of a step on one device. Each number is an affine function of the number of layers."""

    memory: dict[str, float]  # bytes of the arguments of the step and of the gradients, by kind
    model_flops: float  # model FLOPs of a step on this device
    useful_flops: float  # this device's equal share of the model's FLOPs
    flops: float  # FLOPs of a microbatch, with recomputation
    flops_without_remat: float  # FLOPs of a microbatch, without recomputation
    saved: float  # bytes that a microbatch saves for the backward pass
    saved_without_remat: float  # bytes saved without rematerialization
    saved_pairs: float  # bytes of `saved` in arrays with a row for each pair of token and expert
    saved_pairs_without_remat: float  # bytes of `saved_without_remat` in arrays with a row for each pair
    weights: float  # elements of the weights, gathered along fsdp
    reference_weights: float  # elements of the frozen weights of the objective, gathered along fsdp
    gradients: GradientElements


def extrapolated_counts(config: Config, target: Target, work: Work) -> Counts:
    """Return the costs of a run with all layers, extrapolated from one and two layers of each of its models."""
    short = work.with_teacher_layers(1)
    one = counts_of(config, target, short, 1)
    two = counts_of(config, target, short, 2)
    counts = jax.tree.map(partial(extrapolated, layers=config.model.n_layer), one, two)
    if work.teacher is None:
        return counts

    # `counts` has a teacher of one layer: add the costs of its other layers.
    longer = counts_of(config, target, work.with_teacher_layers(2), 1)
    other_layers = work.teacher.n_layer - 1
    return jax.tree.map(lambda total, a, b: total + other_layers * (b - a), counts, one, longer)


def extrapolated(one: float, two: float, layers: int) -> float:
    """Compute an affine function of the number of layers from its values at one and two layers."""
    return one + (layers - 1) * (two - one)


@cache
def counts_of(config: Config, target: Target, work: Work, layers: int) -> Counts:
    """Count the costs of a model with this number of layers."""
    program = abstract_program(config, target, work, layers)
    part = one_device(config)
    work_of_part = work.on_one_device(config)
    traced = trace(part, target, work_of_part, layers)
    without_remat = traced
    if config.train.remat != "none":
        without_remat = trace(part, target, work_of_part, layers, remat=False)

    flops = step_flops(program, work)
    reference_weights = 0.0
    if work.frozen_model(config) is not None:
        reference_weights = gathered_elements(of_objective(program.abstract.frozen), program.mesh)
    gradients = shard_bytes(program.abstract.state.params)
    return Counts(
        memory=argument_bytes(program, work) | {"gradients": gradients},
        model_flops=flops.computed,
        useful_flops=flops.useful,
        flops=traced.flops,
        flops_without_remat=without_remat.flops,
        saved=traced.saved,
        saved_without_remat=without_remat.saved,
        saved_pairs=traced.of_pairs,
        saved_pairs_without_remat=without_remat.of_pairs,
        weights=gathered_elements(program.abstract.weights, program.mesh),
        reference_weights=reference_weights,
        gradients=_gradient_elements(program),
    )


def _gradient_elements(program: Program) -> GradientElements:
    """Count the elements of the gradients of a program.

    The gradient of a leaf is summed over the axes of rows and positions that do not shard it, and scattered along fsdp.
    """
    axes = (*RULES["batch"], *RULES["length"])
    summed = dict.fromkeys(_subsets(axes), 0.0)
    scattered = 0.0
    for leaf in jax.tree.leaves(program.abstract.state.params):
        of_leaf = sharding_axes(leaf)
        size = shard_elements(leaf)
        unsharded = tuple(axis for axis in axes if axis not in of_leaf)
        summed[unsharded] += size
        if "fsdp" in of_leaf:
            scattered += size
    return GradientElements(summed, scattered)


def _subsets(axes: tuple[str, ...]) -> list[tuple[str, ...]]:
    """Return all selections of axes, from none to all, each in the order of `axes`."""
    return [chosen for n in range(len(axes) + 1) for chosen in combinations(axes, n)]
