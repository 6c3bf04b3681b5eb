"""The choice of attention on meshes that divide positions (`mesh.context`)."""

from __future__ import annotations

from typing import NamedTuple

from jaxgpt.config import Config
from jaxgpt.errors import UserError
from jaxgpt.kernels.balance import halos_of
from jaxgpt.kernels.flash import LANES
from jaxgpt.kernels.sharded import gathered_attention, halo_attention, ring_attention
from jaxgpt.kernels.sharded_splash import ShardedSplash, tile_size
from jaxgpt.ops import AttendFn
from jaxgpt.ops.attention import attend

# Splash runs on TPUs, the other kernels on any platform.
CONTEXT_KERNELS: dict[str, AttendFn] = {
    "splash": ShardedSplash(),
    "gathered": gathered_attention,
    "halo": halo_attention,
    "ring": ring_attention,
}
MOST_GATHERED = 2**17  # maximum window in tokens for gathered keys with `auto` (compiled sizes in docs/scaling.md)


class ChosenAttention(NamedTuple):
    """The attention of a run.

    Attributes:
        attend: the function for `Ops.attend`.
        note: one line for the user if `auto` falls back to a slower function; "": no fallback, or a short window.
    """

    attend: AttendFn
    note: str = ""


def attend_instead(config: Config, name: str, problem: str) -> ChosenAttention:
    """Return `attend` with a note that the kernel `name`, which `auto` prefers, has a problem.

    Raises:
        UserError: if `train.attention` requests this kernel.
    """
    if config.train.attention == name:
        raise UserError(f"train.attention {name} {problem}; use --train.attention xla or auto")
    return ChosenAttention(attend, note=f"attention by xla, with all T x T scores in memory: {name} {problem}")


def choose_context_attention(config: Config, platform: str) -> ChosenAttention:
    """Return the attention function of a mesh that divides positions; errors as in `choose_attention`."""
    name: str = config.train.attention
    if name == "auto":
        name = _fastest_context_attention(config, platform)
    if name == "xla":
        return ChosenAttention(attend)

    problem = _context_problem(name, config, platform)
    if problem:
        return attend_instead(config, name, problem)
    return ChosenAttention(CONTEXT_KERNELS[name])


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
