"""jaxgpt plan TARGET --topology v5e:2x4 [--slices N] [--against OPTIONS] [--meshes] [--decode] [--estimate] [--json]"""

from __future__ import annotations

import os
from collections.abc import Sequence
from typing import Annotated

from cyclopts import Parameter

from jaxgpt.cli.console import progress
from jaxgpt.cli.options import NO_SETTINGS, GivenSettings, Json
from jaxgpt.cli.output import print_json
from jaxgpt.cli.plan_case import Case, make_case, other_case
from jaxgpt.cli.plan_comparison import comparison_json, comparison_text
from jaxgpt.cli.plan_parts import (
    Advice,
    Plan,
    compile_programs,
    estimate_parts,
    find_advice,
    larger_slice,
    why_not_compiled,
)
from jaxgpt.cli.plan_text import (
    advice_text,
    estimate_text,
    meshes_json,
    meshes_text,
    plan_json,
    program_text,
)
from jaxgpt.errors import FAILED, UserError


def plan(
    target: str,
    /,
    *,
    topology: str,
    slices: int = 1,
    against: Annotated[str, Parameter(allow_leading_hyphen=True)] = "",
    meshes: bool = False,
    decode: bool = False,
    estimate: bool = False,
    json: Json = False,
    settings: GivenSettings = NO_SETTINGS,
) -> int:
    """Plan a run for hardware you do not have: memory per device, communication, bounds on speed.

    The first table is an estimate. With a compiler, the training step is also
    compiled, and a second table shows the compiler's numbers. Compilers need Linux
    but no accelerator: pip install -e '.[tpu]' for TPUs (x86-64), '.[cuda13]' for
    one machine of H100 or H200. The exit code is 1 if the run does not fit.

    A topology is a chip and a grid: v4:2x2x2, v5e:2x4, v5p:4x4x4, v6e:4x8,
    tpu7x:2x2x1. It may also be a Google Cloud slice, named by its number of chips
    (v5e-8, v5litepod-16, v6e-8) or of TensorCores, two per chip (v5p-128, v4-32).
    GPUs are a100, b200, h100, h200, l4, l40s and mi300x, at most 8 per machine:
    h100:8 --slices 4 is four machines. For any other device, use custom with its
    specifications in FLOP/s, bytes and bytes/s:
    custom:8,peak=312T,hbm=80G,bandwidth=2039G,link=300G,network=25G

    Published architectures, without recipe or data, are llama-3.2-1b, llama-2-7b,
    llama-3-8b, llama-3-70b and mixtral-8x7b.

    jaxgpt plan gpt2 --topology v5e-8
    jaxgpt plan gpt2-xl --topology v5p:4x4x4 --mesh.fsdp -1
    jaxgpt plan runs/shakespeare --topology h100:8 --slices 4 --estimate
    jaxgpt plan llama-3-8b --topology v5p-128 --meshes
    jaxgpt plan llama-3-8b --topology v5p-128 --mesh.fsdp -1 --against "--mesh.tensor 4"

    Args:
        target: preset, published architecture or run
        topology: chip and grid, such as v5e:2x4, or a Google Cloud slice, such as v5e-8
        slices: number of TPU slices or GPU machines, connected by a network
        against: also plan with these further options, such as "--mesh.tensor 4", and print both plans in columns
        meshes: estimate every mesh that suits the run, instead of one mesh; sorted by time, the meshes that fit first
        decode: also plan a decoding step: one token for each row of a microbatch, with a full context
        estimate: print only the estimate, do not compile
    """
    # A plan needs no devices of this machine. Without this variable, an installed libtpu would search for TPUs.
    os.environ["JAX_PLATFORMS"] = "cpu"
    case = make_case(target, topology, slices, settings)
    if meshes:
        if against or decode:
            raise UserError("--meshes prints estimates of all meshes: omit --against and --decode")
        return _print_meshes(case, json)

    cases = [case]
    if against:
        cases.append(other_case(target, topology, slices, settings, against))
    why_not = why_not_compiled(cases, estimate)
    if decode and why_not:
        raise UserError(f"--decode needs the compiler: {why_not}")
    if against:
        return _print_comparison(cases, against, why_not, decode, json)
    return _print_plan(case, why_not, decode, json)


def _print_plan(case: Case, why_not: str, decode: bool, json: bool) -> int:
    """Print the estimates of a plan, its compiled programs and advice; return the exit code."""
    estimates = estimate_parts(case)
    if not json:
        print(estimate_text(case, estimates))  # before the compilation, which takes minutes

    programs = {} if why_not else compile_programs(case, decode)
    plan = Plan(case, estimates, programs)
    if json:
        advice = Advice() if plan.fits else find_advice(case)
        print_json(plan_json(plan, why_not, advice))
    else:
        print(f"\nnot compiled: {why_not}" if why_not else program_text(case, programs))
        if not plan.fits:
            print(advice_text(find_advice(case), case.topology.chip.hbm))
    return 0 if plan.fits else FAILED


def _print_meshes(case: Case, json: bool) -> int:
    """Print the meshes of a topology, sorted by time, the meshes that fit first; return the exit code."""
    from jaxgpt.plan.meshes import meshes

    with progress("estimating all meshes") as activity:
        choices = meshes(case.config, case.topology, case.work, activity)
    fits = any(choice.cost.fits for choice in choices)
    larger = "" if fits else larger_slice(case)

    if json:
        print_json(meshes_json(case, choices, larger))
    else:
        print(meshes_text(case, choices, larger))
    return 0 if fits else FAILED


def _print_comparison(cases: Sequence[Case], against: str, why_not: str, decode: bool, json: bool) -> int:
    """Print two plans in columns, with their difference; return the exit code."""
    plans = []
    for case in cases:
        estimates = estimate_parts(case)
        programs = {} if why_not else compile_programs(case, decode)
        plans.append(Plan(case, estimates, programs))

    this, other = plans
    if json:
        print_json(comparison_json(this, other, against, why_not))
    else:
        print(comparison_text(this, other, against, why_not))
    return 0 if this.fits and other.fits else FAILED
