"""Name the layers in a trace for Perfetto: the names of instructions, such as `dot.108`, do not show their layer.

The profiler stores the compiled programs in the xplane file next to the trace, as protobuf messages. The path of an
instruction is the name scope in which JAX traced it: `.../transpose(jvp(GPT))/GPT.blocks/h_0/attn/q_proj/dot_general`.

Source: xplane.proto and hlo.proto of OpenXLA.
"""

from __future__ import annotations

import gzip
import json
from collections.abc import Iterator
from pathlib import Path

from jaxgpt.atomic import write_atomically
from jaxgpt.plan.source_paths import scopes_of

# Numbers of protobuf fields.
PLANES = 1  # field of XSpace
PLANE_NAME = 2
EVENT_METADATA = 4  # field of XPlane: a map, with the value in field 2
MAP_VALUE = 2
STATS = 5  # field of XEventMetadata
BYTES_VALUE = 6  # field of XStat
HLO_MODULE = 1  # field of HloProto
MODULE_NAME = 1
COMPUTATIONS = 3  # field of HloModuleProto
INSTRUCTIONS = 2  # field of HloComputationProto
INSTRUCTION_NAME = 1
INSTRUCTION_METADATA = 7
OP_NAME = 2  # field of OpMetadata
METADATA_PLANE = b"/host:metadata"

# Kinds of protobuf values, and the bytes of the kinds with a fixed size.
VARINT = 0
LENGTH = 2  # strings, bytes and messages, after their length
SIZES = {1: 8, 5: 4}


def name_layers(trace: Path, xplane: Path) -> None:
    """Rewrite a trace for Perfetto: prefix the names of instructions with their layers, and add their source paths."""
    paths = instruction_paths(xplane.read_bytes())
    content = json.loads(gzip.decompress(trace.read_bytes()))
    for event in content["traceEvents"]:
        values = event.get("args", {})
        path = paths.get((values.get("hlo_module", ""), values.get("hlo_op", "")), "")
        layer = layer_of(path)
        if path:
            values["path"] = path
        if layer:
            event["name"] = f"{layer} {event['name']}"
    write_atomically(trace, gzip.compress(json.dumps(content).encode()))


def layer_of(path: str) -> str:
    """Return the layer in a path, as in "h_0/attn/q_proj" or "h_0/attn/q_proj backward"; "" outside the layers."""
    # Names with a dot are methods, such as attn._project.
    layer = "/".join(scope for scope in scopes_of(path) if "." not in scope)
    is_backward = "transpose(" in path
    return f"{layer} backward" if layer and is_backward else layer


def instruction_paths(xplane: bytes) -> dict[tuple[str, str], str]:
    """Return the path of each instruction in an xplane file, keyed by the names of its module and of the instruction."""
    paths = {}
    for module in _modules(xplane):
        [module_name] = _texts(module, MODULE_NAME)
        for instruction in _follow(module, COMPUTATIONS, INSTRUCTIONS):
            [name] = _texts(instruction, INSTRUCTION_NAME)
            for path in _texts(instruction, INSTRUCTION_METADATA, OP_NAME):
                paths[module_name, name] = path
    return paths


def _modules(xplane: bytes) -> Iterator[memoryview]:
    """Yield the messages of the compiled programs (HloModuleProto)."""
    for plane in _all(memoryview(xplane), PLANES):
        names = [bytes(name) for name in _all(plane, PLANE_NAME)]
        if names == [METADATA_PLANE]:
            yield from _follow(plane, EVENT_METADATA, MAP_VALUE, STATS, BYTES_VALUE, HLO_MODULE)


def _texts(message: memoryview, *fields: int) -> list[str]:
    """Return the strings of the last of these nested fields."""
    return [bytes(value).decode() for value in _follow(message, *fields)]


def _follow(message: memoryview, *fields: int) -> Iterator[memoryview]:
    """Yield the values of the last of these nested fields: each value of a field is a message with the next field."""
    if not fields:
        yield message
        return
    first, *others = fields
    for value in _all(message, first):
        yield from _follow(value, *others)


def _all(message: memoryview, wanted: int) -> Iterator[memoryview]:
    """Yield the values of a field of a message, which must be strings, bytes or messages."""
    at = 0
    while at < len(message):
        key, at = _varint(message, at)
        number = key >> 3
        kind = key & 7
        if kind == VARINT:
            _, at = _varint(message, at)
        elif kind == LENGTH:
            size, at = _varint(message, at)
            if number == wanted:
                yield message[at : at + size]
            at += size
        else:
            at += SIZES[kind]


def _varint(message: memoryview, at: int) -> tuple[int, int]:
    """Decode an integer in groups of 7 bits, the lowest first; return it and the index after it."""
    number = 0
    shift = 0
    while True:
        byte = message[at]
        at += 1
        number |= (byte & 127) << shift
        shift += 7
        if byte < 128:
            return number, at
