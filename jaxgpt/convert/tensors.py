"""Map between the tree of weights and another system's flat tensors, with one table for both directions.

A leaf is named by its path, `h_0/attn/q_proj/kernel`. A `WeightRow` lists the leaves of a tensor, concatenated along its output
axis. Matrices here are `[in, out]`; PyTorch stores `[out, in]`.
"""

from __future__ import annotations

from collections.abc import Mapping
from typing import NamedTuple

import numpy as np

from jaxgpt.config import ModelConfig
from jaxgpt.model.params import weights


class WeightRow(NamedTuple):
    """One row of a table; `{}` in names is the layer number."""

    name: str  # name of the tensor in the other system
    leaves: tuple[str, ...]  # paths of the jaxgpt leaves, in storage order
    output_first: bool = False  # whether the matrix is stored as `[out, in]`, as in torch.nn.Linear
    by_head: bool = False  # whether the leaves alternate by head along the output axis, not concatenated
    offset: float = 0.0  # added to the stored tensor: 1 for a gain stored as its difference from 1
    factor: float = 1.0  # multiplies the sum
    heads: int = 0  # number of heads of the model, set by `expand` if `by_head`


WeightTable = tuple[WeightRow, ...]


def matrix(name: str, *leaves: str, output_first: bool = True, by_head: bool = False) -> WeightTable:
    """Return the rows of a block's matrix and bias: `matrix("layers.{}.mlp.up_proj", "mlp/up_proj")`."""
    kernels, biases = (tuple(f"h_{{}}/{leaf}/{part}" for leaf in leaves) for part in ("kernel", "bias"))
    return (
        WeightRow(f"{name}.weight", kernels, output_first=output_first, by_head=by_head),
        WeightRow(f"{name}.bias", biases, by_head=by_head),
    )


def norm(name: str, leaf: str, offset: float = 0.0, factor: float = 1.0) -> WeightTable:
    """Return the rows of a norm's gain and bias."""
    return (
        WeightRow(f"{name}.weight", (f"{leaf}/scale",), offset=offset, factor=factor),
        WeightRow(f"{name}.bias", (f"{leaf}/bias",)),
    )


def leaf_shapes(config: ModelConfig) -> dict[str, tuple[int, ...]]:
    """Return a dict of the shapes of a model's weights, keyed by path."""
    return {path: weight.shape for path, weight in weights(config).items()}


def expand(table: WeightTable, config: ModelConfig) -> list[WeightRow]:
    """Return the table of one model: a row per layer, without the rows of absent leaves."""
    shapes = leaf_shapes(config)
    rows = []
    for row in table:
        for layer in range(config.n_layer) if "{}" in row.name else (0,):
            leaves = tuple(leaf.format(layer) for leaf in row.leaves)
            if all(leaf in shapes for leaf in leaves):
                heads = config.n_head if row.by_head else 0
                rows.append(row._replace(name=row.name.format(layer), leaves=leaves, heads=heads))
    return rows


def tensor_shape(row: WeightRow, shapes: Mapping[str, tuple[int, ...]]) -> tuple[int, ...]:
    """Return the shape of the tensor of a row."""
    shape = (*shapes[row.leaves[0]][:-1], sum(shapes[leaf][-1] for leaf in row.leaves))
    return shape[::-1] if row.output_first else shape


def to_leaves(row: WeightRow, tensor: np.ndarray, shapes: Mapping[str, tuple[int, ...]]) -> dict[str, np.ndarray]:
    """Split a tensor into leaves, as views where possible."""
    matrix = tensor.T if row.output_first else tensor
    if row.offset or row.factor != 1.0:
        matrix = (matrix + np.float32(row.offset)) * np.float32(row.factor)
    if row.heads:
        parts = list(np.moveaxis(matrix.reshape(*matrix.shape[:-1], row.heads, len(row.leaves), -1), -2, 0))
    else:
        parts = np.split(matrix, np.cumsum([shapes[leaf][-1] for leaf in row.leaves])[:-1], axis=-1)
    return {leaf: part.reshape(shapes[leaf]) for leaf, part in zip(row.leaves, parts, strict=True)}


def to_tensor(row: WeightRow, leaves: Mapping[str, np.ndarray]) -> np.ndarray:
    """Join leaves into a tensor, contiguous float32."""
    matrices = [np.asarray(leaves[leaf]) for leaf in row.leaves]
    if row.heads:
        rows = matrices[0].shape[:-1]
        matrix = np.stack([m.reshape(*rows, row.heads, -1) for m in matrices], axis=-2).reshape(*rows, -1)
    else:
        matrix = matrices[0] if len(matrices) == 1 else np.concatenate(matrices, axis=-1)
    if row.offset or row.factor != 1.0:
        matrix = matrix / np.float32(row.factor) - np.float32(row.offset)
    # Contiguous: a transposed view would be written in the wrong order.
    return np.ascontiguousarray(matrix.T if row.output_first else matrix, np.float32)
