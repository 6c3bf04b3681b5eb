"""The layout of tensors in another system: split a tensor into leaves, and join leaves into a tensor."""

from __future__ import annotations

from collections.abc import Callable, Iterable, Iterator, Mapping

import numpy as np

from jaxgpt.convert.tensors import TensorRow, part_shape


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

    If each matrix of a stack is a separate tensor, the stack is returned after the row of its last matrix. The rows of a stack
    must be in order.
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
