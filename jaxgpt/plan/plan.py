"""Compile the train step and a decoding step for hardware you do not have, and read their cost."""

from __future__ import annotations

import re
from collections.abc import Callable, Iterator
from contextlib import contextmanager
from dataclasses import dataclass, field, replace
from functools import partial
from typing import Any

import jax
import jax.numpy as jnp
import optax

from jaxgpt.config import Config, LoraConfig, ModelConfig
from jaxgpt.counts import flops_per_token
from jaxgpt.decoding import Sampler, TokenBuffer
from jaxgpt.decoding.sampler import SamplerState, decode_steps, prefill
from jaxgpt.errors import UserError
from jaxgpt.model import GPT
from jaxgpt.model.params import map_matrices
from jaxgpt.ops import Ops
from jaxgpt.parallel.chips import GIB
from jaxgpt.parallel.mesh import make_mesh
from jaxgpt.parallel.rows import batch_ways
from jaxgpt.parallel.rules import STATIONARY, Rules, change_rules, partition_spec, rules_for, use_mesh
from jaxgpt.plan.abstract import argument_bytes, batch_of, step_flops
from jaxgpt.plan.collectives import read_program
from jaxgpt.plan.cost import StepCost, merged
from jaxgpt.plan.estimate import estimate
from jaxgpt.plan.one_device import token_flops
from jaxgpt.plan.shards import shard_bytes
from jaxgpt.plan.topology import Topology, devices_of
from jaxgpt.plan.work import NEXT_TOKEN, Work
from jaxgpt.train.loss import Objective
from jaxgpt.trainer.build import make_program
from jaxgpt.trainer.failures import explain_failure
from jaxgpt.trainer.program import Program

# Logical axes of arrays in a sampler's state: keys and values of the cache, and other arrays, which have up to two axes.
KV_AXES = ("batch", "kv_heads", None, None)
ROW_AXES = ("batch", None)
# Skip optimizations that affect speed, but hardly memory and communication. Compilation is 5x faster.
QUICK = {"exec_time_optimization_effort": -1.0}


@dataclass(frozen=True)
class CompiledStep(StepCost):
    """The cost of a compiled step, and its program.

    Attributes:
        executable: the compiled program; `executable.as_text()` returns its HLO. None if the program exhausts the memory.
    """

    executable: Any = field(default=None, repr=False, compare=False)


def compile_step(
    config: Config,
    topology: Topology,
    ops: Ops | None = None,
    rules: Rules | None = None,
    *,
    model: GPT | None = None,
    optimizer: optax.GradientTransformation | None = None,
    objective: Objective | None = None,
    work: Work = NEXT_TOKEN,
) -> CompiledStep:
    """Compile the train step for a topology and return its cost.

    Args:
        config: settings of the run, with a resolved mesh.
        topology: the hardware.
        ops: operations to use instead of `jaxgpt.kernels.best(config, topology.target)`, as for `jaxgpt.build`.
        rules: changes to the sharding table, as for `jaxgpt.build`.
        model: module to train, as for `jaxgpt.build`.
        optimizer: optax transformation, as for `jaxgpt.build`.
        objective: objective of training on windows, as for `jaxgpt.build`.
        work: objective and batches of a step, instead of `objective`.

    Returns:
        The cost; its attribute `executable` is the compiled program.

    Raises:
        UserError: if the compiler is not available, compilation fails, or a rule is invalid.
    """
    program = make_program(
        config,
        make_mesh(config.mesh, devices_of(topology)),
        ops=ops,
        rules=change_rules(rules or {}),
        model=model,
        optimizer=optimizer,
        objective=objective,
        objective_of=work.for_model(),
        frozen=work.any_frozen(config),
        frozen_model=work.frozen_model,
    )
    counted = argument_bytes(program, work)
    batch = batch_of(program, work)
    cost = _compiled(lambda: program.lower(program.abstract_state, batch), counted, program, topology)
    computed, useful = step_flops(program, work)
    useful_share = useful / computed
    if cost.out_of_memory:
        return replace(cost, model_flops=computed, useful_share=useful_share)

    state = 2 * (sum(counted.values()) - counted["batch"])  # the state is read and written once per step
    least = _lower_bounds(cost, computed, state)
    hbm_bytes = _step_hbm_bytes(cost.hbm_bytes, state, program.microbatches.accumulation)
    computed_flops = 0.0
    recomputed_flops = 0.0

    # The estimate adds lower bounds that include activations, and what the compiler does not count: recomputation and, on
    # GPUs, memory traffic. It does not include custom parts.
    has_custom_parts = any(part is not None for part in (ops, rules, model, optimizer, objective))
    if not has_custom_parts:
        implied = estimate(config, topology, work)
        least |= {name: implied.least[name] for name in ("compute", "memory")}
        if cost.hbm_bytes <= 0:  # not counted
            hbm_bytes = implied.hbm_bytes
        computed_flops = implied.computed_flops
        recomputed_flops = implied.recomputed_flops

    return replace(
        cost,
        model_flops=computed,
        useful_share=useful_share,
        hbm_bytes=hbm_bytes,
        least=least,
        computed_flops=computed_flops,
        recomputed_flops=recomputed_flops,
    )


