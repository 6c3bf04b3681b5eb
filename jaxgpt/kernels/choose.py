"""The fastest operations for a config and its devices: `best`."""

from __future__ import annotations

import re
from typing import NamedTuple

import jax
import jax.numpy as jnp
from jax.sharding import AbstractMesh, Mesh

from jaxgpt.config import Config
from jaxgpt.data_files import has_documents
from jaxgpt.kernels import activations, cpu, norms
from jaxgpt.kernels.context import CONTEXT_KERNELS, ChosenAttention, attend_instead, choose_context_attention
from jaxgpt.kernels.experts import large_tiled_experts, ragged_experts, tiled_experts
from jaxgpt.kernels.flash import cudnn_attention, splash_attention
from jaxgpt.kernels.tiled import SHORTEST
from jaxgpt.ops import AttendFn, Ops
from jaxgpt.ops.attention import attend

# Operations by platform: TPUs and unknown platforms, CPUs, GPUs. Attention in training is chosen separately (`KERNELS`).
PLAIN = Ops(activate=activations.activate, experts=ragged_experts)
CPU = PLAIN._replace(linear=cpu.linear, rotation=cpu.rotation, attend=cpu.attend, experts=tiled_experts)
GPU = PLAIN._replace(norm=norms.norm, experts=large_tiled_experts)


class AttentionKernel(NamedTuple):
    """The attention kernel of a platform.

    Attributes:
        name: value of `train.attention` that selects the kernel.
        attend: the function for `Ops.attend`.
    """

    name: str
    attend: AttendFn


# The attention kernel of each platform.
KERNELS = {
    "cpu": AttentionKernel("tiled", cpu.attend),
    "gpu": AttentionKernel("cudnn", cudnn_attention),
    "tpu": AttentionKernel("splash", splash_attention),
}
XLA = AttentionKernel("xla", attend)


class Target(NamedTuple):
    """A kind of device, which need not be present, such as `jaxgpt.plan.topology.parse_topology("v5e:2x4").target`.

    Attributes:
        platform: cpu, gpu or tpu.
        compute_capability: compute capability of a GPU as JAX formats it, such as 9.0; "" on other platforms.
    """

    platform: str
    compute_capability: str = ""

    @staticmethod
    def of(device: jax.Device | Target) -> Target:
        """Return the kind of a device."""
        # Only GPUs have a compute capability.
        return Target(device.platform, str(getattr(device, "compute_capability", "")))


def best(config: Config, mesh: Mesh | AbstractMesh | Target | None = None) -> Ops:
    """Return the fastest operations for a config on the devices of a mesh.

    Some operations have a derivative for reverse mode only (`jax.custom_vjp`). For `jax.jvp`, use the definitions:
    `GPT(config.model)`.

    Args:
        config: settings of the run.
        mesh: the devices, or their kind; an `AbstractMesh`: operations for any device; None: this process's first device.

    Raises:
        UserError: if `train.attention` selects a kernel that cannot run.
    """
    if isinstance(mesh, AbstractMesh):
        return _for_any_device(config)
    if isinstance(mesh, Target):
        target = mesh
    elif mesh is None:
        target = Target.of(jax.local_devices()[0])
    else:
        target = Target.of(mesh.devices.flat[0])
    attention = choose_attention(config, target).attend
    return of_device(target, config.train.compute_dtype)._replace(attend=attention)


def _for_any_device(config: Config) -> Ops:
    """Return the operations that run on every platform."""
    attention: AttendFn = attend
    if config.mesh.context > 1:
        attention = choose_context_attention(config, "").attend
    return PLAIN._replace(dtype=jnp.dtype(config.train.compute_dtype), attend=attention)


def of_device(device: jax.Device | Target, dtype: str = "float32") -> Ops:
    """Return the operations of a device for generation, where `train.attention` does not apply."""
    ops = {"cpu": CPU, "gpu": GPU}.get(device.platform, PLAIN)
    return ops._replace(dtype=jnp.dtype(dtype))


def choose_attention(config: Config, device: jax.Device | Target) -> ChosenAttention:
    """Return a device's attention function, with a note if `auto` falls back to a slower function.

    On one device, a fallback has no note for short windows, because their scores need little memory.

    Raises:
        UserError: if a kernel is selected by name and cannot run.
    """
    target = Target.of(device)
    if config.mesh.context > 1:
        return choose_context_attention(config, target.platform)
    kernel = KERNELS.get(target.platform, XLA)
    name: str = config.train.attention
    if name == "auto":
        name = kernel.name
    if name == "xla":
        return ChosenAttention(attend)

    if name == kernel.name:
        problem = _problem(name, config, target)
    elif name in CONTEXT_KERNELS and name != "splash":  # splash also runs on a device alone
        problem = "needs positions that are divided over devices (mesh.context 2 or more)"
    else:
        problem = f"does not run on {target.platform} devices"
    if not problem:
        return ChosenAttention(kernel.attend)

    chosen = attend_instead(config, name, problem)
    # `attend` needs much memory only for long windows.
    return chosen if config.window >= SHORTEST else chosen._replace(note="")


def _problem(name: str, config: Config, target: Target) -> str:
    """Return why a platform's kernel cannot run with a config on a kind of device, or ""."""
    if config.model.dropout:
        return f"does not support dropout (model.dropout {config.model.dropout:g})"
    if name == "cudnn":
        return _cudnn_problem(config, target.compute_capability)
    return ""


def _cudnn_problem(config: Config, capability: str) -> str:
    """Return why cuDNN attention cannot run with a config on a GPU of a compute capability, or ""."""
    if not re.fullmatch(r"([89]|\d\d)\.\d", capability):  # AMD GPUs have names, such as gfx942
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
