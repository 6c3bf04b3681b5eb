"""Read and write weights with another system's names and layout; import and export share a table.

A leaf is named by its path, `h_0/attn/q_proj/kernel`. A `WeightRow` lists the leaves of a tensor, concatenated along its output
axis or alternating by head. Matrices here are `[in, out]`; torch.nn.Linear stores `[out, in]`. A stack of matrices,
`[E, in, out]`, is stored as one tensor, or as a tensor for each matrix.
"""

from __future__ import annotations

from collections.abc import Callable, Iterable, Iterator, Mapping
from functools import partial
from pathlib import Path
from typing import Any, NamedTuple

import jax
import numpy as np
from flax.traverse_util import unflatten_dict

from jaxgpt.config import ModelConfig
from jaxgpt.convert.files import Weights
from jaxgpt.convert.write_files import SHARD_BYTES, Tensor, rounded, write_shards
from jaxgpt.errors import UserError
from jaxgpt.model.params import Model, config_of, flatten_params, weights

HEAD = "lm_head.weight"
# Suffixes of the masks and constants to skip in older files.
BUFFERS = (".attn.bias", ".attn.masked_bias", ".attention.bias", ".attention.masked_bias", ".rotary_emb.inv_freq")
STRAY = "_orig_mod."  # prefix that torch.compile adds to names


class WeightRow(NamedTuple):
    """One row of a table; `{}` in names is the layer number, and `{expert}` in the tensor's name the index in a stack."""

    name: str  # name of the tensor in the other system
    leaves: tuple[str, ...]  # paths of the jaxgpt leaves, in storage order
    output_first: bool = False  # whether the matrix is stored as `[out, in]`, as in torch.nn.Linear
    by_head: bool = False  # whether the leaves alternate by head along the output axis instead of being concatenated
    offset: float = 0.0  # number added to the stored tensor; 1 for a gain stored as its difference from 1
    factor: float = 1.0  # factor of the tensor after adding `offset`
    interleaved: bool = False  # whether the two halves of each head alternate by channel, as in llama.cpp's Llama
    heads: int = 0  # number of heads of the leaves, set by `expand` if `by_head` or `interleaved`
    expert: int = -1  # index of the tensor in the leaf's stack, set by `expand`; -1: the tensor is the complete leaf


WeightTable = tuple[WeightRow, ...]


class Format(NamedTuple):
    """Names and layout of the tensors of a family of models."""

    table: WeightTable  # leaves of each tensor
    prefix: str  # prefix of most names, optional in files
    tied: str  # name of the token embedding, which a tied head equals
    head: str = HEAD  # name of the head
    wrapped: bool = False  # whether files may have tensors of other models, such as a vision tower, which are skipped


def matrix(name: str, *leaves: str, output_first: bool = True, by_head: bool = False) -> WeightTable:
    """Return the `WeightRow`s of a matrix and its bias: `matrix("layers.{}.mlp.up_proj", "mlp/up_proj")`."""
    kernels = tuple(f"h_{{}}/{leaf}/kernel" for leaf in leaves)
    biases = tuple(f"h_{{}}/{leaf}/bias" for leaf in leaves)
    return (
        WeightRow(f"{name}.weight", kernels, output_first=output_first, by_head=by_head),
        WeightRow(f"{name}.bias", biases, by_head=by_head),
    )


def norm(name: str, leaf: str, offset: float = 0.0, factor: float = 1.0) -> WeightTable:
    """Return the `WeightRow`s of a norm's gain and bias."""
    return (
        WeightRow(f"{name}.weight", (f"{leaf}/scale",), offset=offset, factor=factor),
        WeightRow(f"{name}.bias", (f"{leaf}/bias",)),
    )


def leaf_shapes(model: Model) -> dict[str, tuple[int, ...]]:
    """Return a dict of the shapes of a model's weights, keyed by path."""
    return {path: weight.shape for path, weight in weights(model).items()}


def expand(table: WeightTable, model: Model) -> list[WeightRow]:
    """Return the table of one model: a row per layer and matrix of a stack, without the rows of absent leaves."""
    config = config_of(model)
    shapes = leaf_shapes(model)
    rows = []
    for row in table:
        for layer in range(config.n_layer) if "{}" in row.name else (0,):
            leaves = tuple(leaf.format(layer) for leaf in row.leaves)
            if not all(leaf in shapes for leaf in leaves):
                continue

            heads = 0
            if row.by_head or row.interleaved:
                heads = config.kv_heads if "/k_proj/" in leaves[0] else config.n_head
            one = row._replace(leaves=leaves, heads=heads)

            # A tensor for the complete leaf, or for each matrix of its stack.
            if "{expert}" not in row.name:
                rows.append(one._replace(name=row.name.format(layer)))
                continue
            stacked, *_ = shapes[leaves[0]]
            for expert in range(stacked):
                rows.append(one._replace(name=row.name.format(layer, expert=expert), expert=expert))
    return rows


