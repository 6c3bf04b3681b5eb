"""Compile a program for absent hardware, and read its cost."""

from __future__ import annotations

import re
from collections.abc import Callable, Iterator
from contextlib import contextmanager
from dataclasses import dataclass, field
from typing import Any

import jax

from jaxgpt.errors import UserError
from jaxgpt.out_of_memory import is_out_of_device_memory
from jaxgpt.parallel.chips import GIB
from jaxgpt.plan.abstract import StepFlops
from jaxgpt.plan.collectives import merged
from jaxgpt.plan.cost import StepCost
from jaxgpt.plan.program_text import read_program
from jaxgpt.plan.topology import Topology
from jaxgpt.trainer.failures import explain_failure
from jaxgpt.trainer.program import Program

# Skip optimizations that affect speed, but hardly memory and communication. Compilation is 5x faster.
QUICK = {"exec_time_optimization_effort": -1.0}


@dataclass(frozen=True)
class CompiledStep(StepCost):
    """The cost of a compiled step, and its program.

    Attributes:
        executable: the compiled program; `executable.as_text()` returns its HLO. None if the program exhausts the memory.
    """

    executable: Any = field(default=None, repr=False, compare=False)


def compile_program(
    lower: Callable[[], Any],
    arguments: dict[str, float],
    flops: StepFlops,
    program: Program,
    topology: Topology,
) -> CompiledStep:
    """Compile a program and read its cost.

    Args:
        lower: returns the lowered program, a `jax.stages.Lowered`.
        arguments: bytes of the program's arguments on a device, by kind.
        flops: computed and useful FLOPs of the program on a device.
        program: program of the run, for its config and mesh.
        topology: the hardware.

    Raises:
        UserError: if compilation fails, unless the compiler's message has the bytes of the exhausted memory.
    """
    try:
        with _no_compilation_cache():
            compiled = lower().compile(compiler_options=dict(QUICK))
    except jax.errors.JaxRuntimeError as e:
        if not is_out_of_device_memory(e):
            raise UserError(explain_failure(program, e)) from None
        text = " ".join(str(e).split())
        return _out_of_memory(text, arguments, flops)

    sizes = compiled.memory_analysis()
    memory = arguments | {
        "padding": max(sizes.argument_size_in_bytes - sum(arguments.values()), 0.0),
        "results": float(sizes.output_size_in_bytes - sizes.alias_size_in_bytes),
        "temporaries": float(sizes.temp_size_in_bytes),
        "program": float(sizes.generated_code_size_in_bytes),
    }
    costs = compiled.cost_analysis() or {}
    executed = read_program(compiled.as_text(), program.mesh.shape)
    return CompiledStep(
        memory=memory,
        available=topology.chip.hbm,
        model_flops=flops.computed,
        useful_share=flops.useful / flops.computed,
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


def _out_of_memory(text: str, arguments: dict[str, float], flops: StepFlops) -> CompiledStep:
    """Return the cost of a program that exhausts the memory; `text`: the compiler's message."""
    needed, available = _parse_exhausted(text)
    return CompiledStep(
        memory=arguments | {"temporaries": max(needed - sum(arguments.values()), 0.0)},
        available=available,
        model_flops=flops.computed,
        useful_share=flops.useful / flops.computed,
        hbm_bytes=0.0,
        compiled=True,
        out_of_memory=True,
    )


def _parse_exhausted(text: str) -> tuple[float, float]:
    """Return the needed and the available bytes in the compiler's out-of-memory message.

    Raises:
        UserError: if the message does not contain these bytes.
    """
    units = {"K": 2**10, "M": 2**20, "G": GIB, "T": 2**40}
    for form in (r"Used ([\d.]+)([KMGT]) of ([\d.]+)([KMGT])", r"\(([\d.]+)([KMGT])\) exceeds.*?\(([\d.]+)([KMGT])\)"):
        found = re.search(form, text)
        if found:
            needed = float(found[1]) * units[found[2]]
            available = float(found[3]) * units[found[4]]
            return needed, available
    raise UserError(f"the program does not fit in device memory: {text[:300]}")
