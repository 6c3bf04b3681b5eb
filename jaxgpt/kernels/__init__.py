"""Faster equivalents of `Ops` for each backend, and `best`, which selects them."""

from __future__ import annotations

import re
from typing import NamedTuple

import jax
import jax.numpy as jnp
import numpy as np
from jax.sharding import AbstractMesh, Mesh

from jaxgpt.config import Config
from jaxgpt.data_files import has_documents
from jaxgpt.errors import UserError
from jaxgpt.kernels import activations, cpu, norms
from jaxgpt.kernels.devices import LANES
from jaxgpt.kernels.experts import ragged_experts, tiled_experts
from jaxgpt.kernels.flash import cudnn_attention, splash_attention
from jaxgpt.kernels.ring import (
    MixedAttention,
    balanced_order,
    gathered_attention,
    halo_attention,
    halo_size,
    ring_attention,
)
from jaxgpt.kernels.sharded_splash import ShardedSplash, tile_size
from jaxgpt.kernels.tiled import SHORTEST
from jaxgpt.ops import AttendFn, Ops
from jaxgpt.ops.attention import attend

PLAIN = Ops(activate=activations.activate, experts=ragged_experts)
CPU = PLAIN._replace(linear=cpu.linear, rotation=cpu.rotation, attend=cpu.attend, experts=tiled_experts)
GPU = PLAIN._replace(norm=norms.norm)


class Target(NamedTuple):
    """A kind of device that need not exist here, such as `jaxgpt.plan.topology.parse_topology("v5e:2x4").target`.

    Attributes:
        platform: cpu, gpu or tpu.
        compute_capability: compute capability of a GPU as JAX formats it, such as 9.0; "" on other platforms.
    """

    platform: str
    compute_capability: str = ""


def best(config: Config, mesh: Mesh | AbstractMesh | Target | None = None) -> Ops:
    """Return the fastest operations for a config on the devices of a mesh.

    Some operations have a derivative for reverse mode only (`jax.custom_vjp`). For `jax.jvp`, use the definitions,
    `GPT(config)`.

    Args:
        config: settings of the run.
        mesh: the devices, or their kind; an `AbstractMesh`: operations for any device; None: this process's first device.

    Raises:
        UserError: if `train.attention` selects a kernel that cannot run.
    """
    if isinstance(mesh, AbstractMesh):
        attention: AttendFn = attend
        if config.mesh.context > 1:
            attention, _ = _choose_context_attention(config, "")
        return PLAIN._replace(dtype=jnp.dtype(config.train.compute_dtype), attend=attention)
    device: jax.Device | Target
    if isinstance(mesh, Target):
        device = mesh
    else:
        device = jax.local_devices()[0] if mesh is None else mesh.devices.flat[0]
    attention, _ = choose_attention(config, device)
    return of_device(device, config.train.compute_dtype)._replace(attend=attention)


def of_device(device: jax.Device | Target, dtype: str = "float32") -> Ops:
    """Return the operations of a device for generation, where `train.attention` does not apply."""
    ops = {"cpu": CPU, "gpu": GPU}.get(device.platform, PLAIN)
    return ops._replace(dtype=jnp.dtype(dtype))


# `KERNELS` maps each platform to its attention kernel: the name in `train.attention`, and the function for `Ops.attend`.
KERNELS = {"cpu": ("tiled", cpu.attend), "gpu": ("cudnn", cudnn_attention), "tpu": ("splash", splash_attention)}
# The kernels of meshes that divide positions: splash on TPUs, the others on any platform.
CONTEXT_KERNELS: dict[str, AttendFn] = {
    "splash": ShardedSplash(),
    "gathered": gathered_attention,
    "halo": halo_attention,
    "ring": ring_attention,
}
MOST_GATHERED = 2**17  # longest windows with gathered keys (compiled sizes in docs/scaling.md)


def choose_attention(config: Config, device: jax.Device | Target) -> tuple[AttendFn, str]:
    """Return a device's attention function, and a note if `auto` falls back to a slower function, or "".

    Raises:
        UserError: if a kernel is selected by name and cannot run.
    """
    if config.mesh.context > 1:
        return _choose_context_attention(config, device.platform)
    of_platform, kernel = KERNELS.get(device.platform, ("xla", attend))
    asked = config.train.attention
    name = of_platform if asked == "auto" else asked
    if name == "xla":
        return attend, ""

    if name == of_platform:
        lack = _lack(name, config, device)
    elif name in CONTEXT_KERNELS and name not in dict(KERNELS.values()):
        lack = "needs positions that are divided over devices (mesh.context 2 or more)"
    else:
        lack = f"does not run on {device.platform} devices"
    if not lack:
        return kernel, ""
    if asked == name:
        raise UserError(f"train.attention {name} {lack}; use --train.attention xla or auto")

    # `auto` falls back to `attend`, which needs much memory only for long sequences.
    if config.model.block_size < SHORTEST:
        return attend, ""
    return attend, f"attention by xla, with all T x T scores in memory: {name} {lack}"


