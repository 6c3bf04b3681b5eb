"""Classify the instructions of a compiled training step by kind of work."""

from __future__ import annotations

import re
from collections.abc import Collection, Mapping
from typing import NamedTuple

from jaxgpt.plan.collectives import COLLECTIVES
from jaxgpt.plan.hlo import Computation, Instruction, read_computations

WORK = {
    "products": "matrix products with weights: projections, MLP, head",
    "attention": "norms and RoPE of queries and keys, scores, softmax, mixing",
    "elementwise": "norms, activations, residuals, embeddings, loss, copies",
    "optimizer": "gradient norm, update, EMA",
    "communication": "collectives, including waiting for the slowest device",
}
NEAR = 2  # operand edges between a product and its neighbors: an instruction without a path, such as a copy, may be between


def instruction_kinds(program: str) -> dict[str, str]:
    """Classify the instructions of a compiled training step (`compiled.as_text()`) by the kinds of `WORK`.

    A fusion has the kind of its first matrix product; without a product, the kind of its first source path. Paths
    of the differentiated part contain `jvp`; other paths count as optimizer.
    """
    computations, _ = read_computations(program)
    kinds = {}
    for body in computations.values():
        work = {name: _work_of(instruction, computations) for name, instruction in body.items()}
        for name, instruction in body.items():
            # Loops over steps and microbatches have no kind: their time outside their instructions counts as idle.
            if instruction.opcode == "while" and "jvp(" not in work[name].path:
                continue
            kinds[name] = _kind(instruction.opcode, work[name].is_product, _paths(name, body, work))
    return kinds


class _Work(NamedTuple):
    """The work of an instruction.

    Attributes:
        path: source path. A fusion has the path of its first product; without a product, its own path, or the path of its
            first instruction with a path. "": dropped by the compiler.
        is_product: whether it is a product, or contains one.
    """

    path: str
    is_product: bool


def _work_of(instruction: Instruction, computations: Mapping[str, Computation]) -> _Work:
    """Return what an instruction computes, including the instructions of a fusion or call."""
    fused = [instruction]
    if instruction.opcode in ("fusion", "call"):
        for name in instruction.called:
            fused += computations.get(name, {}).values()
    products = [each for each in fused if _is_product(each)]
    path = next((each.path for each in products or fused if each.path), "")
    return _Work(path, is_product=bool(products))


def _paths(name: str, body: Computation, work: Mapping[str, _Work]) -> list[str]:
    """Return the source paths that classify an instruction: its own path; for a product without a path, its neighbors' paths.

    The CPU compiler splits the products of attention and drops their source paths.
    """
    if work[name].path or not work[name].is_product:
        return [work[name].path]
    with_path = {each for each in body if work[each].path}
    return [work[each].path for each in _near(name, body, with_path)]


def _is_product(instruction: Instruction) -> bool:
    """Return whether an instruction is a product with a matrix, by the compiler or by a library."""
    if instruction.opcode == "dot":
        # The gradient of a bias, a sum over tokens, is also compiled to a dot, with a vector of ones.
        return not re.match(r"\w+\[\d+,1\]", instruction.shape)
    if instruction.opcode == "custom-call":  # a product of a library
        return "dot_general" in instruction.path or "__cublas" in instruction.rest
    return instruction.opcode == "convolution"


def _near(name: str, body: Computation, with_path: Collection[str]) -> set[str]:
    """Return an instruction, its operands and users, and the neighbors of each neighbor without a path."""
    near = {name}
    without_path = {name}
    for _ in range(NEAR):
        operands = {each for other in without_path for each in body[other].operands if each in body}
        users = {other for other, each in body.items() if not without_path.isdisjoint(each.operands)}
        without_path = (operands | users).difference(with_path) - near
        near |= operands | users
    return near


def _kind(opcode: str, is_product: bool, paths: Collection[str]) -> str:
    """Return the kind of an instruction, one of `WORK`; the first that applies, in the order of the tests.

    All operands and users of a product in the differentiated part are in that part too. So a single path outside, without
    `jvp`, shows that a product without a path belongs to the optimizer.
    """
    if opcode.removesuffix("-start").removesuffix("-done") in COLLECTIVES:
        return "communication"
    if any("/attn/" in path and "_proj" not in path for path in paths):
        return "attention"
    if any(path.startswith("jit(") and "jvp(" not in path for path in paths):
        return "optimizer"
    return "products" if is_product else "elementwise"
