"""Write the weights of a model with another system's names and layout."""

from __future__ import annotations

from collections.abc import Mapping
from functools import partial
from pathlib import Path
from typing import Any

import numpy as np
from flax.traverse_util import unflatten_dict

from jaxgpt.config import ModelConfig
from jaxgpt.convert.tensor_layout import complete_leaves, to_tensor
from jaxgpt.convert.tensors import Format, TensorRow, expand, leaf_shapes, tensor_shape
from jaxgpt.convert.write_files import SHARD_BYTES, Tensor, rounded, write_shards
from jaxgpt.model.params import Model, flatten_params


def tensors_of(params: Any, model: Model, form: Format) -> list[Tensor]:
    """List the tensors of a model; add gains of 1, biases of 0 and gates that only `model` has."""
    shapes = leaf_shapes(model)
    leaves = flatten_params(params)

    def part(row: TensorRow, path: str) -> np.ndarray:
        leaf = _leaf(leaves, path, shapes)
        return leaf if row.expert < 0 else leaf[row.expert]

    def read(row: TensorRow) -> np.ndarray:
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

    def read(row: TensorRow) -> np.ndarray:
        return rounded(row.name, tensors[row.name].read(), dtype).astype(np.float32)

    leaves = complete_leaves(expand(form.table, config), read, leaf_shapes(config))
    return unflatten_dict(dict(leaves), sep="/")


def _leaf(leaves: Mapping[str, Any], path: str, shapes: Mapping[str, tuple[int, ...]]) -> np.ndarray:
    """Return a leaf of the exported model: a weight of the run, or its default.

    The default is the up projection for a gate, 1 for a gain, and 0 for a bias.
    """
    if path in leaves:
        return np.asarray(leaves[path], np.float32)
    gate = path.replace("/gate_proj/", "/up_proj/")
    if gate != path:
        return np.asarray(leaves[gate], np.float32)  # ReLU squared: relu(u)^2 = relu(u) * u
    return np.full(shapes[path], float(path.endswith("/scale")), np.float32)