def _lower_bounds(cost: StepCost, flops: float, state: float) -> dict[str, float]:
    """Return `StepCost.least` of a compiled step, without the estimate.

    Args:
        cost: the cost, for its collectives.
        flops: model FLOPs.
        state: memory traffic of the state in bytes.
    """
    traffic = cost.traffic.values()
    return {
        "compute": flops,
        "memory": state,
        "links": sum(each.sent for each in traffic),
        "network": sum(each.sent_between_slices for each in traffic),
    }


def _step_hbm_bytes(compiled: float, state: float, microbatches: int) -> float:
    """Return the memory traffic of a step in bytes.

    The compiler counts one iteration of the loop over microbatches: all traffic except the state's occurs in each iteration.

    Args:
        compiled: traffic that the compiler counts; 0: unknown.
        state: traffic of the state.
        microbatches: number of iterations.
    """
    if not compiled:
        return state
    if microbatches == 1:
        return compiled
    return state + microbatches * max(compiled - state, 0.0)


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
    sampler = Sampler(GPT(model, program.ops))
    B = program.microbatches.rows

    # The shapes of the decoding step's arguments: weights in the compute dtype (`for_decoding`), and the state.
    dtype = config.train.compute_dtype
    weights = program.abstract_weights
    params = map_matrices(lambda w: w.update(dtype=dtype), weights, model)
    state = _abstract_state(sampler, params, model, B, mesh)

    def lowered() -> Any:
        step = jax.jit(partial(decode_steps, sampler), donate_argnums=1)
        with use_mesh(mesh, model, STATIONARY, length=1):
            return step.lower(params, state, state.made)

    counted = {"parameters": shard_bytes(params), "cache": shard_bytes(state.cache)}
    cost = _compiled(lowered, counted, program, topology)
    memory = dict(cost.memory)
    if dtype != "float32":
        memory["float32 parameters"] = shard_bytes(weights)

    # Without adapters, the forward pass is a third of the training FLOPs.
    flops = token_flops(config, model.block_size) / 3 * B / batch_ways(mesh)
    useful = flops_per_token(model, weights, model.block_size) / 3 * B / mesh.size
    hbm_bytes = cost.hbm_bytes or sum(counted.values())
    return replace(cost, memory=memory, model_flops=flops, hbm_bytes=hbm_bytes, useful_share=useful / flops)


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


def _compiled(
    lower: Callable[[], Any], counted: dict[str, float], program: Program, topology: Topology
) -> CompiledStep:
    """Compile a program and read its cost.

    Args:
        lower: returns the lowered program.
        counted: bytes of its arguments on a device, by kind.
        program: the config and mesh.
        topology: the hardware.
    """
    try:
        with _no_compilation_cache():
            compiled = lower().compile(compiler_options=dict(QUICK))
    except jax.errors.JaxRuntimeError as e:
        text = " ".join(str(e).split())
        if "RESOURCE_EXHAUSTED" not in text:
            raise UserError(explain_failure(program, e)) from None
        return _out_of_memory(text, counted)

    sizes = compiled.memory_analysis()
    memory = counted | {
        "padding": max(sizes.argument_size_in_bytes - sum(counted.values()), 0.0),
        "results": float(sizes.output_size_in_bytes - sizes.alias_size_in_bytes),
        "temporaries": float(sizes.temp_size_in_bytes),
        "program": float(sizes.generated_code_size_in_bytes),
    }
    costs = compiled.cost_analysis() or {}
    executed = read_program(compiled.as_text(), program.mesh.shape)
    return CompiledStep(
        memory=memory,
        available=topology.chip.hbm,
        model_flops=0.0,
        hbm_bytes=float(costs.get("bytes accessed", 0.0)),
        collectives=merged(one for one in executed.collectives if one.group > 1),
        compiled_flops=float(costs.get("flops", 0.0)),
        compiled=True,
        loops_once=executed.has_loops,
        executable=compiled,
    )


@contextmanager
def _no_compilation_cache() -> Iterator[None]:
    """Disable writes to JAX's compilation cache.

    Without the device, loading a cached program fails with a warning.
    """
    name = "jax_persistent_cache_min_compile_time_secs"
    before = jax.config.values[name]
    jax.config.update(name, float("inf"))
    try:
        yield
    finally:
        jax.config.update(name, before)


def _out_of_memory(text: str, counted: dict[str, float]) -> CompiledStep:
    """Return the cost of a program that exhausts the memory, from the compiler's message and the bytes of its arguments."""
    needed, available = _parse_exhausted(text)
    return CompiledStep(
        memory=counted | {"temporaries": max(needed - sum(counted.values()), 0.0)},
        available=available,
        model_flops=0.0,
        hbm_bytes=0.0,
        compiled=True,
        out_of_memory=True,
    )


def _parse_exhausted(text: str) -> tuple[float, float]:
    """Return the needed and the available bytes in the compiler's out-of-memory message."""
    units = {"K": 2**10, "M": 2**20, "G": GIB, "T": 2**40}
    for form in (r"Used ([\d.]+)([KMGT]) of ([\d.]+)([KMGT])", r"\(([\d.]+)([KMGT])\) exceeds.*?\(([\d.]+)([KMGT])\)"):
        found = re.search(form, text)
        if found:
            needed = float(found[1]) * units[found[2]]
            available = float(found[3]) * units[found[4]]
            return needed, available
    raise UserError(f"the program does not fit in device memory: {text[:300]}")
