"""jaxgpt replay DIR [--steps N]"""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass
from pathlib import Path

from jaxgpt.cli.parse import Command, print_json
from jaxgpt.config import MeshConfig, UserError

COMMAND = Command(
    "replay",
    "DIR",
    "Replay a training run recorded from another trainer, with the same settings (recipe.json), initial weights\n"
    "(init.safetensors) and batches (offsets.npz). Prints the losses at each recorded evaluation.",
    ["jaxgpt replay recording", "jaxgpt replay recording --steps 100", "jaxgpt replay recording --json"],
)


@dataclass(frozen=True)
class Args:
    steps: int = 0  # steps to replay; 0: all recorded steps
    json: bool = False  # print one JSON object instead of text


def run(args: Sequence[str]) -> int:
    [target], parsed = COMMAND.parse(Args, args)
    if parsed.steps < 0:
        raise UserError(f"--steps must be at least 0 (all), not {parsed.steps}")

    from jaxgpt.parallel import use_cores

    use_cores(MeshConfig())
    from jaxgpt.convert.replay import open_recording, replay

    recording = open_recording(Path(target), parsed.steps)
    rows = []
    if not parsed.json:
        print(" step   train     val")
    for row in replay(recording):
        rows.append(row)
        if not parsed.json:
            print(f"{row['step']:>5}  {row['train']:.4f}  {row['val']:.4f}", flush=True)
    if parsed.json:
        print_json({"recording": target, "rows": rows})
    return 0
