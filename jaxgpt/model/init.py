"""Initial parameters, and initializers."""

from __future__ import annotations

import math
from functools import partial
from typing import Any

import flax.linen as nn
import jax
import jax.numpy as jnp

from jaxgpt.config import ModelConfig
from jaxgpt.ops.random import named_key


def init_params(model: nn.Module, seed: jax.typing.ArrayLike = 0) -> Any:
    """Initialize the parameters of a model.

    Args:
        model: the model, with `config.vocab_size` set.
        seed: seed of the initial weights, an integer; may be traced.

    Returns:
        Nested dicts of float32 arrays: `{"wte": {"embedding": [V, D]}, "h_0": {"attn": {...}, "mlp": {...}, ...}, ...}`.
    """
    return nn.unbox(boxed_params(model, seed))


def boxed_params(model: nn.Module, seed: jax.typing.ArrayLike) -> Any:
    """Initialize parameters in linen's boxes, which have the logical axes for the sharding table."""
    return model.init(named_key(seed, "init"), jnp.zeros((1, 1), jnp.int32))["params"]


def initializers(
    config: ModelConfig, fan_in: int, residual: bool
) -> tuple[nn.initializers.Initializer, nn.initializers.Initializer]:
    """Return the initializers of a kernel and its bias, as `config.init` specifies.

    `gpt2`: N(0, s^2), s = `init_std`; residual projections N(0, s^2 / (2 * n_layer)); biases 0 (Radford et al. 2019, sec. 2.3).
    `zero-proj`: `gpt2` with zero residual projections, which initially add nothing to the residual stream.
    `torch`: kernel and bias uniform in +-1 / sqrt(fan_in), as in `torch.nn.Linear`.
    """
    if config.init == "torch":
        bound = 1 / math.sqrt(fan_in)
        uniform = partial(jax.random.uniform, minval=-bound, maxval=bound)
        return uniform, uniform
    if residual and config.init == "zero-proj":
        return nn.initializers.zeros, nn.initializers.zeros
    std = config.init_std / math.sqrt(2 * config.n_layer) if residual else config.init_std
    return nn.initializers.normal(std), nn.initializers.zeros
