"""The names and layout of weights in another system, as a table that import and export share.

A leaf is named by its path, `h_0/attn/q_proj/kernel`. A `WeightRow` lists the leaves of a tensor, concatenated along its output
axis or alternating by head. Matrices here are `[in, out]`; torch.nn.Linear stores `[out, in]`. A stack of matrices,
`[E, in, out]`, is stored as one tensor, or as a tensor for each matrix. `expand` returns the `TensorRow`s of a model.
"""

from __future__ import annotations

from collections.abc import Callable, Iterable, Iterator, Mapping
from typing import NamedTuple

import numpy as np

from jaxgpt.model.params import Model, config_of, weights

HEAD = "lm_head.weight"
STRAY = "_orig_mod."  # prefix that torch.compile adds to names


class WeightRow(NamedTuple):
    """One row of a family's table.

    `{}` in names is the layer number, and `{expert}` in the tensor's name is the index in a stack.
    """

    name: str  # name of the tensor in the other system
    leaves: tuple[str, ...]  # paths of the jaxgpt leaves, in storage order
    output_first: bool = False  # whether the matrix is stored as `[out, in]`, as in torch.nn.Linear
    by_head: bool = False  # whether the leaves alternate by head along the output axis instead of being concatenated
    offset: float = 0.0  # number added to the stored tensor; 1 for a gain stored as its difference from 1
    factor: float = 1.0  # factor of the tensor after adding `offset`
    interleaved: bool = False  # whether the two halves of each head alternate by channel, as in llama.cpp's Llama


WeightTable = tuple[WeightRow, ...]


class TensorRow(NamedTuple):
    """One tensor of a model: a row of the table, for one layer and one matrix of a stack."""

    name: str  # name of the tensor in the other system
    leaves: tuple[str, ...]  # paths of the jaxgpt leaves, in storage order
    layout: WeightRow  # its row in the table
    heads: int = 0  # number of heads along the output axis; 0: the layout does not depend on it
    expert: int = -1  # index of the tensor in the leaf's stack; -1: the tensor is the complete leaf


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


def expand(table: WeightTable, model: Model) -> list[TensorRow]:
    """Return the tensors of one model: a row per layer and matrix of a stack, without the rows of absent leaves."""
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

            # A tensor for the complete leaf, or for each matrix of its stack.
            if "{expert}" not in row.name:
                rows.append(TensorRow(row.name.format(layer), leaves, row, heads))
                continue
            stacked, *_ = shapes[leaves[0]]
            for expert in range(stacked):
                rows.append(TensorRow(row.name.format(layer, expert=expert), leaves, row, heads, expert))
    return rows


def part_shape(row: TensorRow, leaf: str, shapes: Mapping[str, tuple[int, ...]]) -> tuple[int, ...]:
    """Return the shape of a row's part of a leaf: a matrix of a stack, or the complete leaf."""
    return shapes[leaf] if row.expert < 0 else shapes[leaf][1:]


def tensor_shape(row: TensorRow, shapes: Mapping[str, tuple[int, ...]]) -> tuple[int, ...]:
    """Return the shape of the tensor of a row."""
    outputs = sum(shapes[leaf][-1] for leaf in row.leaves)
    *stack_and_inputs, _ = part_shape(row, row.leaves[0], shapes)
    if not row.layout.output_first:
        return (*stack_and_inputs, outputs)
    *stack, inputs = stack_and_inputs
    return (*stack, outputs, inputs)


def to_leaves(row: TensorRow, tensor: np.ndarray, shapes: Mapping[str, tuple[int, ...]]) -> dict[str, np.ndarray]:
    """Split a tensor into leaves, as views where possible."""
    layout = row.layout
    matrix = tensor.swapaxes(-1, -2) if layout.output_first else tensor
    if layout.offset or layout.factor != 1.0:
        matrix = (matrix + np.float32(layout.offset)) * np.float32(layout.factor)

    if layout.interleaved:
        # [..., head, channel, half] -> [..., head, half, channel]
        split = matrix.reshape(*matrix.shape[:-1], row.heads, -1, 2)
        parts = [split.swapaxes(-1, -2)]
    elif layout.by_head:
        # [..., head, leaf, channel] -> [leaf, ..., head, channel]
        split = matrix.reshape(*matrix.shape[:-1], row.heads, len(row.leaves), -1)
        parts = list(np.moveaxis(split, -2, 0))
    else:
        ends = np.cumsum([shapes[leaf][-1] for leaf in row.leaves])
        parts = np.split(matrix, ends[:-1], axis=-1)
    return {leaf: part.reshape(part_shape(row, leaf, shapes)) for leaf, part in zip(row.leaves, parts, strict=True)}


def to_tensor(row: TensorRow, leaves: Mapping[str, np.ndarray]) -> np.ndarray:
    """Join leaves into a tensor, contiguous float32."""
    layout = row.layout
    matrices = [np.asarray(leaves[leaf]) for leaf in row.leaves]
    if layout.interleaved:
        # [..., head, half, channel] -> [..., head, channel, half]
        matrix = matrices[0]
        split = matrix.reshape(*matrix.shape[:-1], row.heads, 2, -1)
        matrix = split.swapaxes(-1, -2).reshape(matrix.shape)
    elif layout.by_head:
        # Each leaf [..., head, channel] -> [..., head, leaf, channel]
        rows = matrices[0].shape[:-1]
        by_head = [m.reshape(*rows, row.heads, -1) for m in matrices]
        matrix = np.stack(by_head, axis=-2).reshape(*rows, -1)
    else:
        matrix = matrices[0] if len(matrices) == 1 else np.concatenate(matrices, axis=-1)

    if layout.offset or layout.factor != 1.0:
        matrix = matrix / np.float32(layout.factor) - np.float32(layout.offset)
    if layout.output_first:
        matrix = matrix.swapaxes(-1, -2)
    return np.ascontiguousarray(matrix, np.float32)


def complete_leaves(
    rows: Iterable[TensorRow], read: Callable[[TensorRow], np.ndarray], shapes: Mapping[str, tuple[int, ...]]
) -> Iterator[tuple[str, np.ndarray]]:
    """Return an iterator of the path and values of each leaf, as views where possible; `read` returns a row's tensor.

    If each matrix of a stack is a separate tensor, the stack follows the row of its last matrix; these rows must be in order.
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
