"""jaxgpt export RUN DIR"""

from __future__ import annotations

import sys
from collections.abc import Sequence
from dataclasses import asdict, dataclass
from pathlib import Path

from jaxgpt.cli.parse import Command, print_json
from jaxgpt.cli.progress import progress
from jaxgpt.config import MeshConfig

COMMAND = Command(
    "export",
    "RUN DIR",
    "Convert a run and its tokenizer to a directory that transformers loads with from_pretrained.",
    [
        "jaxgpt export runs/shakespeare exported",
        "jaxgpt export runs/shakespeare exported --checkpoint last",
        "jaxgpt export runs/lora adapter --adapter  # a PEFT adapter; without --adapter, the merged model",
    ],
)


@dataclass(frozen=True)
class Args:
    adapter: bool = False  # write the adapters of a LoRA run for PEFT, without their base, instead of the merged model
    checkpoint: str = "best"  # checkpoint to load: best (lowest validation loss), last, or a step
    json: bool = False  # print one JSON object instead of text


def run(args: Sequence[str]) -> int:
    [source, target], parsed = COMMAND.parse(Args, args)

    from jaxgpt.parallel import use_cores

    use_cores(MeshConfig(data=1))
    from jaxgpt.convert.models import export_model
    from jaxgpt.convert.peft import export_adapter

    try:
        with progress("exporting"):
            done = (export_adapter if parsed.adapter else export_model)(source, Path(target), parsed.checkpoint)
    except RuntimeError as e:
        print(f"jaxgpt: {e}", file=sys.stderr)
        return 1
    if parsed.json:
        print_json({"run": source, "directory": target} | asdict(done))
        return 0
    print(f"{source}: {done.family}, {done.parameters:,} parameters")
    print(f"largest difference in logits after reading it back: {done.max_logit_change:.1e}")
    print(f"directory: {target}")
    return 0
