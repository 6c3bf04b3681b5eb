"""jaxgpt presets"""

from __future__ import annotations

from jaxgpt.cli.output import print_result
from jaxgpt.cli.parse import Json
from jaxgpt.cli.settings import with_vocab
from jaxgpt.model.params import count_parameters
from jaxgpt.presets import PRESETS, command, preset

BASE = "size of the --init-from model"


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
    text = []
    for row in rows:
        parameters = f"{row['parameters']:,} parameters" if row["parameters"] else BASE
        expect = f"\n    expect: {row['expect']}" if row["expect"] else ""
        text.append(f"{row['name']}  ({parameters})\n    {row['about']}\n    {row['command']}{expect}\n")
    return print_result(json, {"presets": rows}, "\n".join(text))


def size(name: str) -> int | None:
    """Return the number of parameters of a preset; None for `finetune`, which uses the --init-from model."""
    if name == "finetune":
        return None
    return count_parameters(with_vocab(preset(name)).model)
