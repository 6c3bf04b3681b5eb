"""Gathered keys: each device receives the keys and values of whole rows, and their gradients are reduce-scattered.

Source: Grattafiori et al. 2024, section 3.3.2.
"""

from __future__ import annotations

import functools
from dataclasses import dataclass

import jax
import jax.numpy as jnp

from jaxgpt.kernels.division import AttentionInputs
from jaxgpt.kernels.online import Keys
from jaxgpt.ops import Array


@dataclass(frozen=True)
class Gathered:
    """The keys of all devices that divide the positions of a row.

    Attributes:
        axes: names of the mesh axes that shard positions; (): a device has whole rows.
    """

    axes: tuple[str, ...]

    def receive(self, inputs: AttentionInputs) -> Keys:
        """Return the keys and values of whole rows."""
        k_BKSH = inputs.k_BKSH
        v_BKHS = inputs.v_BKHS
        if self.axes:
            k_BKSH, v_BKHS = gather_keys(self.axes, k_BKSH, v_BKHS)
        return Keys(k_BKSH, v_BKHS, inputs.row_place)

    def send_back(self, dk_BKSH: Array, dv_BKHS: Array) -> tuple[Array, Array]:
        """Return the gradients of this device's keys and values, from the gradients of the results of `receive`."""
        if not self.axes:
            return dk_BKSH, dv_BKHS
        return scatter_gradients(self.axes, dk_BKSH, dv_BKHS)


@functools.partial(jax.custom_vjp, nondiff_argnums=(0,))
def gather_keys(axes: tuple[str, ...], k_BKSH: Array, v_BKHS: Array) -> tuple[Array, Array]:
    """Gather the keys and values of whole rows over mesh axes; the derivative adds the gradients of all devices."""
    gather = functools.partial(jax.lax.all_gather, axis_name=axes, tiled=True)
    return gather(k_BKSH, axis=2), gather(v_BKHS, axis=3)


def scatter_gradients(axes: tuple[str, ...], dk_BKSH: Array, dv_BKHS: Array) -> tuple[Array, Array]:
    """Reduce-scatter the gradients of whole rows: return the gradients of this device's keys and values."""
    # Use one collective: the TPU compiler would replace the second of two with an all-reduce, which sends twice as much.
    both = jnp.stack([dk_BKSH, dv_BKHS.swapaxes(2, 3)])
    dk_BKSH, dv_BKSH = jax.lax.psum_scatter(both, axes, scatter_dimension=3, tiled=True)
    return dk_BKSH, dv_BKSH.swapaxes(2, 3)


gather_keys.defvjp(
    lambda axes, k_BKSH, v_BKHS: (gather_keys(axes, k_BKSH, v_BKHS), None),
    lambda axes, _, gradients: scatter_gradients(axes, *gradients),
)
