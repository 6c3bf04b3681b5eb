"""Sums over the rows of a batch: each device adds its rows, then an all-reduce adds the sums."""

from __future__ import annotations

from collections.abc import Callable
from typing import Any

import flax.linen as nn
import jax
from jax.flatten_util import ravel_pytree
from jax.sharding import PartitionSpec

from jaxgpt.train.loss import Objective
from jaxgpt.train.step import Sums, gradient_sums

SMALL = 1 << 18  # arrays with at most this many elements are concatenated for one all-reduce


def over_data(sums: Callable[..., Any]) -> Callable[..., Any]:
    """Wrap `sums(params, rows)`: call it on each device's rows, and all-reduce its results over "data".

    Arrays of up to `SMALL` elements are concatenated, because the all-reduce of each array costs one synchronization.
    The parameters must be replicated, and the rows sharded over "data" only.
    """

    def on_device(params: Any, rows: Any) -> Any:
        with nn.logical_axis_rules(()):
            leaves, tree = jax.tree.flatten(sums(params, rows))
        # Concatenate the small arrays, add over the devices, and restore the order of the arrays.
        small = {n: leaf for n, leaf in enumerate(leaves) if leaf.size <= SMALL}
        large = {n: leaf for n, leaf in enumerate(leaves) if leaf.size > SMALL}
        together, split = ravel_pytree(small)
        together, large = jax.lax.psum((together, large), "data")
        totals = split(together) | large
        return jax.tree.unflatten(tree, [totals[n] for n in range(len(leaves))])

    specs = PartitionSpec(), PartitionSpec("data")
    # check_vma=False: each device computes the gradients of its own rows. Otherwise JAX would insert one all-reduce per array.
    return jax.shard_map(on_device, in_specs=specs, out_specs=PartitionSpec(), check_vma=False)


def sums_by_device(
    params: Any, batch: Any, key: jax.Array | None, frozen: Any = (), *, objective: Objective, accumulation: int = 1
) -> tuple[Any, Sums]:
    """Compute `gradient_sums` of each device's rows, and all-reduce the results once: faster on CPU devices.

    Raises:
        ValueError: if `key` is given: all devices would draw equal dropout masks.
    """
    if key is not None:
        raise ValueError(
            "sums_by_device does not support dropout, because all devices would draw equal masks: pass no key"
        )

    def sums(weights: tuple[Any, Any], rows: Any) -> tuple[Any, Sums]:
        params, frozen = weights
        return gradient_sums(params, rows, None, frozen, objective=objective, accumulation=accumulation)

    result: tuple[Any, Sums] = over_data(sums)((params, frozen), batch)
    return result
