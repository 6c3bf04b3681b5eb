"""jaxgpt replay DIR [--steps N]"""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass
from pathlib import Path

from jaxgpt.cli.parse import parse, print_json, split_target
from jaxgpt.config import MeshConfig, UserError

PROG = "jaxgpt replay DIR"


@dataclass(frozen=True)
class Args:
    steps: int = 0  # updates to replay; 0: all that were recorded
    json: bool = False  # one JSON object instead of text


def run(args: Sequence[str]) -> int:
    target, flags = split_target(args, PROG)
    parsed = parse(
        Args,
        flags,
        PROG,
        "Run another trainer's recipe (recipe.json) from its initial weights (init.safetensors) on the very batches "
        "that it drew (offsets.npz), and print a row for each of its evaluations.",
    )
    if parsed.steps < 0:
        raise UserError(f"steps must be at least 0 (all), not {parsed.steps}")

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
