"""jaxgpt presets"""

from __future__ import annotations

from jaxgpt.cli.options import Json
from jaxgpt.cli.output import print_result
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
    rows = []
    lines = []
    for name, entry in PRESETS.items():
        parameters = size(name)
        run = command(name)
        rows.append(
            {"name": name, "parameters": parameters, "about": entry.about, "command": run, "expect": entry.expect}
        )

        shown = f"{parameters:,} parameters" if parameters else BASE
        lines += [f"{name}  ({shown})", f"    {entry.about}", f"    {run}"]
        if entry.expect:
            lines.append(f"    expect: {entry.expect}")
        lines.append("")
    return print_result(json, {"presets": rows}, "\n".join(lines))


def size(name: str) -> int | None:
    """Return the number of parameters of a preset; None for `finetune`, which uses the --init-from model."""
    if name == "finetune":
        return None
    return count_parameters(with_vocab(preset(name)).model)
