"""The device mesh, which exists even for a single device; on a CPU, every core can be a device."""

from __future__ import annotations

import math
from collections.abc import Iterator, Sequence
from dataclasses import fields
from typing import Any, TypeVar

import jax
import numpy as np
from jax.experimental import mesh_utils
from jax.sharding import AxisType, Mesh

from jaxgpt.config import Config, MeshConfig
from jaxgpt.errors import UserError
from jaxgpt.parallel.rows import microbatches, row_shards
from jaxgpt.parallel.rules import AXES, RULES

T = TypeVar("T")


def resolve(config: Config, n_devices: int, processes: int = 1, tpu: bool = False) -> tuple[MeshConfig, str]:
    """Resolve each -1 in a mesh.

    A -1 of `fsdp` becomes the greatest common divisor of `n_embd` and the number of remaining devices. For `tensor`, `n_head`
    and the MLP's width replace `n_embd`. A -1 of `data` becomes the number of devices still remaining, except devices that
    would only compute padding. For example, a batch of 12 windows on 8 devices uses 6, with 2 windows each. With several
    processes or on TPUs, `data` includes the devices that only compute padding.

    Args:
        config: settings of the mesh to resolve, the batch and the model.
        processes: number of processes that share the `n_devices` devices; several processes must use all devices.
        tpu: whether the devices are TPUs; their compiler needs a mesh of all devices, or of a divisor of their number.

    Returns:
        The mesh without -1, and a note about idle devices, padding and replicated computation, or "".

    Raises:
        UserError: if the mesh needs more devices than exist, does not divide a width or number of heads, or leaves devices
            idle that must be used.
    """
    may_idle = processes == 1 and not tpu
    sizes = _without_auto(config, n_devices, may_idle)
    problem = _problem(config, sizes, n_devices, processes, tpu)
    if problem:
        raise UserError(f"{problem}: use --mesh.data -1{_fitting_flags(sizes)}, which fits any number of devices")
    return MeshConfig(**sizes), "; ".join(_advice(config, sizes, n_devices))


