"""Equivalents of `ops.experts.experts` that compute only the chosen pairs of token and expert, and drop no pair.

Letters in names, here and in `expert_pairs` and `expert_tiles`: E experts (in functions of one device, its experts),
A active experts of a token, X pairs of token and expert, n tiles, t rows of a tile, M rows of all tiles, I and O inputs and
outputs of a matrix.
"""

from __future__ import annotations

import functools
from typing import Any

import jax
import jax.numpy as jnp

from jaxgpt.kernels.devices import logical_spec, mesh_axes, on_mesh
from jaxgpt.kernels.expert_pairs import OnDevice, Pairs, by_groups, by_token
from jaxgpt.kernels.expert_tiles import GPU_TILE, TILE, by_tiles
from jaxgpt.ops import Array
from jaxgpt.ops.activations import Activation
from jaxgpt.ops.experts import ExpertWeights
from jaxgpt.ops.experts import experts as definition
from jaxgpt.ops.sharding import constrain

# Logical axes of arrays on the devices. The model's width is None, because it is gathered for the products.
TOKENS = ("batch", "length")
WIDENING = ("expert", None, "mlp")
NARROWING = ("expert", "mlp", None)


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
    """Compute the experts, on each device for its rows and its part of the MLP's width.

    - With at most E pairs on one device, as in decoding, only the matrices of their experts are read (`by_token`).
    - Stored weights use the definition, as do rules that shard positions over the mesh axes of experts or of the MLP's width.
    - One device computes all pairs (`on_device`).
    - On a mesh, each device computes the terms of its matrices, and the devices add their terms.

    Devices along the axis of the experts exchange their tokens: an all-gather before, a reduce-scatter after. For R tokens of
    all e devices, a device sends `R * D * (e - 1) / e` numbers each way, outputs in float32, tokens and all gradients in
    `dtype`. An all-to-all would send up to `A * R * D / e`: not less if a token has as many experts as the axis has devices.

    The axis thus divides the weights of a device by e, but not its memory for rows: `R * A`, one per pair (`by_groups`,
    `by_tiles`).
    """
    E = weights.up_EDF.shape[0]
    pairs = pairs._replace(x_BTD=pairs.x_BTD.astype(dtype))
    if pairs.choice_BTA.size <= E and not on_mesh():
        return by_token(pairs, weights, activate, dtype)
    if not isinstance(weights.up_EDF, Array) or (on_mesh() and _shards_positions()):
        return definition(*pairs, weights, activate, dtype)

    weights = jax.tree.map(lambda w: w.astype(dtype), weights)
    if not on_mesh():
        return on_device(pairs, weights, activate, first=None).astype(dtype)
    return _on_mesh(on_device, pairs, weights, activate)


def _shards_positions() -> bool:
    """Return whether the rules shard positions over the mesh axes of experts or of the MLP's width."""
    length_axes = mesh_axes(logical_spec(*TOKENS), 1)
    return not {*length_axes}.isdisjoint(_term_axes())


def _term_axes() -> tuple[str, ...]:
    """Return the mesh axes that shard experts or the MLP's width: their devices compute different terms of a row."""
    widen = logical_spec(*WIDENING)
    return *mesh_axes(widen, 0), *mesh_axes(widen, 2)


def _on_mesh(on_device: OnDevice, pairs: Pairs, weights: ExpertWeights, activate: Activation) -> Array:
    """Compute the terms of each device's matrices, and add the terms of all devices, in the dtype of the inputs.

    Devices with the same rows add their terms; devices with different rows exchange the rows first.
    """
    tokens = logical_spec(*TOKENS)
    widen = logical_spec(*WIDENING)
    narrow = logical_spec(*NARROWING)
    expert_axes = mesh_axes(widen, 0)
    row_axes = mesh_axes(tokens, 0)
    different_rows = tuple(axis for axis in _term_axes() if axis in row_axes)
    same_rows = tuple(axis for axis in _term_axes() if axis not in row_axes)
    E = weights.up_EDF.shape[0]

    weights = _with_own_sharding(weights)

    def terms(pairs: Pairs, weights: ExpertWeights) -> Array:
        first: Array | None = None
        if len(weights.up_EDF) < E:
            first = jax.lax.axis_index(expert_axes) * len(weights.up_EDF)
        if different_rows:
            gather = functools.partial(jax.lax.all_gather, axis_name=different_rows, tiled=True)
            pairs = jax.tree.map(gather, pairs)
        y_BTD = on_device(pairs, weights, activate, first=first)
        added_BTD: Array = _added(y_BTD, different_rows, same_rows, pairs.x_BTD.dtype)
        return added_BTD

    weight_specs = ExpertWeights(widen, narrow, None if weights.gate_EDF is None else widen)
    # check_vma=False: ragged products do not annotate which mesh axes their results vary over.
    divided = jax.shard_map(terms, in_specs=(tokens, weight_specs), out_specs=tokens, check_vma=False)
    return divided(pairs, weights)


def _with_own_sharding(weights: ExpertWeights) -> ExpertWeights:
    """Constrain the cast weights to the sharding of the parameters, so that the gather along fsdp follows the cast.

    Without the constraint, XLA would gather float32 and cast the result.
    """
    widening = ("expert", "embed", "mlp")
    return ExpertWeights(
        up_EDF=constrain(weights.up_EDF, widening),
        down_EFD=constrain(weights.down_EFD, ("expert", "mlp", "embed")),
        gate_EDF=None if weights.gate_EDF is None else constrain(weights.gate_EDF, widening),
    )


@functools.partial(jax.custom_vjp, nondiff_argnums=(1, 2, 3))
def _added(y_BTD: Array, different_rows: tuple[str, ...], same_rows: tuple[str, ...], dtype: Any) -> Array:
    """Add float32 terms over devices, and return the rows of this device in a dtype.

    Gradients are gathered in this dtype, without rounding. Devices with the same rows have equal gradients, so the
    sum of these gradients needs no collective.

    Args:
        y_BTD: terms of the rows of all devices along `different_rows`.
        different_rows: mesh axes of devices with different rows.
        same_rows: mesh axes of devices with the same rows.
        dtype: dtype of the result.
    """
    # Scatter before the sum, so that the sum has fewer rows.
    if different_rows:
        y_BTD = jax.lax.psum_scatter(y_BTD, different_rows, tiled=True)
    if same_rows:
        y_BTD = jax.lax.psum(y_BTD, same_rows)
    return y_BTD.astype(dtype)


def _added_backward(
    different_rows: tuple[str, ...], same_rows: tuple[str, ...], dtype: Any, _: None, dy_BTD: Array
) -> tuple[Array]:
    if different_rows:
        dy_BTD = jax.lax.all_gather(dy_BTD, different_rows, tiled=True)
    dy_BTD = dy_BTD.astype(jnp.float32)
    if same_rows:
        # `shard_map` gives each of these devices an equal share of the gradient; the derivative of a sum adds the shares.
        dy_BTD = dy_BTD * jax.lax.axis_size(same_rows)
    return (dy_BTD,)


_added.defvjp(lambda y_BTD, *static: (_added(y_BTD, *static), None), _added_backward)