def _choose_context_attention(config: Config, platform: str) -> tuple[AttendFn, str]:
    """Return the attention function of a mesh that divides positions, and a note, like `choose_attention`."""
    asked = config.train.attention
    name: str = asked
    if asked == "auto":
        name = _fastest_context_attention(config, platform)
    if name == "xla":
        return attend, ""

    context = config.mesh.context
    lack = ""
    if name not in CONTEXT_KERNELS:
        lack = f"needs complete windows on each device (mesh.context 1, not {context})"
    elif config.model.dropout:
        lack = f"does not support dropout (model.dropout {config.model.dropout:g})"
    elif name == "splash" and platform != "tpu":
        lack = f"does not run on {platform or 'these'} devices"
    elif name == "splash" and not has_splash_tiles(config):
        lack = f"needs a window that is a multiple of {2 * LANES * context}, not {config.window_setting}"
    elif name == "halo" and not has_halo(config):
        lack = (
            "needs a sliding window in all layers, of at most as many tokens as a device has "
            f"({config.window // context} with mesh.context {context})"
        )
    if not lack:
        return CONTEXT_KERNELS[name], ""
    if asked == name:
        raise UserError(f"train.attention {name} {lack}; use --train.attention xla or auto")
    return attend, f"attention by xla, with all T x T scores in memory: {name} {lack}"


def _fastest_context_attention(config: Config, platform: str) -> str:
    """Return the name of the attention that `auto` selects on a mesh that divides positions."""
    sends_little = config.window <= MOST_GATHERED or has_halo(config)
    if platform == "tpu" and has_splash_tiles(config) and sends_little:
        return "splash"
    if has_halo(config):
        return "halo"
    return "gathered" if sends_little else "ring"


def has_halo(config: Config) -> bool:
    """Return whether each device needs only the keys of the previous device, in all layers."""
    tokens = config.window // config.mesh.context
    return all(halo_size(window, tokens) for window in config.model.windows)


def halo_tokens(config: Config) -> int:
    """Return the number of keys before its own tokens that a device receives in a layer with a window; 0: all keys."""
    tokens = config.window // config.mesh.context
    if has_halo(config):
        return halo_size(config.model.sliding_window, tokens)
    # In balanced order, each of the two chunks of a device has a halo.
    return 2 * halo_size(config.model.sliding_window, tokens // 2)


def halo_layers(config: Config) -> int:
    """Return the number of layers in which a device receives only the keys before its tokens (`halo_tokens`)."""
    with_window = sum(window > 0 for window in config.model.windows)
    return with_window if halo_tokens(config) else 0


def has_splash_tiles(config: Config) -> bool:
    """Return whether splash attention has tiles for the tokens of a device."""
    context = config.mesh.context
    return tile_size(config.window, context, context) > 0


def in_balanced_order(config: Config, ops: Ops) -> tuple[Ops, np.ndarray | None]:
    """Return a permutation of a window's tokens that gives all devices of `mesh.context` equal work, and its operations.

    Only operations that read positions, or are made for this order, allow a different order. With a halo, consecutive tokens
    already give the devices equal work.

    Returns:
        Operations for tokens in this order, and the order, `[T]`; None: unchanged.
    """
    context = config.mesh.context
    if context == 1 or ops.edit is not None:
        return ops, None
    order = balanced_order(config.window, context)
    if ops.attend in (gathered_attention, ring_attention):
        is_mixed = not has_halo(config) and halo_layers(config) > 0
        attention = MixedAttention(ops.attend, context) if is_mixed else ops.attend
        return ops._replace(attend=attention), order
    if ops.attend == ShardedSplash() and not has_halo(config):
        return ops._replace(attend=ShardedSplash(context)), order
    return ops, None


def _lack(name: str, config: Config, device: jax.Device | Target) -> str:
    """Return why a platform's kernel cannot run with a config on a device, or ""."""
    if config.model.dropout:
        return f"does not support dropout (model.dropout {config.model.dropout:g})"
    if name != "cudnn":
        return ""
    capability = str(getattr(device, "compute_capability", ""))
    if not re.fullmatch(r"([89]|\d\d)\.\d", capability):  # AMD: gfx942
        return "needs an NVIDIA GPU of compute capability 8.0 or more"
    widest = 128 if capability[0] == "8" else 256
    if config.train.compute_dtype == "float32":
        return "needs train.compute_dtype bfloat16"
    width = config.model.head_width
    if width % 8 or width > widest:
        return f"needs a head width that is a multiple of 8 up to {widest}, not {width}"
    if config.window % 2:
        return f"needs an even window, not {config.window_setting}"
    if has_documents(config):
        return "does not support documents (data.documents mask or pack, conversations)"
    return ""
