"""Initial parameters and their shapes."""

from __future__ import annotations

import functools
from dataclasses import replace
from typing import Any

import flax.linen as nn
import jax
import jax.numpy as jnp
from flax.traverse_util import flatten_dict

from jaxgpt.config import ModelConfig
from jaxgpt.model.gpt import GPT
from jaxgpt.model.scan import layer_name
from jaxgpt.ops.random import named_key


def init_params(model: GPT, seed: jax.typing.ArrayLike = 0) -> Any:
    """Initialize the parameters of a model.

    Args:
        model: the model, with `config.vocab_size` set.
        seed: an integer, which may be traced.

    Returns:
        Nested dicts of float32 arrays: `{"wte": {"embedding": [V, D]}, "h_0": {"attn": {...}, "mlp": {...}, ...}, ...}`.
    """
    return nn.unbox(boxed_params(model, seed))


def boxed_params(model: GPT, seed: jax.typing.ArrayLike) -> Any:
    """Initialize parameters in linen's boxes, which carry the logical axes of each array for the sharding table."""
    return model.init(named_key(seed, "init"), jnp.zeros((1, 1), jnp.int32))["params"]


def flatten_params(params: Any) -> dict[str, Any]:
    """Map the path of every leaf, such as "h_0/attn/q_proj/kernel", to the leaf."""
    leaves = jax.tree.leaves_with_path(params)
    return {jax.tree_util.keystr(path, simple=True, separator="/"): leaf for path, leaf in leaves}


def forward_order(config: ModelConfig) -> list[str]:
    """List the paths of a model's parameters, with one block, in the order in which the forward pass first uses them."""
    paths: list[str] = []
    model = GPT(replace(config, n_layer=1))
    # Before any function of trees, which sorts names, has seen them.
    jax.eval_shape(lambda: paths.extend(flatten_dict(boxed_params(model, 0), sep="/")))
    return paths


def crop_positions(params: Any, config: ModelConfig) -> Any:
    """Return the parameters without the learned positions past the context of a config."""
    if "wpe" not in params:
        return params
    return params | {"wpe": {"embedding": params["wpe"]["embedding"][: config.block_size]}}


def abstract_params(config: ModelConfig) -> Any:
    """Return the shapes and dtypes of a model's parameters, without computing them."""
    one = _abstract_params(replace(config, n_layer=1))  # all blocks have the same shapes: trace one
    return jax.tree.map(lambda leaf: leaf, one | {layer_name(i): one[layer_name(0)] for i in range(config.n_layer)})


@functools.lru_cache(maxsize=64)
def _abstract_params(config: ModelConfig) -> Any:
    return jax.eval_shape(lambda: init_params(GPT(config)))
