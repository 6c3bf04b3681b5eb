"""Read and write the weights of a model one tensor at a time, and compare the logits."""

from __future__ import annotations

from collections.abc import Callable, Mapping
from pathlib import Path
from typing import Any, NamedTuple

import jax
import jax.numpy as jnp
import numpy as np
from flax.traverse_util import unflatten_dict

from jaxgpt.config import ModelConfig
from jaxgpt.convert.files import Weights, write_safetensors
from jaxgpt.convert.tensors import WeightTable, expand, leaf_shapes, tensor_shape, to_leaves, to_tensor
from jaxgpt.errors import TrainingFailed, UserError
from jaxgpt.model import GPT
from jaxgpt.model.params import flatten_params

HEAD = "lm_head.weight"
# Suffixes of masks and constants in older files, which are skipped.
BUFFERS = (".attn.bias", ".attn.masked_bias", ".attention.bias", ".attention.masked_bias", ".rotary_emb.inv_freq")
TOLERANCE = 1e-5  # largest change of a logit by an export, relative to the largest logit if that exceeds 1
STRAY = "_orig_mod."  # prefix that torch.compile adds to names


class Format(NamedTuple):
    """The names of the tensors of a family of models."""

    table: WeightTable  # the tensors, and the leaves in each
    prefix: str  # prefix of most names; files may omit it
    tied: str  # name of the token embedding, which a tied head equals
    head: str = HEAD  # name of the head


def check_weights(weights: Weights, config: ModelConfig, form: Format) -> dict[str, str]:
    """Check that files contain a model, and map each name in the table to its name in the files.

    Raises `UserError` if a tensor is missing, unexpected, or of a different shape or type, or a tied head differs.
    """
    stored = {name.removeprefix(STRAY).removeprefix(form.prefix): name for name in weights.tensors}
    shapes, rows = leaf_shapes(config), expand(form.table, config)
    names = {row.name: stored.get(row.name.removeprefix(form.prefix), row.name) for row in rows}
    tied = names[form.tied] if config.tie_embeddings and form.head in stored else ""
    expected = {names[row.name]: tensor_shape(row, shapes) for row in rows}
    weights.check(expected, lambda name: name.endswith(BUFFERS) or (bool(tied) and name == stored[form.head]))
    if tied and not np.array_equal(weights.read(stored[form.head]), weights.read(tied)):
        raise UserError(
            f"{weights.path}: tensor {form.head} differs from {tied}, but the config ties them (tie_word_embeddings)"
        )
    return names


def load_weights(weights: Weights, config: ModelConfig, form: Format) -> Any:
    """Load a model's weights on the first device, with at most one additional tensor in memory."""
    names, shapes = check_weights(weights, config, form), leaf_shapes(config)
    leaves: dict[str, jax.Array] = {}
    for row in expand(form.table, config):
        for path, leaf in to_leaves(row, weights.read(names[row.name]), shapes).items():
            # Blocking, and contiguous: a pending transfer or a view would keep the whole tensor in memory.
            leaves[path] = jax.block_until_ready(jax.device_put(np.ascontiguousarray(leaf), jax.devices()[0]))
    return unflatten_dict(leaves, sep="/")


def save_weights(path: Path, params: Any, config: ModelConfig, form: Format) -> None:
    """Write a tree of weights as a model of `config`, which may add neutral gains, biases and gates."""
    rows, shapes = expand(form.table, config), leaf_shapes(config)
    ours = flatten_params(params)
    tensors = ((row.name, to_tensor(row, {leaf: _leaf(ours, leaf, shapes) for leaf in row.leaves})) for row in rows)
    write_safetensors(path, {row.name: tensor_shape(row, shapes) for row in rows}, tensors)


def probe_logits(config: ModelConfig, params: Any) -> np.ndarray:
    """Compute logits on fixed ids: `[1, T, V]`, float32."""
    length = min(config.block_size, 32)
    tokens_BT = np.random.Generator(np.random.Philox(0)).integers(0, config.vocab_size, (1, length), np.int32)
    forward: Callable[..., Any] = jax.jit(lambda p, tokens: GPT(config).apply({"params": p}, tokens))
    with jax.default_matmul_precision("highest"):
        return np.asarray(forward(params, jnp.asarray(tokens_BT)))


def check_change(before: np.ndarray, after: np.ndarray) -> float:
    """Return the largest logit difference between a model and its export; fail above `TOLERANCE`."""
    change = float(np.abs(before - after).max())
    if not change <= TOLERANCE * max(1.0, float(np.abs(before).max())):
        raise TrainingFailed(f"the logits of the written files differ by {change:.2e}: the files were deleted")
    return change


def _leaf(ours: Mapping[str, Any], path: str, shapes: Mapping[str, tuple[int, ...]]) -> np.ndarray:
    if path in ours:
        return np.asarray(ours[path], np.float32)
    gate = path.replace("/gate_proj/", "/up_proj/")
    if gate != path:
        return np.asarray(ours[gate], np.float32)  # ReLU squared: relu(u)^2 = relu(u) u
    return np.full(shapes[path], float(path.endswith("/scale")), np.float32)
