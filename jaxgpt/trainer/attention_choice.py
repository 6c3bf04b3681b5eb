"""Which attention runs where: what each kernel asks of the device and of the config."""

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
    """A kernel and its needs.

    Attributes:
        run: the function.
        home: whether a device is of the kind that it is made for.
        lacks: what else is missing on such a device, `""`: nothing.
        shortest: from which `model.block_size` on it is faster than `attend` (measured in float32).
    """

    run: AttentionKernel
    home: Callable[[jax.Device], bool]
    lacks: Callable[[Config, jax.Device], str]
    shortest: int = 0


def choose_attention(config: Config, device: jax.Device | None) -> tuple[AttentionKernel | None, str]:
    """The kernel that `train.attention` means on a device, None for `attend`, and what should be said of the choice.

    `auto` is the kernel that is made for the device, if it is worth it and the config lets it run.

    Raises:
        UserError: a kernel is asked for by name and cannot run.
    """
    asked = config.train.attention
    if asked == "xla" or device is None:
        return None, ""
    if asked != "auto":
        kernel = KERNELS[asked]
        lack = kernel.lacks(config, device) if kernel.home(device) else f"does not run on {device.platform} devices"
        if lack:
            raise UserError(f"train.attention {asked} {lack}: xla would, and auto chooses what can run")
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
    """CUDA's compute capability, (9, 0) for Hopper; empty for all that is not NVIDIA's."""
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
        return f"takes heads of a multiple of 8 up to {widest} wide, not {width}"
    return _dropout(config)


def _dropout(config: Config) -> str:
    return f"drops no weights (model.dropout {config.model.dropout:g})" if config.model.dropout else ""


KERNELS = {
    "cudnn": Kernel(cudnn_attention, lambda device: bool(_capability(device)), _cudnn_lacks),
    "splash": Kernel(splash_attention, lambda device: device.platform == "tpu", lambda config, _: _dropout(config)),
    "tiled": Kernel(
        tiled_attention, lambda device: device.platform == "cpu", lambda config, _: _dropout(config), SHORTEST
    ),
}
