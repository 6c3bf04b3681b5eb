"""Devices in a grid, and the one table that says which axis of an array is split along which axis of the grid.

There is always a mesh: one device is a mesh of one, and on a CPU every core can be a device.
"""

from __future__ import annotations

import itertools
import math
from collections.abc import Iterator, Sequence
from contextlib import contextmanager
from dataclasses import fields
from typing import Any, TypeVar

import flax.linen as nn
import jax
import numpy as np
from jax.experimental import mesh_utils
from jax.sharding import AxisType, Mesh, NamedSharding, PartitionSpec

from jaxgpt.config import Config, MeshConfig, ModelConfig, UserError

T = TypeVar("T")

AXES = ("data", "fsdp", "tensor")

# Logical axis -> mesh axes. Weights: an axis of width D is split by fsdp, everything wide by tensor. Activations: the
# batch is split by both data and fsdp, and their width is whole, but for the moment in which tokens are looked up.
RULES: dict[str, tuple[str, ...]] = {
    "batch": ("data", "fsdp"),
    "lookup": ("data",),
    "length": (),
    "width": (),
    "embed": ("fsdp",),
    "vocab": ("tensor",),
    "heads": ("tensor",),
    "kv_heads": ("tensor",),
    "head_dim": (),
    "mlp": ("tensor",),
    "position": (),
    "norm": (),
    "layers": (),
    "matrix_shards": ("fsdp",),  # Muon's matrices, on their way to
    "matrices": ("fsdp", "data", "tensor"),  # where it works on them
}


def resolve(config: Config, n_devices: int, processes: int = 1) -> tuple[MeshConfig, str]:
    """Put numbers to a mesh's -1, so that the devices divide the batch.

    Returns:
        The mesh in numbers, and a note where devices stay idle (else "").

    Raises:
        UserError: more devices asked for than there are, or a batch, width or number of heads that does not divide, or
            devices that would stay idle in a run of several processes.
    """
    sizes = sizes_of(config.mesh)
    rows = config.train.batch_size // config.train.accumulation
    fixed = math.prod(size for size in sizes.values() if size > 0)
    if fixed > n_devices:
        asked = " x ".join(f"{name} {size}" for name, size in sizes.items() if size > 1)
        instead = _nearest(config, n_devices, rows, processes)
        raise UserError(f"the mesh asks for {fixed} devices ({asked}), there are {n_devices}: {instead}")
    free = next((name for name, size in sizes.items() if size == -1), None)
    note = ""
    if free:
        rest = n_devices // fixed
        fits = [d for d in range(1, rest + 1) if _divides(config, sizes | {free: d}, rows)]
        sizes[free] = max(fits, default=1)
        if sizes[free] < rest:
            note = f"{fixed * sizes[free]} of {n_devices} devices in use: {rest} do not divide the batch of {rows}"
    for value, name, axis in _split_widths(config.model):
        if value % sizes[axis]:
            raise UserError(
                f"mesh.{axis} {sizes[axis]} does not divide {name} {value}: {_nearest(config, n_devices, rows, processes)}"
            )
    ways = sizes["data"] * sizes["fsdp"]
    if rows % ways:
        raise UserError(
            f"mesh.data * mesh.fsdp = {ways} does not divide the {rows} windows of a (micro-)batch: "
            f"{_nearest(config, n_devices, rows, processes)}, or a train.batch_size of "
            f"{_multiple(config.train.batch_size, ways * config.train.accumulation)}"
        )
    used = math.prod(sizes.values())
    if processes > 1 and used < n_devices:
        raise UserError(
            f"{used} of the {n_devices} devices of {processes} processes would be in use ({rows} windows in a "
            f"(micro-)batch), and each has to take part: --mesh.data -1 with a train.batch_size of "
            f"{_multiple(config.train.batch_size, n_devices * config.train.accumulation)}, or fewer processes or devices"
        )
    return MeshConfig(**sizes), note


