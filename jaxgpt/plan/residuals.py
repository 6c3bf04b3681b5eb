"""Find the residuals of a traced forward pass: the arrays that a compiler stores for the backward pass."""

from __future__ import annotations

from collections.abc import Iterable
from typing import Any

import jax
from jax.extend.core import Jaxpr, JaxprEqn, Literal, jaxprs_in_params

ELEMENTWISE = frozenset(
    "abs add add_any and bitcast_convert_type broadcast_in_dim concatenate convert_element_type copy cos div empty2 eq erf "
    "exp exp2 ge gt integer_pow iota le log logistic lt max min mul ne neg not one_minus_square or platform_index polynomial "
    "pow reshape rsqrt select_n sign sin slice split sqrt square squeeze stop_gradient sub tanh transpose".split()
)
VIEWS = frozenset("convert_element_type copy reshape squeeze stop_gradient transpose".split())

EquationOf = dict[int, JaxprEqn]  # the equation that computes a variable, keyed by the id of the variable


def residual_arrays(forward: Jaxpr) -> list[Any]:
    """Return the shapes and dtypes of the arrays to store for the results of a forward pass, except its arguments.

    Instead of a result of elementwise operations, their inputs are returned: compilers recompute such operations where they are
    needed. A factor of a matrix product, such as the output of an activation function, is returned even if it is elementwise:
    compilers store it for the product of the backward pass. The same holds for the arguments of a loop. Results in host memory
    are omitted.

    Args:
        forward: a traced function that returns the residuals of `jax.vjp`.
    """
    return _stored(forward, forward.outvars)


def _stored(jaxpr: Jaxpr, results: Iterable[Any]) -> list[Any]:
    """Return the shapes and dtypes of the arrays to store for some variables of a jaxpr, as in `residual_arrays`."""
    equation_of = {id(out): eqn for eqn in jaxpr.eqns for out in eqn.outvars}
    factors = _factors(jaxpr, equation_of)
    pending = list(results)
    seen = set[int]()
    arrays = []
    while pending:
        var = _source(pending.pop(), equation_of)
        eqn = equation_of.get(id(var))
        is_on_host = getattr(var.aval, "memory_space", None) == jax.memory.Space.Host
        if eqn is None or id(var) in seen or is_on_host:
            continue
        seen.add(id(var))
        if id(var) not in factors and _is_elementwise(eqn, eqn.outvars.index(var)):
            pending += [each for each in eqn.invars if not isinstance(each, Literal)]
        elif hasattr(var.aval, "dtype"):
            arrays.append(var.aval)
    return arrays


def _factors(jaxpr: Jaxpr, equation_of: EquationOf) -> set[int]:
    """Return the ids of the variables that are the left factors of matrix products, or arguments of loops.

    The left factor is assumed to depend on the batch, as in `x @ kernel`: it is the result of operations on activations.
    """
    found = set[int]()
    for eqn in jaxpr.eqns:
        if eqn.primitive.name in ("dot_general", "ragged_dot_general"):
            left, *_ = eqn.invars
            found.add(id(_source(left, equation_of)))
        if _is_loop(eqn):
            found |= {id(_source(var, equation_of)) for var in eqn.invars}
    return found


def _is_loop(eqn: JaxprEqn) -> bool:
    """Return whether an equation is a loop, or a function with a loop and its own derivative."""
    if eqn.primitive.name == "custom_vjp_call":
        return any(_is_loop(each) for each in eqn.params["call_jaxpr"].eqns)
    return eqn.primitive.name in ("scan", "while")


def _source(var: Any, equation_of: EquationOf) -> Any:
    """Follow a variable through views and conversions, back to the variable that they read."""
    while id(var) in equation_of and equation_of[id(var)].primitive.name in VIEWS:
        var = equation_of[id(var)].invars[0]
    return var


def _is_elementwise(eqn: JaxprEqn, index: int) -> bool:
    """Return whether the result of an equation at an index is computed elementwise.

    In a call, all equations that lead to the result must be elementwise.
    """
    if eqn.primitive.name in ELEMENTWISE:
        return True
    body = _body(eqn)
    return body is not None and not _stored(body, [body.outvars[index]])


def _body(eqn: JaxprEqn) -> Jaxpr | None:
    """Return the jaxpr that an equation calls; None: no call, or an unknown kind of call."""
    platforms = eqn.params.get("branches_platforms")
    if platforms:  # the accelerator branch of `jax.lax.platform_dependent`
        for names, branch in zip(platforms, eqn.params["branches"], strict=True):
            if "cpu" not in (names or ()):
                return branch.jaxpr
        return None
    if eqn.primitive.name in ("jit", "pjit", "custom_jvp_call"):
        return next(jaxprs_in_params(eqn.params), None)
    return None
