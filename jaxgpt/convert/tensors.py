"""The names and layout of weights in another system, as a table that import and export share.

A leaf is named by its path, `h_0/attn/q_proj/kernel`. A `WeightRow` lists the leaves of a tensor, concatenated along its output
axis or alternating by head. Matrices here are `[in, out]`; torch.nn.Linear stores `[out, in]`. A stack of matrices,
`[E, in, out]`, is stored as one tensor, or as a tensor for each matrix. `expand` returns the `TensorRow`s of a model.
"""

from __future__ import annotations

from collections.abc import Mapping
from typing import NamedTuple

from jaxgpt.model.params import Model, config_of, weights

HEAD = "lm_head.weight"


class WeightRow(NamedTuple):
    """One row of a family's table.

    `{}` in names is the layer number. With `{expert}` in the tensor's name, each matrix of a stack is a tensor, and
    `{expert}` is the index of the matrix.
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
    """Return the tensors of one model: a row per layer and matrix of a stack, without the rows of absent leaves.

    The model has all leaves of a row or none, such as the biases of q, k and v.
    """
    config = config_of(model)
    shapes = leaf_shapes(model)
    rows = []
    for layout in table:
        for layer in range(config.n_layer) if "{}" in layout.name else (0,):
            leaves = tuple(leaf.format(layer) for leaf in layout.leaves)
            if shapes.keys().isdisjoint(leaves):
                continue
            assert shapes.keys() >= set(leaves), leaves

            heads = 0
            if layout.by_head or layout.interleaved:
                heads = config.kv_heads if "/k_proj/" in leaves[0] else config.n_head

            stack, *_ = shapes[leaves[0]]
            for expert in range(stack) if "{expert}" in layout.name else (-1,):
                name = layout.name.format(layer, expert=expert)
                rows.append(TensorRow(name, leaves, layout, heads, expert))
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
