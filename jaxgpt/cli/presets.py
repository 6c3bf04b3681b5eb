"""jaxgpt presets"""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass

from jaxgpt.cli.info import with_vocab
from jaxgpt.cli.parse import Command, print_json
from jaxgpt.presets import PRESETS, describe, preset

COMMAND = Command(
    "presets",
    "",
    "List the presets with their size, the command to run, and the result to expect.",
    ["jaxgpt presets", "jaxgpt presets --json", "jaxgpt train shakespeare --help  # all settings of this preset"],
)


@dataclass(frozen=True)
class Args:
    json: bool = False  # print one JSON object instead of text


def run(args: Sequence[str]) -> int:
    _, parsed = COMMAND.parse(Args, args)
    rows = [
        {"name": name, "parameters": with_vocab(preset(name)).model.parameters} | describe(name)._asdict()
        for name in PRESETS
    ]
    if parsed.json:
        print_json({"presets": rows})
        return 0
    for row in rows:
        print(f"{row['name']}  ({row['parameters']:,} parameters)")
        expect = f"    expect: {row['expect']}\n" if row["expect"] else ""
        print(f"    {row['what']}\n    {row['command']}\n{expect}")
    return 0