def make_mesh(config: MeshConfig, devices: Sequence[Any] | None = None) -> Mesh:
    """The grid itself, over the first of the devices (default: those there are).

    On a TPU, neighbours in the grid are neighbours on the torus as far as that goes, and slices, which only a network joins,
    share nothing but whole copies of the weights: they lie along `data`.

    Raises:
        UserError: mesh.data is no multiple of the number of slices.
    """
    shape = tuple(sizes_of(config).values())
    chosen = list(jax.devices() if devices is None else devices)[: math.prod(shape)]
    slices: dict[int, list[Any]] = {}
    for device in chosen:
        # JAX also calls the machines of a GPU or CPU cluster slices; a network is all that they know, and no obstacle.
        index = getattr(device, "slice_index", None) or 0
        slices.setdefault(index if device.platform == "tpu" else 0, []).append(device)
    if config.data % len(slices):
        raise UserError(f"mesh.data {config.data} is no multiple of the {len(slices)} slices: each holds whole copies")
    inside = (config.data // len(slices), *shape[1:])
    grid = np.concatenate([_on_torus(inside, group) for group in slices.values()])
    return Mesh(grid, AXES, axis_types=(AxisType.Auto,) * len(AXES))


def rules_for(model: ModelConfig, mesh: Mesh) -> dict[str, tuple[str, ...]]:
    """The table for one model: an axis that the mesh does not divide stays whole (65 characters on two devices)."""
    sizes = {"vocab": model.vocab_size, "kv_heads": model.kv_heads}
    ways = {name: math.prod(mesh.shape[a] for a in RULES[name]) for name in sizes}
    return RULES | {name: () for name in sizes if sizes[name] % ways[name]}


def spec(names: tuple[str | None, ...], rules: dict[str, tuple[str, ...]]) -> PartitionSpec:
    """Logical axes of one array to mesh axes.

    Raises:
        ValueError: two axes of the array would be split along the same axis of the mesh.
    """
    ways = [rules[name] if name else () for name in names]
    used = [axis for way in ways for axis in way]
    if len(used) != len(set(used)):
        raise ValueError(f"the axes {names} of an array collide on the mesh: {ways}")
    return PartitionSpec(*[way or None for way in ways])


def shardings(boxed: Any, model: ModelConfig, mesh: Mesh) -> Any:
    """Place every parameter by its logical axes, which linen's boxes carry; one without axes is on every device."""
    rules = rules_for(model, mesh)

    def place(leaf: Any) -> NamedSharding:
        return NamedSharding(mesh, spec(leaf.names, rules)) if isinstance(leaf, nn.Partitioned) else everywhere(mesh)

    return jax.tree.map(place, boxed, is_leaf=lambda leaf: isinstance(leaf, nn.Partitioned))


def shardings_like(tree: Any, boxed: Any, model: ModelConfig, mesh: Mesh) -> Any:
    """Place every leaf of a tree (a train state, of any optimizer) as the parameter of its name and shape.

    All others are on every device: counters, and what an optimizer keeps in another shape (Adafactor's row and column means).

    Args:
        tree: arrays, or their shapes; the path of a parameter's moment ends with the parameter's own.
        boxed: the parameters, or their shapes, with their logical axes.
        model: for the table.
        mesh: the devices.
    """
    shapes = map(np.shape, jax.tree.leaves(nn.unbox(boxed)))
    places = jax.tree_util.tree_leaves_with_path(shardings(boxed, model, mesh))
    known = {(_keys(path), shape): place for (path, place), shape in zip(places, shapes, strict=True)}

    def place(path: tuple[Any, ...], leaf: Any) -> NamedSharding:
        keys = _keys(path)
        found = (known.get((keys[i:], np.shape(leaf))) for i in range(len(keys)))
        return next((place for place in found if place), everywhere(mesh))

    return jax.tree_util.tree_map_with_path(place, tree)


def _keys(path: tuple[Any, ...]) -> tuple[str, ...]:
    return tuple(key.key for key in path if isinstance(key, jax.tree_util.DictKey))


def batch_sharding(mesh: Mesh, several: bool = False) -> NamedSharding:
    """Rows of a batch, `[B, T]`, over the data and fsdp axes; of each of several batches, `[K, B, T]`."""
    rows = spec(("batch", "length"), RULES)
    return NamedSharding(mesh, PartitionSpec(None, *rows) if several else rows)


def everywhere(mesh: Mesh) -> NamedSharding:
    """A copy on every device: what every process can read."""
    return NamedSharding(mesh, PartitionSpec())


def settle(mesh: Mesh, out: T) -> T:
    """On a CPU with several devices, wait for what was just dispatched; elsewhere, do nothing.

    XLA runs such devices on one pool of threads. Two programs under way can fill it with the first device's halves, each
    waiting in a collective for a second half that finds no thread: it aborts after 40 seconds. One at a time cannot, and
    costs nothing where the host and the devices share their cores anyway.
    """
    if mesh.devices.size > 1 and mesh.devices.flat[0].platform == "cpu":
        jax.block_until_ready(out)
    return out


@contextmanager
def on_mesh(mesh: Mesh, model: ModelConfig) -> Iterator[None]:
    """Within this, the logical axes that layers name are those of the mesh."""
    table = [(name, axes or None) for name, axes in rules_for(model, mesh).items()]
    with jax.set_mesh(mesh), nn.logical_axis_rules(table):
        yield


def _on_torus(shape: tuple[int, ...], devices: list[Any]) -> np.ndarray:
    """Devices of one slice as an array of that shape."""
    try:
        return mesh_utils.create_device_mesh(shape, devices, allow_split_physical_axes=True)
    except (AssertionError, NotImplementedError, ValueError):
        # A part of a torus, or a shape that its sides cannot be made of.
        return np.array(devices).reshape(shape)


def sizes_of(config: MeshConfig) -> dict[str, int]:
    """Devices along each axis, in the order of `AXES`."""
    return {f.name: getattr(config, f.name) for f in fields(config)}


def _split_widths(model: ModelConfig) -> list[tuple[int, str, str]]:
    return [
        (model.n_embd, "model.n_embd", "fsdp"),
        (model.n_head, "model.n_head", "tensor"),
        (model.mlp_width, "the MLP's width", "tensor"),
    ]


def _divides(config: Config, sizes: dict[str, int], rows: int) -> bool:
    widths = all(value % sizes[axis] == 0 for value, _, axis in _split_widths(config.model))
    return widths and rows % (sizes["data"] * sizes["fsdp"]) == 0


def _nearest(config: Config, n_devices: int, rows: int, processes: int) -> str:
    """The mesh of most devices that splits nothing further than was asked, and that devices, batch and widths allow.

    Of several processes each has to take part, with all its devices.
    """
    choices = []
    for axis, size in sizes_of(config.mesh).items():
        most = n_devices if size == -1 else min(size, n_devices)
        choices.append([d for d in range(1, most + 1) if _divides(config, dict.fromkeys(AXES, 1) | {axis: d}, rows)])
    meshes = (dict(zip(AXES, sizes, strict=True)) for sizes in itertools.product(*choices))
    fits = [m for m in meshes if math.prod(m.values()) <= n_devices and _divides(config, m, rows)]
    best = max(fits, key=lambda mesh: math.prod(mesh.values()))
    if processes > 1 and math.prod(best.values()) < n_devices:
        return f"no such mesh over all {n_devices} devices would"
    return " ".join(f"--mesh.{name} {size}" for name, size in best.items()) + " would do"


def _multiple(value: int, of: int) -> int:
    return max(of, round(value / of) * of)
