"""jaxgpt presets"""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass

from jaxgpt.cli.info import with_vocab
from jaxgpt.cli.parse import parse, print_json
from jaxgpt.presets import PRESETS, describe, preset

PROG = "jaxgpt presets"


@dataclass(frozen=True)
class Args:
    json: bool = False  # one JSON object instead of text


def run(args: Sequence[str]) -> int:
    parsed = parse(Args, args, PROG, "The presets, with what to expect of each.")
    rows = [
        {"name": name, "parameters": with_vocab(preset(name)).model.parameters} | describe(name)._asdict()
        for name in PRESETS
    ]
    if parsed.json:
        print_json({"presets": rows})
        return 0
    for row in rows:
        print(f"{row['name']}  ({row['parameters']:,} parameters)")
        print(f"    {row['what']}\n    {row['command']}\n    expect {row['expect']}\n")
    return 0
