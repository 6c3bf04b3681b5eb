"""Choose the attention kernel: what each one requires of the device and the config."""

from __future__ import annotations

import re
from collections.abc import Callable
from typing import NamedTuple

import jax

from jaxgpt.config import Config, UserError
from jaxgpt.ops.attention import AttentionKernel
from jaxgpt.ops.flash import cudnn_attention, splash_attention
from jaxgpt.ops.tiled import SHORTEST, tiled_attention


class Kernel(NamedTuple):
    """A kernel and its requirements.

    Attributes:
        run: the function.
        home: whether a device is of the kind that the kernel is written for.
        lacks: another requirement that is not met on such a device; `""`: none.
        shortest: the smallest `model.block_size` at which it is faster than `attend` (measured in float32).
    """

    run: AttentionKernel
    home: Callable[[jax.Device], bool]
    lacks: Callable[[Config, jax.Device], str]
    shortest: int = 0


def choose_attention(config: Config, device: jax.Device | None) -> tuple[AttentionKernel | None, str]:
    """Return the kernel that `train.attention` selects on a device, None for `attend`, and a note about the choice.

    `auto` selects the kernel for the device, if it is faster and supports the config.

    Raises:
        UserError: a kernel was selected by name and cannot run.
    """
    asked = config.train.attention
    if asked == "xla" or device is None:
        return None, ""
    if asked != "auto":
        kernel = KERNELS[asked]
        lack = kernel.lacks(config, device) if kernel.home(device) else f"does not run on {device.platform} devices"
        if lack:
            raise UserError(f"train.attention {asked} {lack}; use xla or auto")
        return kernel.run, ""
    for name, kernel in KERNELS.items():
        if kernel.home(device) and config.model.block_size >= kernel.shortest:
            lack = kernel.lacks(config, device)
            return (
                (None, f"attention by xla, with all T x T scores in memory: {name} {lack}")
                if lack
                else (kernel.run, "")
            )
    return None, ""


def _capability(device: jax.Device) -> tuple[int, ...]:
    """Return the CUDA compute capability, such as (9, 0) for Hopper; empty for a device that is not NVIDIA's."""
    text = str(getattr(device, "compute_capability", ""))
    return tuple(map(int, text.split("."))) if device.platform == "gpu" and re.fullmatch(r"\d+\.\d+", text) else ()


def _cudnn_lacks(config: Config, device: jax.Device) -> str:
    width, capability = config.model.head_width, _capability(device)
    widest = 256 if capability >= (9, 0) else 128
    if capability < (8, 0):
        return f"needs compute capability 8.0, not {'.'.join(map(str, capability))}"
    if config.train.compute_dtype == "float32":
        return "needs train.compute_dtype bfloat16"
    if width % 8 or width > widest:
        return f"needs a head width that is a multiple of 8 up to {widest}, not {width}"
    if config.model.block_size % 2:
        return f"needs an even model.block_size, not {config.model.block_size}"
    if config.data.segmented:
        return "does not support documents (data.documents mask or pack, conversations)"
    return _dropout(config)


def _dropout(config: Config) -> str:
    return f"does not support dropout (model.dropout {config.model.dropout:g})" if config.model.dropout else ""


KERNELS = {
    "cudnn": Kernel(cudnn_attention, lambda device: bool(_capability(device)), _cudnn_lacks),
    "splash": Kernel(splash_attention, lambda device: device.platform == "tpu", lambda config, _: _dropout(config)),
    "tiled": Kernel(
        tiled_attention, lambda device: device.platform == "cpu", lambda config, _: _dropout(config), SHORTEST
    ),
}
