"""jaxgpt presets"""

from __future__ import annotations

from jaxgpt.cli.output import print_json
from jaxgpt.cli.parse import Json
from jaxgpt.cli.settings import with_vocab
from jaxgpt.presets import PRESETS, command, preset

BASE = "parameters of the run that --init-from names"


def presets(*, json: Json = False) -> int:
    """List the presets with their size, the command to run, and the expected result.

    jaxgpt presets
    jaxgpt presets --json
    jaxgpt train shakespeare --help  # all settings of this preset
    """
    rows = [
        {"name": name, "parameters": size(name), "about": it.about, "command": command(name), "expect": it.expect}
        for name, it in PRESETS.items()
    ]
    if json:
        print_json({"presets": rows})
        return 0
    for row in rows:
        parameters = f"{row['parameters']:,} parameters" if row["parameters"] else BASE
        print(f"{row['name']}  ({parameters})\n    {row['about']}\n    {row['command']}")
        print(f"    expect: {row['expect']}\n" if row["expect"] else "")
    return 0


def size(name: str) -> int | None:
    """Return the number of parameters of a preset; None for `finetune`, which trains the model of a different run."""
    return None if name == "finetune" else with_vocab(preset(name)).model.parameters
