"""Attention on meshes that divide positions (`mesh.context`): its choice, its halos, and the order of the tokens."""

from __future__ import annotations

from typing import NamedTuple

import numpy as np

from jaxgpt.config import Config
from jaxgpt.errors import UserError
from jaxgpt.kernels.devices import LANES
from jaxgpt.kernels.halo import balanced_order, halo_size
from jaxgpt.kernels.sharded import MixedAttention, gathered_attention, halo_attention, ring_attention
from jaxgpt.kernels.sharded_splash import ShardedSplash, tile_size
from jaxgpt.ops import AttendFn, Ops
from jaxgpt.ops.attention import attend

# Splash runs on TPUs, the other kernels on any platform.
CONTEXT_KERNELS: dict[str, AttendFn] = {
    "splash": ShardedSplash(),
    "gathered": gathered_attention,
    "halo": halo_attention,
    "ring": ring_attention,
}
MOST_GATHERED = 2**17  # maximum window with gathered keys, in tokens (compiled sizes in docs/scaling.md)


class Halos(NamedTuple):
    """The halos of a model: in layers with a sliding window, a device receives only the keys before its own tokens.

    Attributes:
        tokens: number of keys in the halos of a device; 0: no halos, so the device receives the keys of all devices.
        layers: number of layers with a halo.
        in_all_layers: whether each device needs only keys of the previous device, in all layers. The tokens of a device are
            then consecutive; otherwise, they are in balanced order.
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
        halo = halo_size(window, tokens)
    else:
        # In balanced order, each of the two chunks of a device has a halo.
        halo = 2 * halo_size(window, tokens // 2)
    with_window = sum(layer_window > 0 for layer_window in config.model.windows)
    return Halos(tokens=halo, layers=with_window if halo else 0, in_all_layers=in_all_layers)


class ChosenAttention(NamedTuple):
    """The attention of a run.

    Attributes:
        attend: the function for `Ops.attend`.
        note: one line for the user if `auto` falls back to a slower function; "": no fallback.
    """

    attend: AttendFn
    note: str = ""


def fallback_note(config: Config, name: str, problem: str) -> str:
    """Return the note that `auto` falls back to `attend`, because of a problem of the kernel `name`.

    Raises:
        UserError: if `train.attention` selects this kernel.
    """
    if config.train.attention == name:
        raise UserError(f"train.attention {name} {problem}; use --train.attention xla or auto")
    return f"attention by xla, with all T x T scores in memory: {name} {problem}"


def choose_context_attention(config: Config, platform: str) -> ChosenAttention:
    """Return the attention function of a mesh that divides positions; errors as in `choose_attention`."""
    name: str = config.train.attention
    if name == "auto":
        name = _fastest_context_attention(config, platform)
    if name == "xla":
        return ChosenAttention(attend)

    problem = _context_problem(name, config, platform)
    if not problem:
        return ChosenAttention(CONTEXT_KERNELS[name])
    return ChosenAttention(attend, fallback_note(config, name, problem))


def _context_problem(name: str, config: Config, platform: str) -> str:
    """Return why a kernel cannot run with a config on a mesh that divides positions, or ""."""
    context = config.mesh.context
    if name not in CONTEXT_KERNELS:
        return f"needs complete windows on each device (mesh.context 1, not {context})"
    if config.model.dropout:
        return f"does not support dropout (model.dropout {config.model.dropout:g})"
    if name == "splash" and platform != "tpu":
        return f"does not run on {platform or 'these'} devices"
    if name == "splash" and not has_splash_tiles(config):
        return f"needs a window that is a multiple of {2 * LANES * context}, not {config.window_setting}"
    if name == "halo" and not halos_of(config).in_all_layers:
        longest = config.window // context + 1
        return f"needs a sliding window in all layers, of 2 to {longest} tokens with mesh.context {context}"
    return ""


def _fastest_context_attention(config: Config, platform: str) -> str:
    """Return the name of the attention that `auto` selects on a mesh that divides positions."""
    has_halos = halos_of(config).in_all_layers
    sends_little = config.window <= MOST_GATHERED or has_halos
    if platform == "tpu" and has_splash_tiles(config) and sends_little:
        return "splash"
    if has_halos:
        return "halo"
    return "gathered" if sends_little else "ring"


def has_splash_tiles(config: Config) -> bool:
    """Return whether splash attention has tiles for the tokens of a device."""
    context = config.mesh.context
    return tile_size(config.window, context, context) > 0


def in_balanced_order(config: Config, ops: Ops) -> tuple[Ops, np.ndarray | None]:
    """Return operations and a permutation of a window's tokens that give all devices of `mesh.context` equal work.

    Only operations that read positions, or are made for this order, allow a different order. With a halo, consecutive tokens
    already give the devices equal work.

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
