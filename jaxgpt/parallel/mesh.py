"""The device mesh, and the one table that maps logical axes of arrays to mesh axes.

There is always a mesh: one device is a mesh of one, and on a CPU every core can be a device.
"""

from __future__ import annotations

import itertools
import math
from collections.abc import Iterator, Mapping, Sequence
from contextlib import contextmanager
from dataclasses import fields
from typing import Any, NamedTuple, TypeVar

import flax.linen as nn
import jax
import numpy as np
from jax.experimental import mesh_utils
from jax.sharding import AxisType, Mesh, NamedSharding, PartitionSpec

from jaxgpt.config import Config, MeshConfig, ModelConfig, TrainConfig
from jaxgpt.errors import UserError, did_you_mean, short_repr

T = TypeVar("T")

AXES = ("data", "fsdp", "tensor")
PADDED_VOCAB = 128  # suggest a vocabulary that is a multiple of this, as matrix units prefer

# Logical axis -> mesh axes. Weights: an axis of width D is split by fsdp, other wide axes by tensor. Activations: the
# batch is split by data and fsdp, and the width is not split, except while embeddings are looked up.
Rules = Mapping[str, tuple[str, ...]]
RULES: Rules = {
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
    "rank": (),  # rank of adapters; their second axis is split like the weight
    "layers": (),
    "matrix_shards": ("fsdp",),  # Muon: stacked matrices before resharding
    "matrices": ("fsdp", "data", "tensor"),  # Muon: one matrix per device
}


class Microbatches(NamedTuple):
    """The microbatches of a step.

    Attributes:
        accumulation: number of microbatches that each device computes per step.
        rows: windows per microbatch, over all devices, including padding.
    """

    accumulation: int
    rows: int


def microbatches(train: TrainConfig, ways: int) -> Microbatches:
    """Split a batch of B windows over `ways` groups of devices and, in each, into equal microbatches.

    On one device, a microbatch has `m = ceil(B / train.accumulation)` windows, the most that a device computes at a time. With
    several, a device's share is `s = ceil(B / ways)` windows, and its smallest number of microbatches `n = ceil(s / m)`. Up to
    twice as many are used where that makes them equal without padding. Otherwise, and where B is not a multiple of `ways`, the
    batch is padded to `accumulation * rows` windows. Padding has no targets, so it does not change the mean loss and its
    gradient.

    Args:
        train: `batch_size` and `accumulation`.
        ways: product of the sizes of the data and fsdp axes.
    """
    share = math.ceil(train.batch_size / ways)
    fewest = math.ceil(share / math.ceil(train.batch_size / train.accumulation))
    count = next((n for n in range(fewest, 2 * fewest) if share % n == 0), fewest)
    return Microbatches(count, ways * math.ceil(share / count))


def resolve(config: Config, n_devices: int, processes: int = 1, tpu: bool = False) -> tuple[MeshConfig, str]:
    """Resolve each -1 in a mesh.

    `data` takes all devices that `fsdp` and `tensor` leave, except those that would only compute padding: 12 windows on 8
    devices are 2 for each of 6. If every device must take part, it takes all.

    Args:
        config: a mesh, a batch and a model.
        n_devices: number of devices.
        processes: number of processes that share them; all of their devices have to be used.
        tpu: whether the devices are TPUs; their compiler needs a mesh of all devices, or of a divisor of their number.

    Returns:
        The sizes, and a note about idle devices, padding and work that is not divided (else "").

    Raises:
        UserError: if the mesh needs more devices than exist, does not divide a width or number of heads, or leaves devices
            idle that must be used.
    """
    whole = processes > 1 or tpu
    sizes = _sizes(config, n_devices, whole)
    if problem := _problem(config.model, sizes, n_devices, processes, tpu):
        raise UserError(f"{problem}: use {_nearest(config, n_devices, whole)}")
    return MeshConfig(**sizes), "; ".join(_advice(config, sizes, n_devices))


