"""The device mesh, and the one table that maps logical axes of arrays to mesh axes.

There is always a mesh, even for one device; on a CPU, every core can be a device.
"""

from __future__ import annotations

import math
from collections.abc import Iterator, Mapping, Sequence
from contextlib import contextmanager
from dataclasses import fields
from functools import cache
from typing import Any, NamedTuple, TypeVar

import flax.linen as nn
import jax
import jax.numpy as jnp
import numpy as np
from jax.experimental import mesh_utils
from jax.sharding import AxisType, Mesh, NamedSharding, PartitionSpec

from jaxgpt.config import Config, MeshConfig, ModelConfig, TrainConfig
from jaxgpt.errors import UserError, did_you_mean, short_repr

T = TypeVar("T")

AXES = tuple(axis.name for axis in fields(MeshConfig))  # names of the mesh axes, in the order of the settings
SMALL = 1 << 16  # arrays with fewer elements are replicated if no rule applies to them

# Logical axis -> mesh axes. Weights: an axis of width D, except in norms, is sharded over fsdp; heads, MLP and vocabulary over
# tensor. Activations: the batch is sharded over data and fsdp; in the embedding lookup, over data, and the width over fsdp.
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
    "expert": (),  # stack axis of weights, such as the matrices of experts
    "position": (),
    "norm": (),
    "rank": (),  # rank axis of adapters; the other axis is sharded as in the weight
    "layers": (),
    "matrix_shards": ("fsdp",),  # Muon: stack of matrices, in an intermediate step of resharding
    "matrices": ("fsdp", "data", "tensor"),  # Muon: stack of complete matrices, sharded over all devices
}


class Microbatches(NamedTuple):
    """The microbatches of a step."""

    accumulation: int  # number of microbatches that each device computes per step
    rows: int  # windows per microbatch, over all devices, including padding


