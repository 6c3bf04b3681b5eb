"""Compile the train step for absent hardware, and read its cost."""

from __future__ import annotations

from dataclasses import replace
from functools import partial

import optax

from jaxgpt.config import Config
from jaxgpt.model import GPT
from jaxgpt.ops import Ops
from jaxgpt.parallel.mesh import make_mesh
from jaxgpt.parallel.rules import Rules, change_rules
from jaxgpt.plan.abstract import argument_bytes, batch_of, step_flops
from jaxgpt.plan.compiled import CompiledStep, compile_program
from jaxgpt.plan.compilers import devices_of
from jaxgpt.plan.cost import Resource, StepCost
from jaxgpt.plan.estimate import estimate
from jaxgpt.plan.topology import Topology
from jaxgpt.plan.work import NEXT_TOKEN, Work
from jaxgpt.train.loss import Objective
from jaxgpt.trainer.given import ProgramParts


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
    program = work.program(
        config,
        make_mesh(config.mesh, devices_of(topology)),
        ProgramParts(optimizer=optimizer, model=model, objective=objective, ops=ops),
        change_rules(rules or {}),
    )
    arguments = argument_bytes(program, work)
    batch = batch_of(program, work)
    flops = step_flops(program, work)
    lower = partial(program.lower, program.abstract.state, batch)
    cost = compile_program(lower, arguments, flops, program, topology)
    if cost.out_of_memory:
        return cost

    state_traffic = 2 * (sum(arguments.values()) - arguments["batch"])  # the state is read and written once per step
    is_counted = cost.hbm_bytes > 0
    cost = replace(
        cost,
        least=_lower_bounds(cost, state_traffic),
        hbm_bytes=_step_hbm_bytes(cost.hbm_bytes, state_traffic, program.batches.microbatches.accumulation),
    )
    has_custom_parts = any(part is not None for part in (ops, rules, model, optimizer, objective))
    if has_custom_parts:  # parts that the estimate does not include
        return cost

    # The estimate adds lower bounds that include activations, and what the compiler does not count: recomputation and, on
    # GPUs, memory traffic.
    estimated = estimate(config, topology, work)
    least: dict[Resource, float] = {"compute": estimated.least["compute"], "memory": estimated.least["memory"]}
    return replace(
        cost,
        least=cost.least | least,
        hbm_bytes=cost.hbm_bytes if is_counted else estimated.hbm_bytes,
        computed_flops=estimated.computed_flops,
        recomputed_flops=estimated.recomputed_flops,
    )


def _lower_bounds(cost: StepCost, state_traffic: float) -> dict[Resource, float]:
    """Return `StepCost.least` of a compiled step; `state_traffic`: bytes of the state that are read and written."""
    traffic = cost.traffic.values()
    return {
        "compute": cost.model_flops,
        "memory": state_traffic,
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
