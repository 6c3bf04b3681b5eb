"""HLO text of a compiled program: its computations and their instructions."""

from __future__ import annotations

import math
import re
from collections.abc import Mapping
from typing import NamedTuple

WIDTHS = {"pred": 1, "c64": 8, "c128": 16}  # bytes per element of booleans and complex numbers

# XLA writes names with or without "%".
_COMPUTATION = re.compile(r"(?P<entry>ENTRY )?%?(?P<name>[^\s(]+) \(.*\{$")
_INSTRUCTION = re.compile(
    r"\s+(?P<root>ROOT )?%?(?P<name>[\w.-]+) = (?P<shape>.*?) (?P<opcode>[a-z][\w-]*)\((?P<rest>.*)"
)
_ARRAY = re.compile(r"\b([a-z]+\d*(?:e\d+m\d+\w*)?)\[([\d,]*)\]")
# The name of an operand is the last word before a comma or the end: `f32[8]{0} %x, /*index=1*/y)`.
_OPERAND = re.compile(r"(?P<before>^|[\s/])%?(?P<name>[\w.-]+)(?=,|\)?$)")


class Instruction(NamedTuple):
    """An instruction of a compiled program."""

    name: str
    shape: str  # text of the result's shape
    opcode: str  # operation, such as dot, fusion or all-reduce-start
    rest: str  # text after the opcode: operands and attributes
    root: bool  # whether the instruction returns the result of its computation

    @property
    def operands(self) -> list[str]:
        """Names of the operands. A constant or parameter has no operands: its text is a value."""
        if self.opcode in ("constant", "parameter"):
            return []
        operands, _, _ = self.rest.partition("), ")
        return [match["name"] for match in _OPERAND.finditer(operands)]

    @property
    def called(self) -> list[str]:
        """Names of the computations that this instruction calls."""
        names: list[str] = re.findall(r"(?:calls|to_apply|body|condition|async_\w+_body)=%?([\w.-]+)", self.rest)
        return names + re.findall(r"[\w.-]+", self.find(r"branch_computations=\{([^}]+)\}"))

    @property
    def path(self) -> str:
        """Source path, such as `jit(train)/jvp(GPT)/.../h_0/attn/attn._project/q_proj/dot_general`, or ""."""
        return self.find(r'op_name="([^"]*)"')

    def with_names(self, names: Mapping[str, str]) -> Instruction:
        """Return a copy with other names of operands; `names` maps old names to new names."""

        def renamed(match: re.Match[str]) -> str:
            return match["before"] + names.get(match["name"], match["name"])

        operands, end, attributes = self.rest.partition("), ")
        return self._replace(rest=_OPERAND.sub(renamed, operands) + end + attributes)

    def find(self, pattern: str) -> str:
        """Return the first group of a pattern's match in the operands and attributes, or ""."""
        match = re.search(pattern, self.rest)
        return match[1] if match else ""


Computation = dict[str, Instruction]


class HloModule(NamedTuple):
    """The text of a compiled program, read into computations.

    Attributes:
        computations: the computations, keyed by name.
        entry: name of the computation that the program executes.
    """

    computations: dict[str, Computation]
    entry: str


def read_computations(text: str) -> HloModule:
    """Read the computations in the text of a compiled program."""
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
    return HloModule(computations, entry)


def root_of(computation: Computation) -> Instruction | None:
    """Return the instruction that returns the result of a computation, or None."""
    return next((each for each in computation.values() if each.root), None)


def array_bytes(shape: str) -> list[float]:
    """Return the bytes of each array in the text of a shape: `[24.0, 4.0]` for `(f32[2,3]{1,0}, u32[])`."""
    sizes = []
    for kind, dims in _ARRAY.findall(shape):
        bits = re.search(r"\d+", kind)
        width = WIDTHS.get(kind, int(bits[0]) / 8 if bits else 0)
        elements = math.prod(int(d) for d in dims.split(",") if d)
        sizes.append(width * elements)
    return sizes