def _without_auto(config: Config, n_devices: int, may_idle: bool) -> dict[str, int]:
    """Return the size of each axis with each -1 replaced; the sizes may not fit the devices.

    The devices that remain after the fixed sizes are assigned to fsdp, then to tensor, then to data. If devices `may_idle`,
    `data` excludes devices that would only compute padding.
    """
    sizes = sizes_of(config.mesh)
    fixed = math.prod(size for size in sizes.values() if size > 0)
    remaining = max(n_devices // fixed, 1)
    for axis, divided in _divided_widths(config).items():
        if sizes[axis] == -1:
            sizes[axis] = math.gcd(remaining, *divided.values())
            remaining //= sizes[axis]
    if sizes["data"] != -1:
        return sizes

    sizes["data"] = remaining
    if may_idle:
        batch_size = config.train.batch_size
        others = math.prod(sizes[axis] for axis in RULES["batch"] if axis != "data")
        share = math.ceil(batch_size / (remaining * others))  # windows per device
        sizes["data"] = math.ceil(batch_size / (share * others))
    return sizes


def _problem(config: Config, sizes: dict[str, int], n_devices: int, processes: int, tpu: bool) -> str:
    """Return why the devices cannot form the mesh, or ""."""
    used = math.prod(sizes.values())
    if used > n_devices:
        return f"the mesh needs {used} devices ({_shape(sizes)}), but only {n_devices} exist"
    for axis, divided in _divided_widths(config).items():
        for name, width in divided.items():
            if width % sizes[axis]:
                return f"mesh.{axis} {sizes[axis]} does not divide {name} {width}"
    if processes > 1 and used < n_devices:
        return f"{_usage(sizes, n_devices)}, but {processes} processes must use all of their devices"
    if tpu and n_devices % used:
        return f"{_usage(sizes, n_devices)}, but a TPU mesh must use all devices, or a divisor of their number"
    return ""


def _usage(sizes: dict[str, int], n_devices: int) -> str:
    return f"{math.prod(sizes.values())} of {n_devices} devices in use ({_shape(sizes)})"


def _shape(sizes: dict[str, int]) -> str:
    """Format the axes of a mesh, such as "data 2 x tensor 4"."""
    return " x ".join(f"{axis} {size}" for axis, size in sizes.items() if size > 1) or "data 1"


def _divided_widths(config: Config) -> dict[str, dict[str, int]]:
    """Return the widths and numbers of heads that an axis of the mesh must divide, keyed by axis, then by name.

    `Config` itself checks the axes that cannot be -1: expert and context.
    """
    model = config.model
    return {
        "fsdp": {"model.n_embd": model.n_embd},
        "tensor": {"model.n_head": model.n_head, "the MLP's width": model.mlp_width},
    }


def _fitting_flags(sizes: dict[str, int]) -> str:
    """Return the flags that, with --mesh.data -1, fit any number of devices and any model."""
    flags = ""
    if sizes["fsdp"] * sizes["tensor"] > 1:
        flags = " --mesh.fsdp -1 --mesh.tensor 1"
    for axis in ("expert", "context"):
        if sizes[axis] > 1:
            flags += f" --mesh.{axis} 1"
    return flags


def _advice(config: Config, sizes: dict[str, int], n_devices: int) -> Iterator[str]:
    """Yield notes on devices or computation that a mesh wastes, each with a fix."""
    if math.prod(sizes.values()) < n_devices:
        larger = "a larger --train.batch-size or " if config.mesh.data == -1 else ""
        yield f"{_usage(sizes, n_devices)}: {larger}a different mesh, such as --mesh.data -1 --mesh.fsdp -1, uses more"

    count, rows = microbatches(config.train, row_shards(sizes))
    windows = count * rows
    padding = windows - config.train.batch_size
    if padding:
        wasted = f"{padding:,} of {windows:,} windows per step are padding"
        yield f"{wasted}: --train.batch-size {windows} would use them"

    tensor = sizes["tensor"]
    repeated = (
        ("vocab_size", config.model.vocab_size, "logits"),
        ("n_kv_head", config.model.kv_heads, "keys and values"),
    )
    for name, size, what in repeated:
        if size % tensor:
            yield (
                f"mesh.tensor {tensor} does not divide model.{name} {size}, so each device computes all {what}: "
                f"use a multiple of {tensor}"
            )


def make_mesh(config: MeshConfig, devices: Sequence[Any] | None = None) -> Mesh:
    """Make a mesh of the first devices in `devices` (None: all devices), as many as `config` needs.

    On a TPU, neighbors in the mesh are neighbors on the torus where possible. Slices, which only a network connects, are
    placed along `data`: each holds a full copy of the weights.

    Raises:
        UserError: if a size is -1 (`resolve` replaces -1), there are too few devices, or the slices do not split mesh.data
            evenly.
    """
    # Choose the devices.
    shape = tuple(sizes_of(config).values())
    fix = "pass the sizes that jaxgpt.parallel.mesh.resolve returns"
    if -1 in shape:
        raise UserError(f"the mesh {shape} has a size of -1: {fix}")
    needed = math.prod(shape)
    available = jax.devices() if devices is None else devices
    chosen = list(available)[:needed]
    if len(chosen) < needed:
        raise UserError(f"the mesh {shape} needs {needed} devices, but only {len(chosen)} exist: {fix}")

    # Split mesh.data, the first axis, over the slices.
    slices = _by_slice(chosen)
    count = len(slices)
    lengths = [len(group) for group in slices]
    if config.data % count or len(set(lengths)) > 1:
        raise UserError(
            f"mesh.data {config.data} cannot be split over {count} slices ({' + '.join(map(str, lengths))} devices), and "
            f"each slice holds a copy of the weights: use --mesh.data {count} --mesh.fsdp -1"
        )
    shape_of_slice = (config.data // count, *shape[1:])
    grid = np.concatenate([_on_torus(shape_of_slice, group) for group in slices])
    return Mesh(grid, AXES, axis_types=(AxisType.Auto,) * len(AXES))


def _by_slice(devices: list[Any]) -> list[list[Any]]:
    """Group devices by TPU slice, in the order of their first devices; other devices are one slice.

    JAX also reports the hosts of a GPU or CPU cluster as slices, but there, any mesh axis may span the network.
    """
    slices: dict[int, list[Any]] = {}
    for device in devices:
        index = 0
        if device.platform == "tpu":
            index = getattr(device, "slice_index", None) or 0
        slices.setdefault(index, []).append(device)
    return list(slices.values())


def _on_torus(shape: tuple[int, ...], devices: list[Any]) -> np.ndarray:
    """Arrange the devices of one slice in an array of this shape."""
    try:
        return mesh_utils.create_device_mesh(shape, devices, allow_split_physical_axes=True)
    except (AssertionError, NotImplementedError, ValueError):
        # The devices are a part of a torus, or the shape does not match its dimensions.
        return np.array(devices).reshape(shape)


def sizes_of(config: MeshConfig) -> dict[str, int]:
    """Return the size of each axis, possibly -1, in the order of `AXES`."""
    return {f.name: getattr(config, f.name) for f in fields(config)}


def block_on_cpu_mesh(mesh: Mesh, out: T) -> T:
    """Block on a result on a mesh of several CPU devices; on other meshes, return it immediately.

    XLA runs the devices of a CPU on one thread pool. With two programs in flight, devices that wait in a collective can hold
    all threads, so that the awaited devices never run. XLA aborts after 40 seconds. One program at a time cannot deadlock,
    and costs nothing, because host and devices share their cores.
    """
    if mesh.devices.size > 1 and mesh.devices.flat[0].platform == "cpu":
        jax.block_until_ready(out)
    return out
