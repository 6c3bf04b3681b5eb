"""Equivalents of `ops.experts.experts` that compute only the chosen pairs of token and expert, and drop no pair.

Letters in names, here and in the modules `expert_pairs` and `sharded_experts`: E experts (in functions of one device, its
experts), A active experts of a token, X pairs of token and expert.
"""

from __future__ import annotations

import functools
from typing import Any

import jax

from jaxgpt.kernels.devices import on_mesh
from jaxgpt.kernels.expert_pairs import OnDevice, Pairs, by_groups, by_token
from jaxgpt.kernels.expert_tiles import GPU_TILE, TILE, by_tiles
from jaxgpt.kernels.sharded_experts import expert_division, experts_on_mesh
from jaxgpt.ops import Array
from jaxgpt.ops.activations import Activation
from jaxgpt.ops.experts import ExpertWeights
from jaxgpt.ops.experts import experts as definition


def ragged_experts(
    x_BTD: Array, choice_BTA: Array, share_BTA: Array, weights: ExpertWeights, activate: Activation, dtype: Any
) -> Array:
    """Compute the experts with `jax.lax.ragged_dot`: the default on TPUs, where it multiplies group by group.

    On CPUs and GPUs, `ragged_dot` would multiply every row by the matrices of all experts.
    """
    return _dropless(by_groups, Pairs(x_BTD, choice_BTA, share_BTA), weights, activate, dtype)


def tiled_experts(
    x_BTD: Array, choice_BTA: Array, share_BTA: Array, weights: ExpertWeights, activate: Activation, dtype: Any
) -> Array:
    """Compute the experts in tiles of 64 rows with the same expert: the default on CPUs."""
    in_tiles = functools.partial(by_tiles, largest=TILE)
    return _dropless(in_tiles, Pairs(x_BTD, choice_BTA, share_BTA), weights, activate, dtype)


def large_tiled_experts(
    x_BTD: Array, choice_BTA: Array, share_BTA: Array, weights: ExpertWeights, activate: Activation, dtype: Any
) -> Array:
    """Compute the experts in tiles of up to 512 rows with the same expert: the default on GPUs.

    Larger tiles use more of a GPU at a time, and need fewer products.
    """
    in_tiles = functools.partial(by_tiles, largest=GPU_TILE)
    return _dropless(in_tiles, Pairs(x_BTD, choice_BTA, share_BTA), weights, activate, dtype)


def _dropless(on_device: OnDevice, pairs: Pairs, weights: ExpertWeights, activate: Activation, dtype: Any) -> Array:
    """Compute the experts with `on_device`, on one device or on each device of a mesh (`experts_on_mesh`).

    Exceptions: with at most E pairs on one device, as in decoding, `by_token` reads only the matrices of their experts.
    Otherwise, stored weights use the definition, as do rules that shard positions over the mesh axes of experts or of the MLP's
    width.
    """
    pairs = pairs._replace(x_BTD=pairs.x_BTD.astype(dtype))
    are_stored = not isinstance(weights.up_EDF, Array)
    if on_mesh():
        division = expert_division()
        if are_stored or division.shards_positions:
            return definition(*pairs, weights, activate, dtype)
        return experts_on_mesh(on_device, division, pairs, weights, activate)

    E = weights.up_EDF.shape[0]
    if pairs.choice_BTA.size <= E:
        return by_token(pairs, weights, activate, dtype)
    if are_stored:
        return definition(*pairs, weights, activate, dtype)
    weights = jax.tree.map(lambda w: w.astype(dtype), weights)
    return on_device(pairs, weights, activate, first=None).astype(dtype)
