"""Compile a decoding step for absent hardware, and read its cost."""

from __future__ import annotations

from dataclasses import replace
from functools import partial
from typing import Any

import jax
import jax.numpy as jnp

from jaxgpt.config import Config, LoraConfig, ModelConfig
from jaxgpt.counts import flops_per_token
from jaxgpt.decoding import Sampler, TokenBuffer
from jaxgpt.decoding.sampler import SamplerState, decode_steps, prefill
from jaxgpt.model import GPT
from jaxgpt.model.params import map_matrices
from jaxgpt.parallel.mesh import make_mesh
from jaxgpt.parallel.rows import batch_ways
from jaxgpt.parallel.rules import STATIONARY, partition_spec, rules_for, use_mesh
from jaxgpt.plan.abstract import StepFlops
from jaxgpt.plan.compiled import CompiledStep, compile_program
from jaxgpt.plan.compilers import devices_of
from jaxgpt.plan.one_device import forward_flops
from jaxgpt.plan.shards import shard_bytes
from jaxgpt.plan.topology import Topology
from jaxgpt.trainer.build import make_program

# Logical axes of arrays in a sampler's state: keys and values of the cache, and other arrays, which have up to two axes.
KV_AXES = ("batch", "kv_heads", None, None)
ROW_AXES = ("batch", None)


def compile_decode(config: Config, topology: Topology) -> CompiledStep:
    """Compile a decoding step for a topology and return its cost.

    The step decodes one token per row of a microbatch, with a full context.

    Raises:
        UserError: if the compiler is not available, or compilation fails.
    """
    # Decoding uses merged weights, unstacked because stacked layers support no cache.
    config = replace(config, train=replace(config.train, scan_layers=False), lora=LoraConfig())
    model = config.model
    mesh = make_mesh(config.mesh, devices_of(topology))
    program = make_program(config, mesh)
    sampler = Sampler(GPT(model, program.model.ops))
    B = program.batches.microbatches.rows

    # Make the shapes of the decoding step's arguments: weights in the compute dtype (`for_decoding`), and the state.
    dtype = config.train.compute_dtype
    weights = program.abstract.weights
    params = map_matrices(lambda w: w.update(dtype=dtype), weights, model)
    state = _abstract_state(sampler, params, model, B, mesh)

    # The forward pass is a third of the training FLOPs, as in `forward_flops`.
    flops = StepFlops(
        computed=forward_flops(config, model.block_size) * B / batch_ways(mesh),
        useful=flops_per_token(model, weights, model.block_size) / 3 * B / mesh.size,
    )
    arguments = {"parameters": shard_bytes(params), "cache": shard_bytes(state.cache)}

    def lower() -> jax.stages.Lowered:
        step = jax.jit(partial(decode_steps, sampler), donate_argnums=1)
        with use_mesh(mesh, model, STATIONARY, length=1):
            return step.lower(params, state, state.made)

    cost = compile_program(lower, arguments, flops, program, topology)
    memory = dict(cost.memory)
    if dtype != "float32":
        memory["float32 parameters"] = shard_bytes(weights)
    return replace(cost, memory=memory, hbm_bytes=cost.hbm_bytes or sum(arguments.values()))


def _abstract_state(
    sampler: Sampler, params: Any, model: ModelConfig, rows: int, mesh: jax.sharding.Mesh
) -> SamplerState:
    """Return the shapes and shardings of a sampler's state after prompts of one token, with the cache of a full context."""
    rules = rules_for(model, mesh, STATIONARY, length=1)

    def begin(params: Any) -> SamplerState:
        text = TokenBuffer(jnp.zeros((rows, 1), jnp.int32), jnp.int32(1))
        key_B = jax.random.split(jax.random.key(0), rows)
        return prefill(sampler, params, text, key_B, model.block_size)

    def placed(names: tuple[str | None, ...], leaf: jax.ShapeDtypeStruct) -> jax.ShapeDtypeStruct:
        sharding = jax.sharding.NamedSharding(mesh, partition_spec(names[: leaf.ndim], rules))
        return jax.ShapeDtypeStruct(leaf.shape, leaf.dtype, sharding=sharding)

    with use_mesh(mesh, model, STATIONARY, length=1):
        state: SamplerState = jax.eval_shape(begin, params)
    layers = jax.tree.map(partial(placed, KV_AXES), state.cache.layers)
    others = state._replace(cache=state.cache._replace(layers=()))
    others = jax.tree.map(partial(placed, ROW_AXES), others)
    return others._replace(cache=others.cache._replace(layers=layers))
