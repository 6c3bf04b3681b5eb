"""Experts on a mesh: each device computes the terms of its matrices for its rows, and the devices add their terms.

Devices along the axis of the experts exchange their tokens: an all-gather before, a reduce-scatter after. For R tokens of
all e devices, a device sends `R * D * (e - 1) / e` numbers each way, outputs in float32, tokens and all gradients in the dtype
of the inputs. An all-to-all would send up to `A * R * D / e`: not less if a token has as many experts as the axis has devices.

The axis thus divides the weights of a device by e, but not its memory for rows: `R * A`, one per pair.

Letters in names as in `kernels/experts.py`.
"""

from __future__ import annotations

import functools
from typing import Any, NamedTuple

import jax
import jax.numpy as jnp
from jax.sharding import PartitionSpec

from jaxgpt.kernels.devices import logical_spec, mesh_axes
from jaxgpt.kernels.expert_pairs import OnDevice, Pairs
from jaxgpt.ops import Array
from jaxgpt.ops.activations import Activation
from jaxgpt.ops.experts import ExpertWeights
from jaxgpt.ops.sharding import constrain


class ExpertDivision(NamedTuple):
    """The sharding of the arrays of experts over the devices.

    The model's width is not sharded, because it is gathered for the products.

    Attributes:
        tokens: sharding of `[B, T, D]` and `[B, T, A]`.
        widening: sharding of the matrices `[E, D, F]`.
        narrowing: sharding of the matrices `[E, F, D]`.
    """

    tokens: PartitionSpec
    widening: PartitionSpec
    narrowing: PartitionSpec

    @property
    def expert_axes(self) -> tuple[str, ...]:
        """Names of the mesh axes that shard experts."""
        return mesh_axes(self.widening, 0)

    @property
    def term_axes(self) -> tuple[str, ...]:
        """Names of the mesh axes that shard experts or the MLP's width: their devices compute different terms of a row."""
        return *self.expert_axes, *mesh_axes(self.widening, 2)

    @property
    def axes_with_different_rows(self) -> tuple[str, ...]:
        """Names of the `term_axes` along which devices have different rows, which they must exchange."""
        row_axes = mesh_axes(self.tokens, 0)
        return tuple(axis for axis in self.term_axes if axis in row_axes)

    @property
    def axes_with_same_rows(self) -> tuple[str, ...]:
        """Names of the other `term_axes`."""
        row_axes = mesh_axes(self.tokens, 0)
        return tuple(axis for axis in self.term_axes if axis not in row_axes)

    @property
    def shards_positions(self) -> bool:
        """Whether positions are sharded over `term_axes`, which `experts_on_mesh` does not support."""
        return not set(mesh_axes(self.tokens, 1)).isdisjoint(self.term_axes)


def expert_division() -> ExpertDivision:
    """Return how the current mesh and rules divide the arrays of experts."""
    return ExpertDivision(
        tokens=logical_spec("batch", "length"),
        widening=logical_spec("expert", None, "mlp"),
        narrowing=logical_spec("expert", "mlp", None),
    )


def experts_on_mesh(
    on_device: OnDevice, division: ExpertDivision, pairs: Pairs, weights: ExpertWeights, activate: Activation
) -> Array:
    """Compute the experts with `on_device` on each device, and add the terms, in the dtype of the inputs.

    Devices with the same rows add their terms; devices with different rows exchange the rows first.
    """
    E = weights.up_EDF.shape[0]
    different_rows = division.axes_with_different_rows
    weights = _cast(weights, pairs.x_BTD.dtype)

    def local(pairs: Pairs, weights: ExpertWeights) -> Array:
        own_E = len(weights.up_EDF)
        first: Array | None = None  # the device has all experts
        if own_E < E:
            first = jax.lax.axis_index(division.expert_axes) * own_E
        if different_rows:
            gather = functools.partial(jax.lax.all_gather, axis_name=different_rows, tiled=True)
            pairs = jax.tree.map(gather, pairs)
        y_BTD = on_device(pairs, weights, activate, first=first)
        added_BTD: Array = _added(y_BTD, different_rows, division.axes_with_same_rows, pairs.x_BTD.dtype)
        return added_BTD

    gate_spec = None if weights.gate_EDF is None else division.widening
    weight_specs = ExpertWeights(division.widening, division.narrowing, gate_spec)
    # check_vma=False: ragged products do not annotate which mesh axes their results vary over.
    divided = jax.shard_map(local, in_specs=(division.tokens, weight_specs), out_specs=division.tokens, check_vma=False)
    return divided(pairs, weights)


def _cast(weights: ExpertWeights, dtype: Any) -> ExpertWeights:
    """Convert the weights to a dtype, with the sharding of the parameters, so that the gather along fsdp follows the cast.

    Without the constraint, XLA would gather float32 and cast the result.
    """
    cast = jax.tree.map(lambda w: w.astype(dtype), weights)
    widening = ("expert", "embed", "mlp")
    return ExpertWeights(
        up_EDF=constrain(cast.up_EDF, widening),
        down_EFD=constrain(cast.down_EFD, ("expert", "mlp", "embed")),
        gate_EDF=None if cast.gate_EDF is None else constrain(cast.gate_EDF, widening),
    )


@functools.partial(jax.custom_vjp, nondiff_argnums=(1, 2, 3))
def _added(y_BTD: Array, different_rows: tuple[str, ...], same_rows: tuple[str, ...], dtype: Any) -> Array:
    """Add float32 terms over devices, and return the rows of this device in a dtype.

    Gradients have this dtype, so they are gathered without rounding. Devices with the same rows have equal gradients, so
    the sum of these gradients needs no collective.

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
