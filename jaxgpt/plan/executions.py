"""Number of executions of each computation of a compiled program, from the trip counts of its loops."""

from __future__ import annotations

import math
import re
from collections import defaultdict

from jaxgpt.plan.hlo import Computation, Instruction, root_of


def count_executions(computations: dict[str, Computation], entry: str) -> dict[str, int]:
    """Count the executions of each computation: the sum over its calls, times the trip count for calls by a loop.

    A loop with an unknown trip count counts as one iteration, and every branch of a conditional counts as executed.
    """
    executions = defaultdict[str, int](int)
    pending = [(entry, 1)]
    while pending:
        name, n = pending.pop()
        executions[name] += n
        for instruction in computations.get(name, {}).values():
            # The end of an asynchronous call may name the computation again.
            if instruction.opcode.endswith(("-update", "-done")):
                continue
            trips = _trip_count(instruction, computations) if instruction.opcode == "while" else 1
            pending += [(other, n * trips) for other in instruction.called]
    return executions


def _trip_count(loop: Instruction, computations: dict[str, Computation]) -> int:
    """Return the trip count of a loop; 1 if unknown.

    The count is the compiler's annotation, or derived from `i < end` and `i + step`, assuming that i starts at 0. For example,
    5 iterations:

        condition: i = s32[] get-tuple-element(state), index=0; end = s32[] constant(10);
                   ROOT less = pred[] compare(i, end), direction=LT
        body:      i = s32[] get-tuple-element(state), index=0; step = s32[] constant(2);
                   next = s32[] add(i, step); ROOT results = (s32[], ...) tuple(next, ...)
    """
    known = loop.find(r'known_trip_count[^}]*?"?n"?[:=]"?(\d+)')
    if known:
        return int(known)

    condition = _inlined(computations.get(loop.find(r"condition=%?([\w.-]+)"), {}), computations)
    body = _inlined(computations.get(loop.find(r"body=%?([\w.-]+)"), {}), computations)
    less = root_of(condition)
    results = root_of(body)
    if less is None or results is None or "direction=LT" not in less.rest or len(less.operands) != 2:
        return 1

    # The counter is one element of the tuple that the body returns; the body must add a constant to it.
    counter, end = less.operands
    index = condition[counter].find(r"index=(\d+)") if counter in condition else ""
    if not index or results.opcode != "tuple":
        return 1
    added = body.get(results.operands[int(index)])
    if added is None or added.opcode != "add":
        return 1
    step = _constant(body, added.operands[1])
    if not step:
        return 1
    return max(math.ceil(_constant(condition, end) / step), 1)


def _inlined(computation: Computation, computations: dict[str, Computation]) -> Computation:
    """Return a computation with the instructions of its scalar fusions in the place of the fusions.

    An instruction of a fusion is named `FUSION.INSTRUCTION`; the fusion's result keeps its name.
    """
    result: Computation = {}
    for outer in computation.values():
        is_scalar = re.match(r"\w+\[\]", outer.shape) is not None
        if outer.opcode != "fusion" or not is_scalar:
            result[outer.name] = outer
            continue
        fused = computations.get(outer.called[0], {})
        names = _names_outside(fused, outer)
        for inner in fused.values():
            if inner.opcode != "parameter":
                name = names[inner.name]
                is_root = inner.root and outer.root
                result[name] = inner.with_names(names)._replace(name=name, root=is_root)
    return result


def _names_outside(fused: Computation, outer: Instruction) -> dict[str, str]:
    """Return the name that each instruction of a fusion has in `_inlined`; a parameter has the name of the operand."""
    names = {}
    for inner in fused.values():
        if inner.opcode == "parameter":
            number, _, _ = inner.rest.partition(")")
            names[inner.name] = outer.operands[int(number)]
        elif inner.root:
            names[inner.name] = outer.name
        else:
            names[inner.name] = f"{outer.name}.{inner.name}"
    return names


def _constant(body: Computation, name: str) -> int:
    """Return the value of an integer constant, or 0 for other instructions."""
    if name not in body or body[name].opcode != "constant":
        return 0
    value = re.match(r"-?\d+(?=\))", body[name].rest)
    return int(value[0]) if value else 0
