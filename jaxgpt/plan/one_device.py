"""The share of one device: its settings, and its FLOPs in a step."""

from __future__ import annotations

import math
from dataclasses import replace
from functools import cache
from typing import Any

from jax.sharding import AbstractMesh

from jaxgpt.config import Config, LoraConfig, MeshConfig, ModelConfig
from jaxgpt.counts import flops_per_token
from jaxgpt.model.params import abstract_params
from jaxgpt.parallel.mesh import sizes_of
from jaxgpt.parallel.rows import Microbatches, microbatches, row_shards
from jaxgpt.parallel.rules import AXES, rules_for


@cache
def one_device(config: Config) -> Config:
    """Return the settings of one device: its share of rows, heads, hidden units and vocabulary, over whole windows.

    The model has its full width, because weights are gathered along fsdp. If `tensor` does not divide an axis, every
    device computes the complete axis. All experts are on the device. `mesh.context` is unchanged: a device has an equal
    share of the positions of each window.

    Args:
        config: settings of the run, with a resolved mesh.
    """
    model = model_of_one_device(config.model, config.mesh)
    rows = microbatches_of(config).rows // row_shards(sizes_of(config.mesh))
    train = replace(config.train, batch_size=rows, accumulation=1)
    mesh_of_one = MeshConfig(data=1, fsdp=1, context=config.mesh.context, tensor=1)
    return replace(config, model=model, train=train, mesh=mesh_of_one)


def model_of_one_device(model: ModelConfig, mesh: MeshConfig) -> ModelConfig:
    """Return the share of one device of the heads, hidden units and vocabulary of a model."""
    sizes = sizes_of(mesh)
    abstract_mesh: Any = AbstractMesh(tuple(sizes.values()), AXES)
    rules = rules_for(model, abstract_mesh)
    if not model.attn_proj:  # unsharded heads, added to the complete residual stream
        rules |= {"heads": (), "kv_heads": ()}

    def part(axis: str, size: int) -> int:
        return size // sizes["tensor"] if "tensor" in rules[axis] else size

    kv_heads = part("kv_heads", model.kv_heads)
    return replace(
        model,
        n_head=math.lcm(part("heads", model.n_head), kv_heads),  # a multiple of the key/value heads
        n_kv_head=kv_heads,
        head_dim=model.head_width,
        n_inner=part("mlp", model.mlp_width),
        vocab_size=part("vocab", model.vocab_size),
    )


def microbatches_of(config: Config) -> Microbatches:
    """Return the number of microbatches of a step on a resolved mesh, and their rows."""
    return microbatches(config.train, row_shards(sizes_of(config.mesh)))


def token_flops(config: Config, T: int) -> float:
    """Compute one device's FLOPs of training on one token, in a context of T tokens."""
    part = one_device(config)
    weights = abstract_params(part.model)
    return flops_per_token(part.model, weights, T, part.lora)


def forward_flops(config: Config, T: int) -> float:
    """Compute one device's FLOPs of a forward pass of one token, in a context of T tokens, with merged adapters.

    They are a third of the FLOPs of training without adapters, because a backward pass has two products for each product.
    """
    merged = replace(config, lora=LoraConfig())
    return token_flops(merged, T) / 3
