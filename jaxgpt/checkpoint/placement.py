"""Placement of weights: the devices that they are read onto, and adapters merged there."""

from __future__ import annotations

from typing import Any, NamedTuple

import flax.linen as nn
import jax
from jax.sharding import Mesh, SingleDeviceSharding

from jaxgpt.config import LoraConfig, ModelConfig
from jaxgpt.errors import UserError, short_repr
from jaxgpt.model import GPT
from jaxgpt.model.lora import boxed_trained, is_adapter, merge
from jaxgpt.parallel.arrays import put_array
from jaxgpt.parallel.rules import AXES, RULES, Rules, shardings


class Place(NamedTuple):
    """The devices for weights.

    Attributes:
        mesh: mesh of the axes data, fsdp, expert, context and tensor; None: the first local device.
        rules: complete sharding table.
        model: class of the model; None: GPT, and weights of a subclass that was given in Python are rejected.
    """

    mesh: Mesh | None = None
    rules: Rules = RULES
    model: type[GPT] | None = None

    def like(self, model: ModelConfig, lora: LoraConfig) -> Any:
        """Return the shapes, dtypes and shardings of trainable parameters with unstacked layers: weights, or adapters."""
        module = self.model or GPT
        boxed = boxed_trained(module(model), lora)
        params = nn.unbox(boxed)
        if self.mesh is None:
            device = SingleDeviceSharding(jax.local_devices()[0])
            places: Any = jax.tree.map(lambda _: device, params)
        else:
            places = shardings(boxed, model, self.mesh, self.rules)
        return jax.tree.map(lambda x, place: jax.ShapeDtypeStruct(x.shape, x.dtype, sharding=place), params, places)


def merge_placed(params: Any, adapters: Any, alpha: float) -> Any:
    """Merge adapters into weights, like `merge`, and keep the sharding of every weight.

    The complete matrices of one module at a time are merged on the first local device, so the result and its checksum are equal
    bit for bit on every mesh.
    """
    merged = dict(params)
    for name, adapter in adapters.items():
        if not is_adapter(adapter):
            merged[name] = merge_placed(params.get(name, {}), adapter, alpha)
            continue
        kernels = {kernel: params[kernel] for kernel in adapter["b"] if kernel in params}
        complete = merge(_on_first_device(kernels), {name: _on_first_device(adapter)}, alpha)
        for kernel, module in kernels.items():
            merged[kernel] = module | {"kernel": put_array(complete[kernel]["kernel"], module["kernel"].sharding)}
    return merged


def _on_first_device(tree: Any) -> Any:
    device = SingleDeviceSharding(jax.local_devices()[0])
    return jax.tree.map(lambda leaf: put_array(leaf, device), tree)


def check_mesh(mesh: Any) -> None:
    """Raise `UserError` unless an argument is a mesh with the axes of the sharding table."""
    if not isinstance(mesh, Mesh) or set(mesh.axis_names) != set(AXES):
        raise UserError(
            f"mesh must be a mesh with the axes {', '.join(AXES)}, as jaxgpt.parallel.mesh.make_mesh returns it: "
            f"{short_repr(mesh)}"
        )
