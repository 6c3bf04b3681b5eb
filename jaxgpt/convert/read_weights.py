"""Read the weights of a model from files with another system's names and layout."""

from __future__ import annotations

from collections.abc import Iterator, Mapping
from typing import Any

import jax
import numpy as np
from flax.traverse_util import unflatten_dict

from jaxgpt.config import ModelConfig
from jaxgpt.convert.files import Weights
from jaxgpt.convert.tensors import Format, WeightRow, complete_leaves, expand, leaf_shapes, tensor_shape
from jaxgpt.errors import UserError

# Suffixes of the masks and constants to skip in older files.
BUFFERS = (".attn.bias", ".attn.masked_bias", ".attention.bias", ".attention.masked_bias", ".rotary_emb.inv_freq")


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
    """Yield the path and values of each weight; `names` has the name in the files of each name in the table."""

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
