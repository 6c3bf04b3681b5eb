"""The attention of a plan: its kernel, and how keys and values reach the queries of other devices along `mesh.context`."""

from __future__ import annotations

from typing import NamedTuple

import jax.numpy as jnp

from jaxgpt.config import Config
from jaxgpt.kernels import CONTEXT_KERNELS, KERNELS, Target, choose_attention, halos_of
from jaxgpt.plan.one_device import one_device
from jaxgpt.plan.topology import Topology


def attention_of(config: Config, topology: Topology) -> str:
    """Describe the attention of a run on a chip.

    Raises:
        UserError: if `train.attention` selects a kernel that cannot run there.
    """
    chosen = choose_attention(config, topology.target)
    kernels = [*KERNELS.values(), *CONTEXT_KERNELS.items()]
    name = next((name for name, kernel in kernels if kernel is chosen.attend), "")
    return f"{name}, without stored T x T scores" if name else chosen.note or "xla, with all T x T scores in memory"


class KeyExchange(NamedTuple):
    """The exchange of keys and values between the devices along context.

    Attributes:
        kind: gathered, ring, or halo (all layers have a halo); "": no kernel divides positions.
        halo_layers: number of layers in which a device receives only the keys before its tokens, its halo; the other layers
            gather the keys or use a ring.
        halo: number of keys in the halos of a device.
    """

    kind: str
    halo_layers: int
    halo: int


def key_exchange(config: Config, target: Target) -> KeyExchange:
    """Return how keys and values reach the queries of a run on a kind of device."""
    halos = halos_of(config)
    kind = _kernel_name(config, target)
    if kind == "splash":
        kind = "halo" if halos.in_all_layers else "gathered"

    layers = 0
    is_mixed = kind in ("gathered", "ring") and not halos.in_all_layers
    if kind == "halo" or is_mixed:
        layers = halos.layers
    return KeyExchange(kind, layers, halos.tokens)


def _kernel_name(config: Config, target: Target) -> str:
    """Return the name of the attention kernel that divides positions, a key of `CONTEXT_KERNELS`, or ""."""
    attention = choose_attention(config, target).attend
    return next((name for name, kernel in CONTEXT_KERNELS.items() if kernel is attention), "")


def key_bytes(config: Config, target: Target) -> float:
    """Estimate the bytes of the keys and values that a device receives for a block along context, and of their gradients.

    Gathered keys span complete windows, with float32 gradients. A ring holds the keys of two devices, because the next
    keys arrive during the computation. The estimate is for a layer without a halo, if any: it receives the most.
    """
    exchange = key_exchange(config, target)
    share = 1 / config.mesh.context
    windows = {"gathered": 1.0, "halo": share + exchange.halo / config.window, "ring": 2 * share, "": 0.0}
    kind = exchange.kind
    if exchange.halo_layers == config.model.n_layer:
        kind = "halo"
    width = jnp.dtype(config.train.compute_dtype).itemsize
    return windows[kind] * key_elements(config) * (width + 4)


def key_elements(config: Config) -> float:
    """Return the number of elements of the keys and values of a block, in whole windows of a microbatch of one device."""
    part = one_device(config)
    heads = part.model.kv_heads
    if config.mesh.tensor > 1 and config.model.kv_heads % config.mesh.tensor:
        heads = part.model.n_head  # repeated for each query head
    return 2.0 * part.train.batch_size * part.window * heads * part.model.head_width
