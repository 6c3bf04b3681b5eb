"""Count the floating-point operations of a traced function: matrix products and attention kernels."""

from __future__ import annotations

import math
from typing import Any

from jaxgpt.plan.kernel import KERNEL


def count_flops(jaxpr: Any) -> float:
    """Count the FLOPs of the matrix products and attention kernels of a jaxpr, including all calls.

    A product of `[I, K]` and `[K, O]` has `2 I K O` FLOPs. The body of a scan counts once per iteration, the body of a `while`
    loop once. For `jax.lax.platform_dependent`, the branch of accelerators counts; for other conditionals, the most expensive
    branch.
    """
    return math.fsum(_flops(eqn) for eqn in jaxpr.eqns)


def _flops(eqn: Any) -> float:
    name = eqn.primitive.name
    if eqn.primitive is KERNEL:
        return float(eqn.params["flops"])
    if name == "dot_general":
        (contracted, _), _ = eqn.params["dimension_numbers"]
        inner = math.prod(eqn.invars[0].aval.shape[axis] for axis in contracted)
        return 2.0 * inner * math.prod(eqn.outvars[0].aval.shape)
    if name.startswith("ragged_dot"):
        return _ragged_flops(eqn)
    if name == "cond":
        return _branch_flops(eqn)

    # For calls and loops, count the jaxprs among the parameters.
    times = eqn.params["length"] if name == "scan" else 1
    return times * math.fsum(count_flops(each) for each in _jaxprs(eqn.params.values()))


def _ragged_flops(eqn: Any) -> float:
    """Count a product of groups of rows with one matrix each: every element of the rows is used once for each output."""
    rows, matrices = (each.aval.shape for each in eqn.invars[:2])
    numbers = eqn.params["ragged_dot_dimension_numbers"]
    (_, contracted), (_, batch) = numbers.dot_dimension_numbers
    used = {*contracted, *batch, *numbers.rhs_group_dimensions}
    outputs = math.prod(size for axis, size in enumerate(matrices) if axis not in used)
    return 2.0 * math.prod(rows) * outputs


def _branch_flops(eqn: Any) -> float:
    branches = eqn.params["branches"]
    platforms = eqn.params.get("branches_platforms")
    if platforms:
        chosen = [branch for names, branch in zip(platforms, branches, strict=True) if "cpu" not in (names or ())]
        branches = chosen or branches
    return max(count_flops(branch.jaxpr) for branch in branches)


def _jaxprs(values: Any) -> list[Any]:
    """Return the jaxprs among the parameters of an equation."""
    found = []
    for value in values:
        if isinstance(value, tuple | list):
            found += _jaxprs(value)
        elif hasattr(value, "eqns"):
            found.append(value)
        elif hasattr(value, "jaxpr"):
            found.append(value.jaxpr)
    return found
