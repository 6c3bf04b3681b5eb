"""Faster equals of `Ops` by backend, and `best`, which chooses them. Each entry is tested against its definition."""

from __future__ import annotations

import re
from collections.abc import Callable
from typing import NamedTuple

import jax
import jax.numpy as jnp
from jax.sharding import AbstractMesh, Mesh

from jaxgpt.config import Config
from jaxgpt.errors import UserError
from jaxgpt.kernels import activations, cpu
from jaxgpt.kernels.flash import cudnn_attention, splash_attention
from jaxgpt.kernels.tiled import SHORTEST
from jaxgpt.ops import Attend, Ops
from jaxgpt.ops.attention import Edit, Visible, attend

PLAIN = Ops(activate=activations.activate)
CPU = PLAIN._replace(linear=cpu.linear, rotation=cpu.rotation, attend=cpu.attend)


class KernelAttention(NamedTuple):
    """Attention by a kernel among the tokens of a sequence; by the definition with a cache, edits or unsupported documents.

    Attributes:
        kernel: `(q_BTNH, k_BKSH, v_BKHS, visible, scale) -> out_BTNH`.
        documents: whether the kernel supports several documents per row.
    """

    kernel: Callable[..., jax.Array]
    documents: bool = True

    def __call__(
        self,
        q_BTNH: jax.Array,
        k_BKSH: jax.Array,
        v_BKHS: jax.Array,
        visible: Visible,
        scale: float,
        edit: Edit | None = None,
    ) -> jax.Array:
        """Compute `ops.attention.attend`."""
        supported = self.documents or visible.query.document_BT is None
        if edit is None and visible.key is None and supported:
            return self.kernel(q_BTNH, k_BKSH, v_BKHS, visible, scale)
        return attend(q_BTNH, k_BKSH, v_BKHS, visible, scale, edit)


class Kernel(NamedTuple):
    """An attention kernel and its requirements.

    Attributes:
        attend: entry of `Ops`.
        runs_on: whether the kernel is written for this kind of device.
        lacks: the requirement that a config or device does not meet; "": none.
        shortest: smallest `model.block_size` at which it is faster than the definition.
    """

    attend: Attend
    runs_on: Callable[[jax.Device], bool]
    lacks: Callable[[Config, jax.Device], str]
    shortest: int = 0


def best(config: Config, mesh: Mesh | AbstractMesh | None = None) -> Ops:
    """Return the fastest operations for a config on the devices of a mesh.

    Args:
        config: the run.
        mesh: the devices, which may be absent (a topology of another machine); None: JAX's first device.

    Raises:
        UserError: if `train.attention` names a kernel that cannot run.
    """
    if isinstance(mesh, AbstractMesh):
        return PLAIN._replace(dtype=jnp.dtype(config.train.compute_dtype))
    device = jax.local_devices()[0] if mesh is None else mesh.devices.flat[0]
    return of_device(device, config.train.compute_dtype)._replace(attend=choose_attention(config, device)[0])


def of_device(device: jax.Device, dtype: str = "float32") -> Ops:
    """Return the operations of a device for any model: for generation, where `train.attention` does not apply."""
    return (CPU if device.platform == "cpu" else PLAIN)._replace(dtype=jnp.dtype(dtype))


def choose_attention(config: Config, device: jax.Device) -> tuple[Attend, str]:
    """Return the attention that `train.attention` selects on a device, and a note about the choice.

    Raises:
        UserError: if a kernel is selected by name and cannot run.
    """
    asked = config.train.attention
    if asked not in ("auto", "xla"):
        kernel = KERNELS[asked]
        lack = kernel.lacks(config, device) if kernel.runs_on(device) else f"does not run on {device.platform} devices"
        if lack:
            raise UserError(f"train.attention {asked} {lack}; use xla or auto")
        return kernel.attend, ""
    for name, kernel in KERNELS.items() if asked == "auto" else ():
        if kernel.runs_on(device) and config.model.block_size >= kernel.shortest:
            if lack := kernel.lacks(config, device):
                return attend, f"attention by xla, with all T x T scores in memory: {name} {lack}"
            return kernel.attend, ""
    return attend, ""


def _capability(device: jax.Device) -> tuple[int, ...]:
    """Return the CUDA compute capability, such as (9, 0) for Hopper; empty for other devices."""
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


def _dropout(config: Config, _: jax.Device | None = None) -> str:
    return f"does not support dropout (model.dropout {config.model.dropout:g})" if config.model.dropout else ""


KERNELS = {
    "cudnn": Kernel(
        KernelAttention(cudnn_attention, documents=False), lambda device: bool(_capability(device)), _cudnn_lacks
    ),
    "splash": Kernel(KernelAttention(splash_attention), lambda device: device.platform == "tpu", _dropout),
    "tiled": Kernel(cpu.attend, lambda device: device.platform == "cpu", _dropout, SHORTEST),
}
