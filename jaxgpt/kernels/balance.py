"""Tokens on the devices of `mesh.context`: the order that gives all devices equal work, and halos."""

from __future__ import annotations

from typing import NamedTuple

import numpy as np

from jaxgpt.config import Config
from jaxgpt.kernels.halo import balanced_order, halo_size
from jaxgpt.kernels.sharded import MixedAttention, gathered_attention, ring_attention
from jaxgpt.kernels.sharded_splash import ShardedSplash
from jaxgpt.ops import Ops


class Halos(NamedTuple):
    """The halos of a model: in layers with a sliding window, a device receives only the keys before its own tokens.

    Attributes:
        tokens: number of keys in the halos of a device; 0: no halos, so the device receives the keys of all devices.
        layers: number of layers with a halo.
        in_all_layers: whether each device needs, besides its own keys, only keys of the previous device, in all layers. The
            tokens of a device are then consecutive; otherwise, they are in balanced order.
    """

    tokens: int
    layers: int
    in_all_layers: bool

    @property
    def in_some_layers(self) -> bool:
        """Whether some layers have a halo in balanced order, and a device receives all keys in the others."""
        return self.layers > 0 and not self.in_all_layers


def halos_of(config: Config) -> Halos:
    """Return the halos of a model on a mesh that divides positions."""
    tokens = config.window // config.mesh.context
    window = config.model.sliding_window
    in_all_layers = all(halo_size(layer_window, tokens) for layer_window in config.model.windows)
    if in_all_layers:
        halo_tokens = halo_size(window, tokens)
    else:
        # In balanced order, each of the two chunks of a device has a halo.
        halo_tokens = 2 * halo_size(window, tokens // 2)

    layers = 0
    if halo_tokens:
        layers = sum(layer_window > 0 for layer_window in config.model.windows)
    return Halos(halo_tokens, layers, in_all_layers)


def in_balanced_order(config: Config, ops: Ops) -> tuple[Ops, np.ndarray | None]:
    """Return operations and a permutation of a window's tokens that give all devices of `mesh.context` equal work.

    Only operations that read positions, or are made for this order, allow a different order. With halos in all layers,
    consecutive tokens already give the devices equal work.

    Returns:
        Operations for tokens in this order, and the order, `[T]`; None: unchanged.
    """
    context = config.mesh.context
    if context == 1 or ops.edit is not None:
        return ops, None
    order = balanced_order(config.window, context)
    halos = halos_of(config)
    if ops.attend in (gathered_attention, ring_attention):
        attention = MixedAttention(ops.attend, context) if halos.in_some_layers else ops.attend
        return ops._replace(attend=attention), order
    if ops.attend == ShardedSplash() and not halos.in_all_layers:
        return ops._replace(attend=ShardedSplash(context)), order
    return ops, None
