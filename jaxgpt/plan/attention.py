"""The attention of a plan: its kernel, and how keys and values reach the queries of other devices along `mesh.context`."""

from __future__ import annotations

from collections.abc import Iterable
from typing import Literal, NamedTuple

import jax.numpy as jnp

from jaxgpt.config import Config
from jaxgpt.kernels import CONTEXT_KERNELS, KERNELS, Target, choose_attention, halos_of
from jaxgpt.ops import AttendFn
from jaxgpt.plan.one_device import one_device
from jaxgpt.plan.topology import Topology


def attention_of(config: Config, topology: Topology) -> str:
    """Describe the attention of a run on a chip.

    Raises:
        UserError: if `train.attention` selects a kernel that cannot run there.
    """
    chosen = choose_attention(config, topology.target)
    named = [*KERNELS.values(), *CONTEXT_KERNELS.items()]  # pairs of name and function
    kernel = _kernel_name(chosen.attend, named)
    if kernel:
        return f"{kernel}, without stored T x T scores"
    return chosen.note or "xla, with all T x T scores in memory"


def _kernel_name(attend: AttendFn, kernels: Iterable[tuple[str, AttendFn]]) -> str:
    """Return the name of the kernel that computes `attend`, or "" for other functions."""
    for name, kernel in kernels:
        if kernel is attend:
            return name
    return ""


class KeyExchange(NamedTuple):
    """The exchange of keys and values between the devices along context.

    In a layer with a halo, a device receives only the `halo` keys before its tokens. In the other layers, it receives all keys.

    Attributes:
        halo_layers: number of layers with a halo.
        halo: number of keys in the halos of a device; 0: no layer has a halo.
        all_keys: exchange of the other layers; "": each layer has a halo, or no kernel divides positions.
    """

    halo_layers: int
    halo: int
    all_keys: Literal["gathered", "ring", ""]


def key_exchange(config: Config, target: Target) -> KeyExchange:
    """Return how keys and values reach the queries of a run on a kind of device."""
    halos = halos_of(config)
    kernel = _kernel_name(choose_attention(config, target).attend, CONTEXT_KERNELS.items())
    if not kernel:
        return KeyExchange(halo_layers=0, halo=0, all_keys="")
    if kernel in ("splash", "halo") and halos.in_all_layers:
        return KeyExchange(halo_layers=config.model.n_layer, halo=halos.tokens, all_keys="")

    all_keys: Literal["gathered", "ring"] = "ring" if kernel == "ring" else "gathered"
    if halos.in_some_layers:
        return KeyExchange(halos.layers, halos.tokens, all_keys)
    # No layer has a halo, or `train.attention` selects gathered or ring although all layers could have a halo.
    return KeyExchange(halo_layers=0, halo=0, all_keys=all_keys)


def key_bytes(config: Config, target: Target) -> float:
    """Estimate the bytes of the keys and values that a device receives for a block along context, and of their gradients.

    Gathered keys span complete windows, with float32 gradients. A ring holds the keys of two devices, because the next
    keys arrive during the computation. The estimate is for a layer without a halo, if any: it receives the most.
    """
    exchange = key_exchange(config, target)
    share = 1 / config.mesh.context
    if exchange.all_keys == "gathered":
        windows = 1.0
    elif exchange.all_keys == "ring":
        windows = 2 * share
    elif exchange.halo_layers:
        windows = share + exchange.halo / config.window
    else:
        windows = 0.0
    width = jnp.dtype(config.train.compute_dtype).itemsize
    return windows * key_elements(config) * (width + 4)


def key_elements(config: Config) -> float:
    """Return the number of elements of the keys and values of a block, in whole windows of a microbatch of one device."""
    part = one_device(config)
    heads = part.model.kv_heads
    if config.mesh.tensor > 1 and config.model.kv_heads % config.mesh.tensor:
        heads = part.model.n_head  # repeated for each query head
    return 2.0 * part.train.batch_size * part.window * heads * part.model.head_width
