"""Programs compiled for machines that are not here, and what the compiler says of them."""

from __future__ import annotations

import re
from collections.abc import Callable, Iterator
from contextlib import contextmanager
from dataclasses import replace
from typing import Any

import jax
import jax.numpy as jnp

from jaxgpt.config import Config, UserError
from jaxgpt.decoding import SamplingParams, TokenBuffer
from jaxgpt.decoding.sampler import RowLimits, SamplerState, decode_steps
from jaxgpt.lm import model_functions
from jaxgpt.parallel.mesh import batch_sharding, make_mesh, on_mesh, rules_for, spec
from jaxgpt.plan.estimate import shard_bytes, state_bytes, step_flops, useful
from jaxgpt.plan.figures import Figures, summed
from jaxgpt.plan.hlo import read_program
from jaxgpt.plan.topology import GIB, Topology, devices_of
from jaxgpt.trainer.metrics import flops_per_token
from jaxgpt.trainer.program import Program, explain_failure

# XLA spends its time on code that runs faster; what is placed and sent where is decided before. A fifth of the time.
QUICK = {"exec_time_optimization_effort": -1.0}


def compile_step(config: Config, topology: Topology, quick: bool = True) -> Figures:
    """The training step, compiled for the machine.

    Raises:
        UserError: there is no compiler, or it refuses.
    """
    program = Program(config, make_mesh(config.mesh, devices_of(topology)))
    state, pieces = program.abstract_state, program.microbatches.accumulation
    shape = pieces * program.microbatches.rows, config.model.block_size + 1
    windows = jax.ShapeDtypeStruct(shape, jnp.int32, sharding=batch_sharding(program.mesh))

    def lowered() -> Any:
        return program.lower(state, windows)

    counted = state_bytes(program)
    # The compiler's count passes over a loop's body once: the pieces of a batch are worked through in such a loop.
    fixed = 2 * (sum(counted.values()) - counted["batch"])
    figures = _compiled(lowered, counted, program, topology, quick)
    moved = fixed + pieces * max(figures.hbm_bytes - fixed, 0.0) if pieces > 1 else figures.hbm_bytes
    return replace(figures, hbm_bytes=moved, model_flops=step_flops(program), useful=useful(program))


def compile_decode(config: Config, topology: Topology, quick: bool = True) -> Figures:
    """The sampler, compiled for the machine: one token for every row of a (micro-)batch, a whole context in the cache.

    Raises:
        UserError: there is no compiler, or it refuses.
    """
    program = Program(config, make_mesh(config.mesh, devices_of(topology)))
    model, mesh, B = config.model, program.mesh, program.microbatches.rows
    functions = model_functions(model, config.train.compute_dtype)

    def placed(shape: Any, *names: str | None) -> jax.ShapeDtypeStruct:
        place = jax.sharding.NamedSharding(mesh, spec(names, rules_for(model, mesh)))
        return jax.ShapeDtypeStruct(shape.shape, shape.dtype, sharding=place)

    row = jax.ShapeDtypeStruct((B,), jnp.int32)
    scalar = placed(jax.ShapeDtypeStruct((), jnp.int32))
    start_B = placed(row, "batch")
    ids_BS = placed(jax.ShapeDtypeStruct((B, model.block_size), jnp.int32), "batch", None)
    shapes = jax.eval_shape(lambda start: functions.cache(start, model.block_size), row)
    cache_axes = ("batch", None, "kv_heads", "head_dim")
    cache = jax.tree.map(lambda s: placed(s, *(cache_axes if s.ndim == 4 else ("batch",)[: s.ndim])), shapes)
    done_B = placed(jax.ShapeDtypeStruct((B,), jnp.bool_), "batch")
    keys_B = placed(jax.eval_shape(lambda: jax.random.split(jax.random.key(0), B)), "batch")
    state = SamplerState(TokenBuffer(ids_BS, start_B, scalar), cache, done_B, scalar)  # type: ignore[arg-type]
    rows = RowLimits(keys_B, placed(row, "batch"))  # type: ignore[arg-type]
    params = program.abstract_state.params

    def lowered() -> Any:
        def tokens(params: Any, state: SamplerState, rows: RowLimits, steps: jax.Array) -> SamplerState:
            return decode_steps(params, state, rows, steps, functions, SamplingParams(), ())

        with on_mesh(mesh, model):
            return jax.jit(tokens, donate_argnums=1).lower(params, state, rows, scalar)

    counted = {"parameters": shard_bytes(params), "cache": shard_bytes(cache)}
    figures = _compiled(lowered, counted, program, topology, quick)
    # A third of training's products is the forward pass.
    flops = flops_per_token(model, params) / 3 * B / mesh.devices.size
    return replace(figures, model_flops=flops)


def _compiled(
    lower: Callable[[], Any], counted: dict[str, float], program: Program, topology: Topology, quick: bool
) -> Figures:
    """Compile, and read what came out. A program that is too big is an answer, too: the compiler says how big."""
    chip = topology.chip
    try:
        with _nothing_kept():
            compiled = lower().compile(compiler_options=dict(QUICK) if quick else None)
    except jax.errors.JaxRuntimeError as e:
        text = " ".join(str(e).split())
        if "RESOURCE_EXHAUSTED" not in text:
            raise UserError(explain_failure(e, program.mesh, program.config.train.microbatch)) from None
        needed, available = _too_big(text)
        rest = max(needed - sum(counted.values()), 0.0)
        return Figures(counted | {"temporaries": rest}, available or chip.hbm, 0.0, 0.0, {}, compiled=True)
    sizes, costs = compiled.memory_analysis(), compiled.cost_analysis() or {}
    costs = costs[0] if isinstance(costs, list) else costs
    arguments = sum(counted.values())
    memory = counted | {
        "padding": max(sizes.argument_size_in_bytes - arguments, 0.0),
        "results": float(sizes.output_size_in_bytes - sizes.alias_size_in_bytes),
        "temporaries": float(sizes.temp_size_in_bytes),
        "program": float(sizes.generated_code_size_in_bytes),
    }
    made = read_program(compiled.as_text())
    return Figures(
        memory,
        chip.hbm,
        0.0,
        float(costs.get("bytes accessed", 0.0)),
        summed(made.collectives),
        compiled_flops=float(costs.get("flops", 0.0)),
        compiled=True,
        loops_once=bool(made.loops),
    )


@contextmanager
def _nothing_kept() -> Iterator[None]:
    """JAX keeps nothing that it compiles: it cannot read a program again without the device, and warns each time."""
    name = "jax_persistent_cache_min_compile_time_secs"
    before = jax.config.values[name]
    jax.config.update(name, float("inf"))
    try:
        yield
    finally:
        jax.config.update(name, before)


def _too_big(text: str) -> tuple[float, float]:
    """Bytes that a program needs and bytes that there are, from the compiler's refusal."""
    units = {"K": 2**10, "M": 2**20, "G": GIB, "T": 2**40}
    for form in (r"Used ([\d.]+)([KMGT]) of ([\d.]+)([KMGT])", r"\(([\d.]+)([KMGT])\) exceeds.*?\(([\d.]+)([KMGT])\)"):
        if found := re.search(form, text):
            return float(found[1]) * units[found[2]], float(found[3]) * units[found[4]]
    raise UserError(f"the program does not fit, says the compiler: {text[:300]}")
