"""jaxgpt import SRC RUN"""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import asdict, dataclass
from pathlib import Path

from jaxgpt.cli.parse import parse, print_json, split_target
from jaxgpt.config import MeshConfig, UserError

PROG = "jaxgpt import SRC RUN"


@dataclass(frozen=True)
class Args:
    revision: str = ""  # of a hub name: a commit, tag or branch; empty: the pinned one, else main
    tokenizer: str = ""  # gpt2, byte, ids, or a path; empty: the one in SRC
    json: bool = False  # one JSON object instead of text


def run(args: Sequence[str]) -> int:
    source, rest = split_target(args, PROG)
    target, flags = split_target(rest, PROG)
    parsed = parse(
        Args,
        flags,
        PROG,
        "A run directory from a model of transformers (GPT-2, Llama, Qwen3) or of nanoGPT: a folder with safetensors, "
        "or a name on the Hugging Face hub.",
    )

    from jaxgpt.parallel import use_cores

    use_cores(MeshConfig(data=1))
    from jaxgpt.convert.hub import fetch_model
    from jaxgpt.convert.models import import_model

    folder, commit = Path(source), ""
    if not folder.exists():
        folder, commit = fetch_model(source, parsed.revision)
    elif parsed.revision:
        raise UserError(f"--revision is for names on the hub, and {source} is a path")
    done = import_model(folder, Path(target), parsed.tokenizer)
    if parsed.json:
        print_json({"source": source, "commit": commit, "run": target} | asdict(done))
        return 0
    print(f"{source}{f' at {commit}' if commit else ''}: {done.family}, {done.parameters:,} parameters")
    print(f"written again and read back, its logits change by at most {done.max_logit_change:.1e}")
    print(f"run: {target}")
    return 0