def part_shape(row: WeightRow, leaf: str, shapes: Mapping[str, tuple[int, ...]]) -> tuple[int, ...]:
    """Return the shape of a row's part of a leaf: a matrix of a stack, or the complete leaf."""
    return shapes[leaf] if row.expert < 0 else shapes[leaf][1:]


def tensor_shape(row: WeightRow, shapes: Mapping[str, tuple[int, ...]]) -> tuple[int, ...]:
    """Return the shape of the tensor of a row."""
    outputs = sum(shapes[leaf][-1] for leaf in row.leaves)
    *stack_and_inputs, _ = part_shape(row, row.leaves[0], shapes)
    if not row.output_first:
        return (*stack_and_inputs, outputs)
    *stack, inputs = stack_and_inputs
    return (*stack, outputs, inputs)


def to_leaves(row: WeightRow, tensor: np.ndarray, shapes: Mapping[str, tuple[int, ...]]) -> dict[str, np.ndarray]:
    """Split a tensor into leaves, as views where possible."""
    matrix = tensor.swapaxes(-1, -2) if row.output_first else tensor
    if row.offset or row.factor != 1.0:
        matrix = (matrix + np.float32(row.offset)) * np.float32(row.factor)

    if row.interleaved:
        # [..., head, channel, half] -> [..., head, half, channel]
        split = matrix.reshape(*matrix.shape[:-1], row.heads, -1, 2)
        parts = [split.swapaxes(-1, -2)]
    elif row.heads:
        # [..., head, leaf, channel] -> [leaf, ..., head, channel]
        split = matrix.reshape(*matrix.shape[:-1], row.heads, len(row.leaves), -1)
        parts = list(np.moveaxis(split, -2, 0))
    else:
        ends = np.cumsum([shapes[leaf][-1] for leaf in row.leaves])
        parts = np.split(matrix, ends[:-1], axis=-1)
    return {leaf: part.reshape(part_shape(row, leaf, shapes)) for leaf, part in zip(row.leaves, parts, strict=True)}


def to_tensor(row: WeightRow, leaves: Mapping[str, np.ndarray]) -> np.ndarray:
    """Join leaves into a tensor, contiguous float32."""
    matrices = [np.asarray(leaves[leaf]) for leaf in row.leaves]
    if row.interleaved:
        # [..., head, half, channel] -> [..., head, channel, half]
        matrix = matrices[0]
        split = matrix.reshape(*matrix.shape[:-1], row.heads, 2, -1)
        matrix = split.swapaxes(-1, -2).reshape(matrix.shape)
    elif row.heads:
        # Each leaf [..., head, channel] -> [..., head, leaf, channel]
        rows = matrices[0].shape[:-1]
        by_head = [m.reshape(*rows, row.heads, -1) for m in matrices]
        matrix = np.stack(by_head, axis=-2).reshape(*rows, -1)
    else:
        matrix = matrices[0] if len(matrices) == 1 else np.concatenate(matrices, axis=-1)

    if row.offset or row.factor != 1.0:
        matrix = matrix / np.float32(row.factor) - np.float32(row.offset)
    if row.output_first:
        matrix = matrix.swapaxes(-1, -2)
    return np.ascontiguousarray(matrix, np.float32)


def check_weights(weights: Weights, config: ModelConfig, form: Format) -> dict[str, str]:
    """Check that files contain a model, and map each name in the table to its name in the files.

    Raises `UserError` if a tensor is missing, unexpected, or of wrong type or shape, or a tied head differs from the embedding.
    """
    stored = _own_names(weights, form)
    shapes = leaf_shapes(config)
    rows = expand(form.table, config)
    names = {row.name: stored.get(row.name.removeprefix(form.prefix), row.name) for row in rows}
    tied = names[form.tied] if config.tie_embeddings and form.head in stored else ""
    expected = {names[row.name]: tensor_shape(row, shapes) for row in rows}

    ignored = {name for name in weights.tensors if name.endswith(BUFFERS)}
    if tied:
        ignored.add(stored[form.head])
    if form.wrapped:  # the other tensors belong to a different model, such as a vision encoder
        ignored |= weights.tensors.keys() - set(stored.values())
    weights.check(expected, ignored)
    if tied and not np.array_equal(weights.read(stored[form.head]), weights.read(tied)):
        raise UserError(
            f"{weights.path}: tensor {form.head} differs from the tied {tied}: set tie_word_embeddings to false in config.json"
        )
    return names


def skipped_tensors(weights: Weights, form: Format) -> int:
    """Return the number of tensors of other models in the files, such as a vision tower."""
    if not form.wrapped:
        return 0
    return len(weights.tensors) - len(_own_names(weights, form))


