"""Classify the instructions of a compiled training step by kind of work.

XLA records a source path for most instructions, such as `jit(train)/jvp(GPT)/.../h_0/attn/attn._project/q_proj/dot_general`.
The kind is guessed from strings in this path, from the operation, and from the paths of neighboring instructions. A rename
of a module or of a projection changes the kinds.
"""

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
NEAR = 2  # maximum distance of a neighbor, in operand edges: one instruction without a path, such as a copy, may be between


def instruction_kinds(program: str) -> dict[str, str]:
    """Classify the instructions of a compiled training step (`compiled.as_text()`) by the kinds of `WORK`.

    A fusion has the kind of its first matrix product; without a product, the kind of its first source path. The kind is the
    first that applies:

    - communication: a collective
    - attention: a path in a module `attn`, but not in a projection
    - optimizer: a path from the train step, outside the differentiated part
    - products: a matrix product
    - elementwise: all other instructions
    """
    computations, _ = read_computations(program)
    kinds = {}
    for body in computations.values():
        work = {name: _work_of(instruction, computations) for name, instruction in body.items()}
        for name, instruction in body.items():
            own = work[name]
            # Loops over steps and microbatches have no kind: their time outside their instructions counts as idle.
            if instruction.opcode == "while" and "jvp(" not in own.path:
                continue
            paths = [own.path]
            if own.is_product and not own.path:
                # The CPU compiler splits the products of attention and drops their source paths.
                paths = _neighbor_paths(name, body, work)
            kinds[name] = _kind(instruction.opcode, own.is_product, paths)
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


def _is_product(instruction: Instruction) -> bool:
    """Return whether an instruction is a product with a matrix, in compiled code or by a library."""
    if instruction.opcode == "dot":
        # The gradient of a bias, a sum over tokens, is also compiled to a dot, with a vector of ones.
        return not re.match(r"\w+\[\d+,1\]", instruction.shape)
    if instruction.opcode == "custom-call":  # a product of a library
        return "dot_general" in instruction.path or "__cublas" in instruction.rest
    return instruction.opcode == "convolution"


def _neighbor_paths(name: str, body: Computation, work: Mapping[str, _Work]) -> list[str]:
    """Return the source paths of an instruction's neighbors, its operands and users.

    A neighbor without a path is replaced by its own neighbors.
    """
    paths = []
    seen = {name}
    without_path = {name}
    for _ in range(NEAR):
        neighbors = _operands_and_users(without_path, body) - seen
        seen |= neighbors
        paths += [work[neighbor].path for neighbor in neighbors if work[neighbor].path]
        without_path = {neighbor for neighbor in neighbors if not work[neighbor].path}
    return paths


def _operands_and_users(names: Collection[str], body: Computation) -> set[str]:
    """Return the operands of some instructions, and the instructions that use their results."""
    found: set[str] = set()
    for name in names:
        found.update(operand for operand in body[name].operands if operand in body)
    for user, instruction in body.items():
        if not set(names).isdisjoint(instruction.operands):
            found.add(user)
    return found


def _kind(opcode: str, is_product: bool, paths: Collection[str]) -> str:
    """Return the kind of an instruction, one of `WORK`.

    Args:
        opcode: operation of the instruction.
        is_product: whether it is a matrix product.
        paths: its source path, or the paths of its neighbors. A neighbor in attention or the optimizer decides: the neighbors
            of other products are in the differentiated part, outside attention.
    """
    if opcode.removesuffix("-start").removesuffix("-done") in COLLECTIVES:
        return "communication"
    if any(_in_attention(path) for path in paths):
        return "attention"
    if any(_in_optimizer(path) for path in paths):
        return "optimizer"
    return "products" if is_product else "elementwise"


def _in_attention(path: str) -> bool:
    """Return whether a source path is in an attention module, but not in one of its projections."""
    return "/attn/" in path and "_proj" not in path


def _in_optimizer(path: str) -> bool:
    """Return whether a source path of a train step is outside its differentiated part, where all paths contain `jvp`."""
    return path.startswith("jit(") and "jvp(" not in path