def _sizes(config: Config, n_devices: int, whole: bool) -> dict[str, int]:
    """Replace each -1 in a mesh; `whole`: all devices must be used."""
    sizes = sizes_of(config.mesh)
    rest = max(n_devices // math.prod(size for size in sizes.values() if size > 0), 1)
    if free := next((axis for axis in ("fsdp", "tensor") if sizes[axis] == -1), None):
        even = whole or sizes["data"] == -1  # data takes the rest, which must divide evenly
        fits = [size for size in _fitting(config.model, free, rest) if not (even and rest % size)]
        sizes[free] = max(fits)
        rest //= sizes[free]
    if sizes["data"] == -1:
        sizes["data"] = rest if whole else _busy(config.train, rest, sizes["fsdp"])
    return sizes


def _problem(model: ModelConfig, sizes: dict[str, int], n_devices: int, processes: int, tpu: bool) -> str:
    """Return why a mesh cannot be used, or ""."""
    used = math.prod(sizes.values())
    if used > n_devices:
        return f"the mesh needs {used} devices ({_product(sizes)}), there are {n_devices}"
    for value, name, axis in _split_widths(model):
        if value % sizes[axis]:
            return f"mesh.{axis} {sizes[axis]} does not divide {name} {value}"
    idle = f"{used} of {n_devices} devices in use ({_product(sizes)})"
    if processes > 1 and used < n_devices:
        return f"{idle}, but {processes} processes must use all of their devices"
    if tpu and n_devices % used:
        return f"{idle}, but a mesh of TPUs needs all of them, or a divisor of their number"
    return ""


def _advice(config: Config, sizes: dict[str, int], n_devices: int) -> Iterator[str]:
    """Yield what a mesh wastes, each with the flags that avoid it."""
    model, train, tensor = config.model, config.train, sizes["tensor"]
    used, inner = math.prod(sizes.values()), sizes["fsdp"] * tensor
    if used < n_devices:
        if n_devices % inner:
            flags = _nearest(config, n_devices, whole=True)
        elif config.mesh.data == -1:
            multiple = n_devices // tensor
            flags = f"--train.batch-size {math.ceil(train.batch_size / multiple) * multiple}"
        else:
            flags = f"--mesh.data {n_devices // inner}"
        yield f"{used} of {n_devices} devices in use ({_product(sizes)}): {flags} would use all"
    count, rows = microbatches(train, sizes["data"] * sizes["fsdp"])
    if padding := count * rows - train.batch_size:
        wasted = f"{padding:,} of {count * rows:,} windows per step are padding"
        yield f"{wasted}: --train.batch-size {count * rows} would use them"
    if model.vocab_size % tensor:
        multiple = math.lcm(PADDED_VOCAB, tensor)
        padded = math.ceil(model.vocab_size / multiple) * multiple
        whole = f"mesh.tensor {tensor} does not divide model.vocab_size {model.vocab_size}, so each device computes all logits"
        yield f"{whole}: --model.vocab-size {padded} would divide them"
    if model.kv_heads % tensor:
        whole = (
            f"mesh.tensor {tensor} does not divide model.n_kv_head {model.kv_heads}, so each device computes all keys"
        )
        yield f"{whole} and values: --model.n-kv-head {math.lcm(model.kv_heads, tensor)} would divide them"


def make_mesh(config: MeshConfig, devices: Sequence[Any] | None = None) -> Mesh:
    """Make the mesh over the first of the devices (default: all devices).

    On a TPU, neighbors in the mesh are neighbors on the torus where possible. Slices, which only a network connects, are
    placed along `data`: each holds a full copy of the weights.

    Raises:
        UserError: if mesh.data is not a multiple of the number of slices, or a size is -1: `resolve` replaces it.
    """
    shape = tuple(sizes_of(config).values())
    if -1 in shape:
        raise UserError(f"the mesh {shape} has a size of -1: pass the sizes that jaxgpt.parallel.mesh.resolve returns")
    chosen = list(jax.devices() if devices is None else devices)[: math.prod(shape)]
    slices: dict[int, list[Any]] = {}
    for device in chosen:
        # JAX also calls the hosts of a GPU or CPU cluster slices, but there every mesh goes over the network.
        index = getattr(device, "slice_index", None) or 0
        slices.setdefault(index if device.platform == "tpu" else 0, []).append(device)
    if config.data % len(slices):
        raise UserError(
            f"mesh.data {config.data} is not a multiple of the {len(slices)} slices, each of which holds a copy of the "
            f"weights: use --mesh.data {len(slices)} --mesh.fsdp -1"
        )
    inside = (config.data // len(slices), *shape[1:])
    grid = np.concatenate([_on_torus(inside, group) for group in slices.values()])
    return Mesh(grid, AXES, axis_types=(AxisType.Auto,) * len(AXES))


def change_rules(changes: Rules) -> Rules:
    """Return the table with some of its rules replaced.

    Raises:
        UserError: if a logical axis is unknown, is not split by a tuple of mesh axes, or is the batch.
    """
    for name, axes in changes.items():
        if name == "batch" and axes != RULES[name]:  # data are read, and losses summed, by these rows
            raise UserError(f"the rule of batch must be {RULES[name]}, not {short_repr(axes)}: use --mesh.fsdp 1")
        if name not in RULES:
            raise UserError(f"no logical axis {short_repr(name)}{did_you_mean(name, RULES)}: one of {', '.join(RULES)}")
        if not isinstance(axes, tuple) or not set(axes) <= set(AXES) or len(set(axes)) < len(axes):
            raise UserError(
                f"the rule of {name} must be a tuple of mesh axes ({', '.join(AXES)}), not {short_repr(axes)}"
            )
    return {**RULES, **changes}


def rules_for(model: ModelConfig, mesh: Mesh, rules: Rules = RULES, rows: int = 0) -> dict[str, tuple[str, ...]]:
    """Return the table for one model: an axis that the mesh does not divide is not split (65 characters on two devices).

    Args:
        model: sizes of the axes.
        mesh: the devices.
        rules: the table.
        rows: rows of a batch, which are not split either if the mesh does not divide them; 0: it does.
    """
    sizes = {"vocab": model.vocab_size, "heads": model.n_head, "kv_heads": model.kv_heads, "head_dim": model.head_width}
    sizes |= {"embed": model.n_embd, "width": model.n_embd, "norm": model.n_embd, "mlp": model.mlp_width}
    sizes |= {"length": model.block_size, "position": model.block_size, "layers": model.n_layer}
    sizes |= {"batch": rows, "lookup": rows}
    ways = {name: math.prod(mesh.shape[a] for a in rules[name]) for name in sizes}
    return {**rules, **{name: () for name in sizes if sizes[name] % ways[name]}}


def spec(names: tuple[str | None, ...], rules: Rules) -> PartitionSpec:
    """Map the logical axes of an array to mesh axes.

    Raises:
        UserError: if two axes of the array would be split along the same axis of the mesh.
    """
    ways = [rules[name] if name else () for name in names]
    used = [axis for way in ways for axis in way]
    if len(used) != len(set(used)):
        split = " and ".join(f"{name} by {', '.join(way)}" for name, way in zip(names, ways, strict=True) if way)
        raise UserError(f"the sharding rules split one array twice along the same mesh axis: {split}")
    return PartitionSpec(*[way or None for way in ways])


def shardings(boxed: Any, model: ModelConfig, mesh: Mesh, rules: Rules = RULES) -> Any:
    """Return the sharding of every parameter from the logical axes in linen's boxes; replicated without axes."""
    rules = rules_for(model, mesh, rules)

    def place(leaf: Any) -> NamedSharding:
        return NamedSharding(mesh, spec(leaf.names, rules)) if isinstance(leaf, nn.Partitioned) else replicated(mesh)

    return jax.tree.map(place, boxed, is_leaf=lambda leaf: isinstance(leaf, nn.Partitioned))


def shardings_like(tree: Any, boxed: Any, model: ModelConfig, mesh: Mesh, rules: Rules = RULES) -> Any:
    """Return the sharding of every leaf of a tree, such as a train state: equal to the parameter with its name and shape.

    Other leaves are replicated: counters, and optimizer state of other shapes (Adafactor's row and column means).

    Args:
        tree: arrays, or their shapes; the path of a parameter's moment ends with the parameter's own.
        boxed: the parameters, or their shapes, with their logical axes.
        model: for the table.
        mesh: the devices.
        rules: the table.
    """
    shapes = map(np.shape, jax.tree.leaves(nn.unbox(boxed)))
    places = jax.tree_util.tree_leaves_with_path(shardings(boxed, model, mesh, rules))
    known = {(_keys(path), shape): place for (path, place), shape in zip(places, shapes, strict=True)}

    def place(path: tuple[Any, ...], leaf: Any) -> NamedSharding:
        keys = _keys(path)
        found = (known.get((keys[i:], np.shape(leaf))) for i in range(len(keys)))
        return next((place for place in found if place), replicated(mesh))

    return jax.tree_util.tree_map_with_path(place, tree)


def _keys(path: tuple[Any, ...]) -> tuple[str, ...]:
    return tuple(key.key for key in path if isinstance(key, jax.tree_util.DictKey))


def batch_ways(mesh: Any) -> int:
    """Return the number of parts into which the rows of a batch are split."""
    ways: int = mesh.shape["data"] * mesh.shape["fsdp"]
    return ways


def batch_sharding(mesh: Mesh, several: bool = False) -> NamedSharding:
    """Return the sharding of a batch `[B, ...]`, or of several `[K, B, ...]`: rows over the data and fsdp axes."""
    rows = spec(("batch",), RULES)
    return NamedSharding(mesh, PartitionSpec(None, *rows) if several else rows)


def replicated(mesh: Mesh) -> NamedSharding:
    """Return the sharding of an array with a copy on every device."""
    return NamedSharding(mesh, PartitionSpec())


def block_on_cpu_mesh(mesh: Mesh, out: T) -> T:
    """Block on a result on a mesh of several CPU devices; on other meshes, return it immediately.

    XLA runs the devices of a CPU on one thread pool. With two programs in flight, one device of each can hold all threads and
    wait in a collective for a device that finds none; XLA aborts after 40 seconds. One program at a time cannot deadlock, and
    costs nothing, as host and devices share their cores.
    """
    if mesh.devices.size > 1 and mesh.devices.flat[0].platform == "cpu":
        jax.block_until_ready(out)
    return out


@contextmanager
def use_mesh(mesh: Mesh, model: ModelConfig, rules: Rules = RULES, rows: int = 0) -> Iterator[None]:
    """Map the logical axes of layers to the axes of a mesh in this context. Takes the arguments of `rules_for`."""
    table = [(name, axes or None) for name, axes in rules_for(model, mesh, rules, rows).items()]
    with jax.set_mesh(mesh), nn.logical_axis_rules(table):
        yield


def _on_torus(shape: tuple[int, ...], devices: list[Any]) -> np.ndarray:
    """Arrange the devices of one slice in an array of this shape."""
    try:
        return mesh_utils.create_device_mesh(shape, devices, allow_split_physical_axes=True)
    except (AssertionError, NotImplementedError, ValueError):
        # Part of a torus, or a shape that does not fit its sides.
        return np.array(devices).reshape(shape)


def sizes_of(config: MeshConfig) -> dict[str, int]:
    """Return the number of devices along each axis, in the order of `AXES`."""
    return {f.name: getattr(config, f.name) for f in fields(config)}


def _split_widths(model: ModelConfig) -> list[tuple[int, str, str]]:
    return [
        (model.n_embd, "model.n_embd", "fsdp"),
        (model.n_head, "model.n_head", "tensor"),
        (model.mlp_width, "the MLP's width", "tensor"),
    ]


def _fitting(model: ModelConfig, axis: str, most: int) -> list[int]:
    """Return the sizes of the fsdp or tensor axis, up to `most`, that divide all widths split along it."""
    width = math.gcd(*(value for value, _, split in _split_widths(model) if split == axis))
    return [size for size in range(1, min(width, most) + 1) if width % size == 0]


def _busy(train: TrainConfig, most: int, fsdp: int) -> int:
    """Return the size of the data axis, at most `most`, with the fastest step and no device that has only padding."""
    share = math.ceil(train.batch_size / (most * fsdp))
    return math.ceil(train.batch_size / (share * fsdp))


def _nearest(config: Config, n_devices: int, whole: bool) -> str:
    """Suggest flags for the mesh of the most devices that splits weights no further than the config does.

    Args:
        config: a mesh that does not fit.
        n_devices: number of devices.
        whole: all of them must be used.
    """
    asked, meshes = sizes_of(config.mesh), []
    most = {axis: n_devices if asked[axis] == -1 else asked[axis] for axis in AXES}
    fits = (_fitting(config.model, axis, most[axis]) for axis in ("fsdp", "tensor"))
    for fsdp, tensor in itertools.product(*fits):
        data, left = divmod(n_devices, fsdp * tensor)
        if data and not (whole and left):
            meshes.append((data if whole else min(data, most["data"]), fsdp, tensor))
    best = max(meshes, key=lambda mesh: (math.prod(mesh), -mesh[0]))
    return " ".join(f"--mesh.{axis} {size}" for axis, size in zip(AXES, best, strict=True))


def _product(sizes: dict[str, int]) -> str:
    """Format a mesh as `data 2 x fsdp 4`, without axes of size 1."""
    return " x ".join(f"{axis} {size}" for axis, size in sizes.items() if size > 1) or "data 1"