def _own_names(weights: Weights, form: Format) -> dict[str, str]:
    """Map names without `form.prefix` to the names in the files; omit other models of a wrapper.

    Files of the same model have different prefixes: `transformer.h.0`, `h.0` (a bare model), `_orig_mod.transformer.h.0`
    (compiled), `language_model.model.layers.0` (in a multimodal model). The token embedding shows the prefix.
    """
    table = form.tied.removeprefix(form.prefix)
    found = [name.removesuffix(table) for name in weights.tensors if f".{name}".endswith(f".{table}")]
    if form.wrapped:
        found = [prefix for prefix in found if "language_model." in prefix]
    prefix = found[0] if len(found) == 1 else form.prefix

    own = {}
    for name in weights.tensors:
        # The head is outside the model with the prefix, and may have a different prefix.
        if f".{name}".endswith(f".{form.head}"):
            own[form.head] = name
        elif name.startswith(prefix):
            own[name.removeprefix(prefix)] = name
        elif not form.wrapped:
            own[name.removeprefix(form.prefix)] = name
    return own


def read_leaves(weights: Weights, config: ModelConfig, form: Format) -> Iterator[tuple[str, np.ndarray]]:
    """Return an iterator of the path and values of each of a model's weights, contiguous float32.

    One tensor is read at a time. Raises `UserError` before the iteration, like `check_weights`.
    """
    names = check_weights(weights, config, form)
    return _read_rows(weights, names, config, form)


def _read_rows(
    weights: Weights, names: Mapping[str, str], config: ModelConfig, form: Format
) -> Iterator[tuple[str, np.ndarray]]:
    def read(row: WeightRow) -> np.ndarray:
        return weights.read(names[row.name])

    for path, leaf in complete_leaves(expand(form.table, config), read, leaf_shapes(config)):
        # Copy views of a tensor: a view would keep the whole tensor in memory.
        yield path, np.ascontiguousarray(leaf)


def load_weights(weights: Weights, config: ModelConfig, form: Format) -> Any:
    """Load a model's weights on the first device, one tensor at a time."""
    leaves: dict[str, jax.Array] = {}
    for path, leaf in read_leaves(weights, config, form):
        # Block: a pending transfer would keep the tensor in memory.
        leaves[path] = jax.block_until_ready(jax.device_put(leaf, jax.devices()[0]))
    return unflatten_dict(leaves, sep="/")


def complete_leaves(
    rows: Iterable[WeightRow], read: Callable[[WeightRow], np.ndarray], shapes: Mapping[str, tuple[int, ...]]
) -> Iterator[tuple[str, np.ndarray]]:
    """Return an iterator of the path and values of each leaf, as views where possible; `read` returns a row's tensor.

    A stack with a tensor for each matrix is complete after its last row.
    """
    stacks: dict[str, np.ndarray] = {}
    for row in rows:
        for path, part in to_leaves(row, read(row), shapes).items():
            if row.expert < 0:
                yield path, part
                continue
            if row.expert == 0:
                stacks[path] = np.empty(shapes[path], np.float32)
            stacks[path][row.expert] = part
            if row.expert == len(stacks[path]) - 1:
                yield path, stacks.pop(path)


def tensors_of(params: Any, model: Model, form: Format) -> list[Tensor]:
    """List the tensors of a model; add gains of 1, biases of 0 and gates that only `model` has."""
    shapes = leaf_shapes(model)
    ours = flatten_params(params)

    def part(row: WeightRow, path: str) -> np.ndarray:
        leaf = _leaf(ours, path, shapes)
        return leaf if row.expert < 0 else leaf[row.expert]

    def read(row: WeightRow) -> np.ndarray:
        return to_tensor(row, {path: part(row, path) for path in row.leaves})

    rows = expand(form.table, model)
    return [Tensor(row.name, tensor_shape(row, shapes), partial(read, row)) for row in rows]


def save_weights(
    directory: Path,
    params: Any,
    config: ModelConfig,
    form: Format,
    dtype: str = "float32",
    shard_bytes: int = SHARD_BYTES,
) -> None:
    """Write weights as one or several safetensors files."""
    write_shards(directory, tensors_of(params, config, form), dtype, shard_bytes)


def rounded_weights(params: Any, config: ModelConfig, form: Format, dtype: str) -> Any:
    """Return the weights of a model after its tensors are rounded to a type of `DTYPES`."""
    tensors = {tensor.name: tensor for tensor in tensors_of(params, config, form)}

    def read(row: WeightRow) -> np.ndarray:
        return rounded(row.name, tensors[row.name].read(), dtype).astype(np.float32)

    leaves = complete_leaves(expand(form.table, config), read, leaf_shapes(config))
    return unflatten_dict(dict(leaves), sep="/")


def _leaf(ours: Mapping[str, Any], path: str, shapes: Mapping[str, tuple[int, ...]]) -> np.ndarray:
    if path in ours:
        return np.asarray(ours[path], np.float32)
    gate = path.replace("/gate_proj/", "/up_proj/")
    if gate != path:
        return np.asarray(ours[gate], np.float32)  # ReLU squared: relu(u)^2 = relu(u) * u
    return np.full(shapes[path], float(path.endswith("/scale")), np.float32)