def microbatches(train: TrainConfig, ways: int) -> Microbatches:
    """Split a batch of B windows over `ways` groups of devices, and in each group into equal microbatches.

    A group computes at most `m = ceil(B / train.accumulation)` windows at a time. Its share of the batch is
    `s = ceil(B / ways)` windows, in at least `n = ceil(s / m)` microbatches. Up to `2 * n - 1` microbatches are used if they
    can then be equal without padding. Otherwise, or if B is not a multiple of `ways`, the batch is padded to the
    result's `accumulation * rows` windows. Padding has no targets, so it changes neither the mean loss nor its gradient.
    """
    share = math.ceil(train.batch_size / ways)
    fewest = math.ceil(share / math.ceil(train.batch_size / train.accumulation))
    count = next((n for n in range(fewest, 2 * fewest) if share % n == 0), fewest)
    return Microbatches(count, ways * math.ceil(share / count))


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
    model = config.model
    sizes = sizes_of(config.mesh)
    widths = {
        "fsdp": {"model.n_embd": model.n_embd},
        "tensor": {"model.n_head": model.n_head, "the MLP's width": model.mlp_width},
    }

    # The devices that remain after the fixed sizes are assigned to fsdp, then to tensor, then to data.
    fixed = math.prod(size for size in sizes.values() if size > 0)
    rest = max(n_devices // fixed, 1)
    for axis, split in widths.items():
        if sizes[axis] == -1:
            sizes[axis] = math.gcd(rest, *split.values())
            rest //= sizes[axis]
    if sizes["data"] == -1:
        sizes["data"] = rest
        may_idle = processes == 1 and not tpu
        if may_idle:
            B = config.train.batch_size
            others = math.prod(sizes[axis] for axis in RULES["batch"] if axis != "data")
            share = math.ceil(B / (rest * others))  # windows per device
            sizes["data"] = math.ceil(B / (share * others))

    used = math.prod(sizes.values())
    shape = " x ".join(f"{axis} {size}" for axis, size in sizes.items() if size > 1) or "data 1"
    in_use = f"{used} of {n_devices} devices in use ({shape})"
    indivisible = [
        f"mesh.{axis} {sizes[axis]} does not divide {name} {width}"
        for axis, split in widths.items()
        for name, width in split.items()
        if width % sizes[axis]
    ]
    problem = ""
    if used > n_devices:
        problem = f"the mesh needs {used} devices ({shape}), but only {n_devices} exist"
    elif indivisible:
        problem = indivisible[0]
    elif processes > 1 and used < n_devices:
        problem = f"{in_use}, but {processes} processes must use all of their devices"
    elif tpu and n_devices % used:
        problem = f"{in_use}, but a TPU mesh must use all devices, or a divisor of their number"
    if problem:
        inner = " --mesh.fsdp -1 --mesh.tensor 1" if sizes["fsdp"] * sizes["tensor"] > 1 else ""
        raise UserError(f"{problem}: use --mesh.data -1{inner}, which fits any number of devices")

    idle = in_use if used < n_devices else ""
    return MeshConfig(**sizes), "; ".join(_advice(config, sizes, idle))


def _advice(config: Config, sizes: dict[str, int], idle: str) -> Iterator[str]:
    """Yield notes on devices or computation that a mesh wastes, each with a fix."""
    if idle:
        larger = "a larger --train.batch-size or " if config.mesh.data == -1 else ""
        yield f"{idle}: {larger}a different mesh, such as --mesh.data -1 --mesh.fsdp -1, uses more"

    count, rows = microbatches(config.train, row_shards(sizes))
    windows = count * rows
    padding = windows - config.train.batch_size
    if padding:
        wasted = f"{padding:,} of {windows:,} windows per step are padding"
        yield f"{wasted}: --train.batch-size {windows} would use them"

    tensor = sizes["tensor"]
    split = (
        ("vocab_size", config.model.vocab_size, "logits"),
        ("n_kv_head", config.model.kv_heads, "keys and values"),
    )
    for name, size, what in split:
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
    shape = tuple(sizes_of(config).values())
    fix = "pass the sizes that jaxgpt.parallel.mesh.resolve returns"
    if -1 in shape:
        raise UserError(f"the mesh {shape} has a size of -1: {fix}")
    needed = math.prod(shape)
    available = jax.devices() if devices is None else devices
    chosen = list(available)[:needed]
    if len(chosen) < needed:
        raise UserError(f"the mesh {shape} needs {needed} devices, but only {len(chosen)} exist: {fix}")

    slices: dict[int, list[Any]] = {}
    for device in chosen:
        index = 0
        # JAX also reports the hosts of a GPU or CPU cluster as slices, but there, any mesh axis may span the network.
        if device.platform == "tpu":
            index = getattr(device, "slice_index", None) or 0
        slices.setdefault(index, []).append(device)
    lengths = [len(group) for group in slices.values()]
    if config.data % len(slices) or len(set(lengths)) > 1:
        raise UserError(
            f"mesh.data {config.data} cannot be split over {len(slices)} slices ({' + '.join(map(str, lengths))} devices), and "
            f"each slice holds a copy of the weights: use --mesh.data {len(slices)} --mesh.fsdp -1"
        )

    inside = (config.data // len(slices), *shape[1:])
    grid = np.concatenate([_on_torus(inside, group) for group in slices.values()])
    return Mesh(grid, AXES, axis_types=(AxisType.Auto,) * len(AXES))


def _on_torus(shape: tuple[int, ...], devices: list[Any]) -> np.ndarray:
    """Arrange the devices of one slice in an array of this shape."""
    try:
        return mesh_utils.create_device_mesh(shape, devices, allow_split_physical_axes=True)
    except (AssertionError, NotImplementedError, ValueError):
        # The devices are a part of a torus, or the shape does not match its dimensions.
        return np.array(devices).reshape(shape)


def change_rules(changes: Rules) -> Rules:
    """Return the sharding table with some rules replaced.

    Raises:
        UserError: if a rule is for an unknown axis, changes the rule of `batch`, or is not a tuple of distinct mesh axes.
    """
    for name, axes in changes.items():
        if name == "batch" and axes != RULES[name]:  # rule required by data loading and loss sums
            raise UserError(
                f"the rule of batch must be {RULES[name]}, not {short_repr(axes)}: to shard over data only, use --mesh.fsdp 1"
            )
        if name not in RULES:
            raise UserError(
                f"no logical axis {short_repr(name)}{did_you_mean(name, RULES)}: use one of {', '.join(RULES)}"
            )
        if not isinstance(axes, tuple) or not set(axes) <= set(AXES) or len(set(axes)) < len(axes):
            raise UserError(f"the rule of {name} must be a tuple of the mesh axes {AXES}, not {short_repr(axes)}")
    return {**RULES, **changes}


def rules_for(
    model: ModelConfig, mesh: Mesh, rules: Rules = RULES, rows: int = 0, length: int = 0
) -> dict[str, tuple[str, ...]]:
    """Return the table for one model: an axis is not sharded if the mesh does not divide its length.

    For example, mesh.tensor 2 does not shard a vocabulary of 65 characters.

    Args:
        model: the architecture.
        mesh: the devices.
        rules: the complete sharding table.
        rows: number of rows of a batch; 0: always sharded.
        length: number of positions of a row; 0: `model.block_size`.
    """
    sizes = {
        "batch": rows,
        "lookup": rows,
        "length": length or model.block_size,
        "width": model.n_embd,
        "embed": model.n_embd,
        "vocab": model.vocab_size,
        "heads": model.n_head,
        "kv_heads": model.kv_heads,
        "head_dim": model.head_width,
        "mlp": model.mlp_width,
        "position": model.block_size,
        "norm": model.n_embd,
        "layers": model.n_layer,
    }
    table = dict(rules)
    for name, size in sizes.items():
        ways = math.prod(mesh.shape[axis] for axis in rules[name])
        if size % ways:
            table[name] = ()
    return table


def spec(names: tuple[str | None, ...], rules: Rules) -> PartitionSpec:
    """Map the logical axes of an array to mesh axes.

    Raises:
        UserError: if an axis has no rule, or two axes of the array would be sharded over the same mesh axis.
    """
    for name in names:
        if name and name not in rules:
            near = did_you_mean(name, rules)
            raise UserError(f"no rule for the logical axis {short_repr(name)}{near}: use None for an unsharded axis")
    ways = [rules[name] if name else () for name in names]
    used = [axis for way in ways for axis in way]
    if len(used) != len(set(used)):
        split = " and ".join(f"{name} by {', '.join(way)}" for name, way in zip(names, ways, strict=True) if way)
        raise UserError(f"the rules shard several axes of an array over the same mesh axis: {split}; set one to ()")
    return PartitionSpec(*[way or None for way in ways])


def shardings(boxed: Any, model: ModelConfig, mesh: Mesh, rules: Rules = RULES) -> Any:
    """Return the sharding of every boxed parameter; parameters without logical axes are replicated."""
    rules = rules_for(model, mesh, rules)

    def place(leaf: Any) -> NamedSharding:
        return NamedSharding(mesh, spec(leaf.names, rules)) if isinstance(leaf, nn.Partitioned) else replicated(mesh)

    return jax.tree.map(place, boxed, is_leaf=lambda leaf: isinstance(leaf, nn.Partitioned))


def shardings_like(tree: Any, boxed: Any, model: ModelConfig, mesh: Mesh, rules: Rules = RULES) -> Any:
    """Return the sharding of every leaf of a tree, such as a train state or the weights of a reference model.

    - A leaf in a box (`nn.Partitioned`) is sharded by the logical axes of the box.
    - A leaf with the shape of a parameter and a path that ends with its path in `boxed` is sharded like the parameter.
    - Any other leaf with at least `SMALL` elements is sharded along an axis (`spec_of_shape`).
    - All others are replicated: counters and small vectors.
    """
    table = rules_for(model, mesh, rules)
    shapes = map(np.shape, jax.tree.leaves(nn.unbox(boxed)))
    places = jax.tree_util.tree_leaves_with_path(shardings(boxed, model, mesh, rules))
    known = {(_keys(path), shape): place for (path, place), shape in zip(places, shapes, strict=True)}

    def place(path: tuple[Any, ...], leaf: Any) -> NamedSharding:
        if isinstance(leaf, nn.Partitioned):
            return NamedSharding(mesh, spec(leaf.names, table))
        keys = _keys(path)
        for start in range(len(keys)):
            like = known.get((keys[start:], np.shape(leaf)))
            if like is not None:
                return like
        return NamedSharding(mesh, spec_of_shape(np.shape(leaf), mesh))

    return jax.tree_util.tree_map_with_path(place, tree, is_leaf=lambda leaf: isinstance(leaf, nn.Partitioned))


def spec_of_shape(shape: tuple[int, ...], mesh: Mesh) -> PartitionSpec:
    """Shard an array without logical axes along the largest axis that the mesh divides, over fsdp, tensor or both."""
    if math.prod(shape) < SMALL:
        return PartitionSpec()
    ways = [("fsdp", "tensor"), ("fsdp",), ("tensor",)]
    ways.sort(key=lambda names: -math.prod(mesh.shape[name] for name in names))
    for names in ways:
        count = math.prod(mesh.shape[name] for name in names)
        divided = [size if size % count == 0 else 0 for size in shape]
        if count > 1 and any(divided):
            axis = divided.index(max(divided))
            return PartitionSpec(*[names if i == axis else None for i in range(len(shape))])
    return PartitionSpec()


def _keys(path: tuple[Any, ...]) -> tuple[str, ...]:
    return tuple(key.key for key in path if isinstance(key, jax.tree_util.DictKey))


def row_shards(sizes: Mapping[str, int]) -> int:
    """Return the number of shards of the rows of a batch, from the size of each mesh axis."""
    return math.prod(sizes[axis] for axis in RULES["batch"])


def batch_ways(mesh: Any) -> int:
    """Return the number of shards of the rows of a batch on a mesh."""
    return row_shards(mesh.shape)


def batch_sharding(mesh: Mesh, several: bool = False) -> NamedSharding:
    """Return the sharding of a batch `[B, ...]`, or of several batches `[K, B, ...]`, sharded by rows."""
    rows = spec(("batch",), RULES)
    return NamedSharding(mesh, PartitionSpec(None, *rows) if several else rows)


def row_spec(batch: Any) -> Any:
    """Return the shapes and dtypes of the rows of a batch on the devices, each `[0, ...]`: a batch without rows.

    A batch is a tree with leaves `[B, ...]`. A leaf is an array, or a lazy batch such as `data.batches.Windows`: its slices
    are trees of arrays.
    """
    no_rows = jax.tree.map(lambda leaf: leaf[0:0], batch)
    return jax.tree.map(_on_device, no_rows)


def rows_of(batch: Any) -> int:
    """Return the number of rows of a batch."""
    return len(jax.tree.leaves(batch)[0])


def put(mesh: Mesh, batches: Sequence[Any], rows: int, steps: int = 0) -> Any:
    """Put batches on the devices of a mesh, sharded by rows.

    Only rows of this process's devices are read, each once. Missing rows are filled with -1 (booleans: False), and must have
    zero weight in an objective: windows of -1 have no targets.

    Args:
        batches: batches of equal structure, as in `row_spec`, with up to `rows` rows.
        rows: number of rows of the result, a multiple of `batch_ways`.
        steps: 0: put the only batch, `[rows, ...]`; K: put 1 to K batches, `[K, rows, ...]`.

    Returns:
        A tree of sharded arrays: int32, float32 for floating-point numbers, or booleans.
    """
    spec, tree = jax.tree.flatten(row_spec(batches[0]))

    @cache
    def part(first: int, last: int) -> list[np.ndarray]:
        """Read rows of all batches: `[K, last - first, ...]` for each leaf."""
        parts = []
        for leaf in spec:
            fill = False if leaf.dtype == bool else -1
            parts.append(np.full((max(steps, 1), last - first, *leaf.shape[1:]), fill, leaf.dtype))
        for step, batch in enumerate(batches):
            read = jax.tree.leaves(jax.tree.map(lambda leaf: leaf[first:last], batch))
            for out, values in zip(parts, read, strict=True):
                np.copyto(out[step, : len(values)], values, casting="same_kind")
        if steps:
            return parts
        return [only[0] for only in parts]

    sharding = batch_sharding(mesh, several=bool(steps))
    axis = 1 if steps else 0  # axis of the rows

    def put_leaf(index: int, leaf: Any) -> jax.Array:
        shape = (rows, *leaf.shape[1:])
        if steps:
            shape = (steps, *shape)

        def shard(where: Any) -> np.ndarray:
            first, last, _ = where[axis].indices(rows)
            return part(first, last)[index]

        return jax.make_array_from_callback(shape, sharding, shard)

    return jax.tree.unflatten(tree, [put_leaf(index, leaf) for index, leaf in enumerate(spec)])


def _on_device(array: Any) -> np.ndarray:
    """Convert an array without rows to the dtype of its device copy."""
    array = np.asarray(array)
    if array.dtype == bool:
        return array
    is_float = jnp.issubdtype(array.dtype, jnp.floating)
    return array.astype(np.float32 if is_float else np.int32)


def replicated(mesh: Mesh) -> NamedSharding:
    """Return the sharding of a replicated array."""
    return NamedSharding(mesh, PartitionSpec())


def block_on_cpu_mesh(mesh: Mesh, out: T) -> T:
    """Block on a result on a mesh of several CPU devices; on other meshes, return it immediately.

    XLA runs the devices of a CPU on one thread pool. With two programs in flight, devices that wait in a collective can hold
    all threads, so that the awaited devices never run. XLA aborts after 40 seconds. One program at a time cannot deadlock,
    and costs nothing, because host and devices share their cores.
    """
    if mesh.devices.size > 1 and mesh.devices.flat[0].platform == "cpu":
        jax.block_until_ready(out)
    return out


@contextmanager
def use_mesh(mesh: Mesh, model: ModelConfig, rules: Rules = RULES, rows: int = 0, length: int = 0) -> Iterator[None]:
    """Set JAX's mesh and Flax's logical axis rules in this context; arguments as in `rules_for`."""
    table = [(name, axes or None) for name, axes in rules_for(model, mesh, rules, rows, length).items()]
    with jax.set_mesh(mesh), nn.logical_axis_rules(table):
        yield


def sizes_of(config: MeshConfig) -> dict[str, int]:
    """Return the size of each axis, possibly -1, in the order of `AXES`."""
    return {f.name: getattr(config, f.name) for f in fields(config)}
