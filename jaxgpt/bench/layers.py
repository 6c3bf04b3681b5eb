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
from jaxgpt.bench.protobuf import field_values, nested_values
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
        for instruction in nested_values(module, COMPUTATIONS, INSTRUCTIONS):
            [name] = _texts(instruction, INSTRUCTION_NAME)
            for path in _texts(instruction, INSTRUCTION_METADATA, OP_NAME):
                paths[module_name, name] = path
    return paths


def _modules(xplane: bytes) -> Iterator[memoryview]:
    """Yield the messages of the compiled programs (HloModuleProto)."""
    for plane in field_values(memoryview(xplane), PLANES):
        names = [bytes(name) for name in field_values(plane, PLANE_NAME)]
        if names == [METADATA_PLANE]:
            yield from nested_values(plane, EVENT_METADATA, MAP_VALUE, STATS, BYTES_VALUE, HLO_MODULE)


def _texts(message: memoryview, *fields: int) -> list[str]:
    """Return the strings of the last of these nested fields."""
    return [bytes(value).decode() for value in nested_values(message, *fields)]
