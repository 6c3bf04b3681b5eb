"""Read the weights of a model from files with another system's names and layout."""

from __future__ import annotations

from collections.abc import Iterator, Mapping
from typing import Any, NamedTuple

import jax
import numpy as np
from flax.traverse_util import unflatten_dict

from jaxgpt.config import ModelConfig
from jaxgpt.convert.files import Weights
from jaxgpt.convert.tensor_layout import complete_leaves
from jaxgpt.convert.tensors import Format, TensorRow, expand, leaf_shapes, tensor_shape
from jaxgpt.errors import UserError

# Suffixes of the masks and constants to skip in older files.
BUFFERS = (".attn.bias", ".attn.masked_bias", ".attention.bias", ".attention.masked_bias", ".rotary_emb.inv_freq")


class StoredModel(NamedTuple):
    """A model in another system's files: its config, and its tensors, which are read on demand.

    Attributes:
        family: a name in `FAMILIES`, nanogpt, or a llama.cpp architecture.
        config: config of the model.
        form: names and layout of its tensors.
        weights: the tensors in the files.
    """

    family: str
    config: ModelConfig
    form: Format
    weights: Weights


def checked_names(model: StoredModel) -> dict[str, str]:
    """Map each name in the table to its name in the files, after a check that the files contain the model.

    Raises:
        UserError: if a tensor is missing, unexpected, or of wrong type or shape, or a tied head differs from the embedding.
    """
    config = model.config
    form = model.form
    weights = model.weights
    by_bare_name = _names_in_files(weights, form)
    shapes = leaf_shapes(config)
    names: dict[str, str] = {}
    expected: dict[str, tuple[int, ...]] = {}
    for row in expand(form.table, config):
        # In the table, model.norm.weight; bare, norm.weight; in the files, for example, language_model.model.norm.weight.
        bare = row.name.removeprefix(form.prefix)
        name = by_bare_name.get(bare, row.name)
        names[row.name] = name
        expected[name] = tensor_shape(row, shapes)

    ignored = {name for name in weights.tensors if name.endswith(BUFFERS)}
    tied_head = by_bare_name.get(form.head) if config.tie_embeddings else None  # a copy of the embedding in the files
    if tied_head is not None:
        ignored.add(tied_head)
    if form.wrapped:  # the other tensors belong to a different model, such as a vision encoder
        ignored |= weights.tensors.keys() - set(by_bare_name.values())

    weights.check(expected, ignored)
    if tied_head is not None:
        _check_tied(weights, form, tied_head, names[form.tied])
    return names


def _check_tied(weights: Weights, form: Format, head: str, embedding: str) -> None:
    """Raise `UserError` if a tied head differs from the embedding."""
    if not np.array_equal(weights.read(head), weights.read(embedding)):
        raise UserError(
            f"{weights.path}: tensor {form.head} differs from the tied {embedding}: set tie_word_embeddings to false in "
            f"config.json"
        )


def skipped_tensors(model: StoredModel) -> int:
    """Return the number of tensors of other models in the files, such as a vision tower."""
    if not model.form.wrapped:
        return 0
    return len(model.weights.tensors) - len(_names_in_files(model.weights, model.form))


def _names_in_files(weights: Weights, form: Format) -> dict[str, str]:
    """Map bare names, without `form.prefix`, to the names in the files; omit the other models of a multimodal model.

    Files of the same model may have different prefixes: `transformer.h.0`, `h.0` (a bare model), `_orig_mod.transformer.h.0`
    (compiled), `language_model.model.layers.0` (in a multimodal model). The name of the token embedding shows the prefix.
    """
    embedding = form.tied.removeprefix(form.prefix)
    prefixes = [name.removesuffix(embedding) for name in weights.tensors if f".{name}".endswith(f".{embedding}")]
    if form.wrapped:
        prefixes = [prefix for prefix in prefixes if "language_model." in prefix]
    prefix = prefixes[0] if len(prefixes) == 1 else form.prefix

    names = {}
    for name in weights.tensors:
        # The head is outside the model with the prefix, and may have a different prefix.
        if f".{name}".endswith(f".{form.head}"):
            names[form.head] = name
        elif name.startswith(prefix):
            names[name.removeprefix(prefix)] = name
        elif not form.wrapped:
            names[name.removeprefix(form.prefix)] = name
    return names


def read_leaves(model: StoredModel) -> Iterator[tuple[str, np.ndarray]]:
    """Return an iterator of the path and values of each of a model's weights, contiguous float32.

    The errors of `checked_names` are raised before the iteration. One tensor is read at a time; raises `UserError` if it
    contains non-finite numbers.
    """
    return _iterate_leaves(model, checked_names(model))


def _iterate_leaves(model: StoredModel, names: Mapping[str, str]) -> Iterator[tuple[str, np.ndarray]]:
    """Yield the path and values of each weight; `names`: map from names in the table to names in the files."""

    def read(row: TensorRow) -> np.ndarray:
        return model.weights.read(names[row.name])

    rows = expand(model.form.table, model.config)
    for path, leaf in complete_leaves(rows, read, leaf_shapes(model.config)):
        # Copy views of a tensor: a view would keep the whole tensor in memory.
        yield path, np.ascontiguousarray(leaf)


def load_weights(model: StoredModel) -> Any:
    """Load a model's weights on the first device, one tensor at a time."""
    leaves: dict[str, jax.Array] = {}
    for path, leaf in read_leaves(model):
        # Block: a pending transfer would keep the tensor in memory.
        leaves[path] = jax.block_until_ready(jax.device_put(leaf, jax.devices()[0]))
    return unflatten_dict(leaves, sep="/")
