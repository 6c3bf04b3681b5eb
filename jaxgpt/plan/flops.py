"""Count the floating-point operations of a traced function: matrix products and attention kernels."""

from __future__ import annotations

import math
from typing import Any

from jax.extend.core import Jaxpr, JaxprEqn, jaxprs_in_params

from jaxgpt.plan.kernel import KERNEL


def count_flops(jaxpr: Jaxpr) -> float:
    """Count the FLOPs of the matrix products and attention kernels of a jaxpr, including all calls.

    A product of `[I, K]` and `[K, O]` has `2 I K O` FLOPs. The body of a scan counts once per iteration, the body of a `while`
    loop once. For `jax.lax.platform_dependent`, the branch of accelerators counts; for other conditionals, the most expensive
    branch.
    """
    return math.fsum(_flops(eqn) for eqn in jaxpr.eqns)


def _flops(eqn: JaxprEqn) -> float:
    """Count the FLOPs of an equation."""
    name = eqn.primitive.name
    if eqn.primitive is KERNEL:
        return float(eqn.params["flops"])
    if name == "dot_general":
        (contracted, _), _ = eqn.params["dimension_numbers"]
        inner = math.prod(_shape(eqn.invars[0])[axis] for axis in contracted)
        return 2.0 * inner * math.prod(_shape(eqn.outvars[0]))
    if name.startswith("ragged_dot"):
        return _ragged_flops(eqn)
    if name == "cond":
        return _branch_flops(eqn)

    # A call counts its body once, and a scan counts its body once per iteration.
    times = eqn.params["length"] if name == "scan" else 1
    return times * math.fsum(count_flops(body) for body in jaxprs_in_params(eqn.params))


def _ragged_flops(eqn: JaxprEqn) -> float:
    """Count a product of groups of rows with one matrix each: every element of the rows is used once for each output."""
    rows = _shape(eqn.invars[0])
    matrices = _shape(eqn.invars[1])
    numbers = eqn.params["ragged_dot_dimension_numbers"]
    (_, contracted), (_, batch) = numbers.dot_dimension_numbers
    used = {*contracted, *batch, *numbers.rhs_group_dimensions}
    outputs = math.prod(size for axis, size in enumerate(matrices) if axis not in used)
    return 2.0 * math.prod(rows) * outputs


def _branch_flops(eqn: JaxprEqn) -> float:
    """Count the most expensive branch of a conditional; for `platform_dependent`, among the branches of accelerators."""
    branches = eqn.params["branches"]
    platforms = eqn.params.get("branches_platforms")
    if platforms:
        chosen = [branch for names, branch in zip(platforms, branches, strict=True) if "cpu" not in (names or ())]
        branches = chosen or branches
    return max(count_flops(branch.jaxpr) for branch in branches)


def _shape(var: Any) -> tuple[int, ...]:
    """Return the shape of a variable of a jaxpr."""
    shape: tuple[int, ...] = var.aval.shape
    return shape
