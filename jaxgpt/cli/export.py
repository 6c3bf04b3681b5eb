"""jaxgpt export RUN DIR"""

from __future__ import annotations

import sys
from collections.abc import Sequence
from dataclasses import asdict, dataclass
from pathlib import Path

from jaxgpt.cli.parse import parse, print_json, split_target
from jaxgpt.config import MeshConfig

PROG = "jaxgpt export RUN DIR"


@dataclass(frozen=True)
class Args:
    checkpoint: str = "best"  # best (lowest validation loss), last, or a step
    json: bool = False  # one JSON object instead of text


def run(args: Sequence[str]) -> int:
    source, rest = split_target(args, PROG)
    target, flags = split_target(rest, PROG)
    parsed = parse(Args, flags, PROG, "A folder that transformers reads with from_pretrained, tokenizer included.")

    from jaxgpt.parallel import use_cores

    use_cores(MeshConfig(data=1))
    from jaxgpt.convert.models import export_model

    try:
        done = export_model(source, Path(target), parsed.checkpoint)
    except RuntimeError as e:
        print(f"jaxgpt: {e}", file=sys.stderr)
        return 1
    if parsed.json:
        print_json({"run": source, "directory": target} | asdict(done))
        return 0
    print(f"{source}: {done.family}, {done.parameters:,} parameters")
    print(f"read back, its logits change by at most {done.max_logit_change:.1e}")
    print(f"directory: {target}")
    return 0
