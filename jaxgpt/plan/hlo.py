"""HLO text of a compiled program: instructions, computations, number of executions, and places in the source."""

from __future__ import annotations

import math
import re
from collections import defaultdict
from collections.abc import Mapping
from typing import NamedTuple

WIDTHS = {"pred": 1, "c64": 8, "c128": 16}  # bytes per element of booleans and complex numbers
# Parts of a path that JAX adds for loops, calls, rematerialization and shards.
CONTROL = ("while", "body", "cond", "closed_call", "checkpoint", "rematted_computation", "shard_map")

_COMPUTATION = re.compile(r"(?P<entry>ENTRY )?%?(?P<name>[^\s(]+) \(.*\{$")
_INSTRUCTION = re.compile(
    r"\s+(?P<root>ROOT )?%?(?P<name>[\w.-]+) = (?P<shape>.*?) (?P<opcode>[a-z][\w-]*)\((?P<rest>.*)"
)
_ARRAY = re.compile(r"\b([a-z]+\d*(?:e\d+m\d+\w*)?)\[([\d,]*)\]")


class Instruction(NamedTuple):
    """An instruction of a compiled program."""

    name: str
    shape: str  # text of the result's shape
    opcode: str  # operation, such as dot, fusion or all-reduce-start
    rest: str  # text after the opcode: operands and attributes
    root: bool  # whether the instruction returns the result of its computation

    @property
    def operands(self) -> list[str]:
        operands, _, _ = self.rest.partition("), ")
        return re.findall(r"%([\w.-]+)", operands)

    @property
    def called(self) -> list[str]:
        """Names of the computations that this instruction calls."""
        names: list[str] = re.findall(r"(?:calls|to_apply|body|condition|async_\w+_body)=%?([\w.-]+)", self.rest)
        return names + re.findall(r"[\w.-]+", self.find(r"branch_computations=\{([^}]+)\}"))

    @property
    def path(self) -> str:
        """Source path, such as `jit(train)/jvp(GPT)/.../h_0/attn/attn._project/q_proj/dot_general`, or ""."""
        return self.find(r'op_name="([^"]*)"')

    def find(self, pattern: str) -> str:
        """Return the first group of a pattern's match in the operands and attributes, or ""."""
        match = re.search(pattern, self.rest)
        return match[1] if match else ""


Computation = dict[str, Instruction]


def read_computations(text: str) -> tuple[dict[str, Computation], str]:
    """Return the computations of a module, keyed by name, and the name of the entry computation."""
    computations: dict[str, Computation] = {}
    entry = ""
    body: Computation = {}  # instructions after the last header
    for line in text.splitlines():
        header = _COMPUTATION.match(line)
        if header:
            body = {}
            computations[header["name"]] = body
            if header["entry"]:
                entry = header["name"]
            continue
        match = _INSTRUCTION.match(line)
        if match:
            body[match["name"]] = Instruction(
                name=match["name"],
                shape=match["shape"],
                opcode=match["opcode"],
                rest=match["rest"],
                root=bool(match["root"]),
            )
    return computations, entry


def count_executions(computations: dict[str, Computation], entry: str) -> dict[str, int]:
    """Count the executions of each computation: its callers' executions, times the trip count of a loop.

    A loop with an unknown trip count counts as one iteration, and every branch of a conditional counts as executed.
    """
    executions = defaultdict[str, int](int)
    pending = [(entry, 1)]
    while pending:
        name, n = pending.pop()
        executions[name] += n
        for instruction in computations.get(name, {}).values():
            # An asynchronous call may name its computation again where it ends.
            if instruction.opcode.endswith(("-update", "-done")):
                continue
            trips = _trip_count(instruction, computations) if instruction.opcode == "while" else 1
            pending += [(other, n * trips) for other in instruction.called]
    return executions


def array_bytes(shape: str) -> list[float]:
    """Return the bytes of each array in the text of a shape: 24 and 4 for `(f32[2,3]{1,0}, u32[])`."""
    sizes = []
    for kind, dims in _ARRAY.findall(shape):
        bits = re.search(r"\d+", kind)
        width = WIDTHS.get(kind, int(bits[0]) / 8 if bits else 0)
        elements = math.prod(int(d) for d in dims.split(",") if d)
        sizes.append(width * elements)
    return sizes


def scopes_of(path: str) -> list[str]:
    """Return the modules and methods in a source path, from the outermost, without the transformations of JAX.

    The compiler joins the paths of merged instructions: `a/b/mul;a/c/add` and, with a common beginning, `a/(b/mul:c/add)`.
    The result is the scopes of the first path, or of the common beginning: `["a", "b"]` and `["a"]`.
    """
    first, _, _ = path.partition(";")
    common, joined, _ = first.partition("/(")
    scopes = common.split("/")
    if not joined:
        scopes.pop()  # the operation
    return [scope for scope in scopes if re.fullmatch(r"[\w.]+", scope) and scope not in CONTROL]


def site_of(path: str) -> str:
    """Shorten a source path to the modules of a layer, without the number of the block: `h/attn/q_proj, backward`."""
    names = scopes_of(path)
    layer = next((i for i, name in enumerate(names) if re.fullmatch(r"h(_\d+)?", name)), None)
    if layer is not None:
        inner = [name for name in names[layer + 1 :] if "." not in name]
        names = ["/".join(["h", *inner])]
    if not names:
        return ""
    return f"{names[-1]}, backward" if "transpose(" in path else names[-1]


def _trip_count(loop: Instruction, computations: dict[str, Computation]) -> int:
    """Return the trip count of a loop; 1 if unknown.

    The count is the compiler's annotation, or derived from `i < end` and `i + step`, assuming that i starts at 0.
    """
    known = loop.find(r'known_trip_count[^}]*?"?n"?[:=]"?(\d+)')
    if known:
        return int(known)

    condition = _inlined(computations.get(loop.find(r"condition=%?([\w.-]+)"), {}), computations)
    body = _inlined(computations.get(loop.find(r"body=%?([\w.-]+)"), {}), computations)
    less = root_of(condition)
    results = root_of(body)
    if less is None or results is None or "direction=LT" not in less.rest:
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
                rest = _renamed(inner.rest, names)
                result[name] = inner._replace(name=name, rest=rest, root=inner.root and outer.root)
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


def _renamed(rest: str, names: Mapping[str, str]) -> str:
    """Replace the names of instructions in the operands of an instruction."""
    return re.sub(r"%([\w.-]+)", lambda found: "%" + names.get(found[1], found[1]), rest)


def root_of(computation: Computation) -> Instruction | None:
    """Return the instruction that returns the result of a computation, or None."""
    return next((each for each in computation.values() if each.root), None)


def _constant(body: Computation, name: str) -> int:
    """Return the value of an integer constant, or 0 for other instructions."""
    if name not in body or body[name].opcode != "constant":
        return 0
    value = re.match(r"-?\d+(?=\))", body[name].rest)
    return int(value[0]) if value else 0
