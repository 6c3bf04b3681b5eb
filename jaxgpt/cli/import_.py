"""jaxgpt import SOURCE RUN"""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import asdict, dataclass
from pathlib import Path

from jaxgpt.cli.parse import Command, print_json
from jaxgpt.cli.progress import progress
from jaxgpt.config import MeshConfig, UserError

COMMAND = Command(
    "import",
    "SOURCE RUN",
    "Make a run directory from a transformers model (GPT-2, Llama, Qwen3) or a nanoGPT one. SOURCE is a folder with\n"
    "safetensors, or a name on the Hugging Face hub.",
    [
        "jaxgpt import openai-community/gpt2 runs/gpt2",
        "jaxgpt import ~/models/llama runs/llama",
        "jaxgpt import SOURCE RUN --tokenizer gpt2  # for a folder without a tokenizer",
    ],
)


@dataclass(frozen=True)
class Args:
    revision: str = ""  # commit, tag or branch of a hub model; empty: the pinned commit, or main
    tokenizer: str = ""  # gpt2, byte, ids, or a path; empty: the tokenizer in SOURCE
    json: bool = False  # print one JSON object instead of text


def run(args: Sequence[str]) -> int:
    [source, target], parsed = COMMAND.parse(Args, args)

    from jaxgpt.parallel import use_cores

    use_cores(MeshConfig(data=1))
    from jaxgpt.convert.hub import fetch_model
    from jaxgpt.convert.models import import_model

    folder, commit = Path(source), ""
    if not folder.exists():
        with progress("downloading"):
            folder, commit = fetch_model(source, parsed.revision)
    elif parsed.revision:
        raise UserError(f"--revision is for models on the hub, and {source} is a path")
    with progress("importing"):
        done = import_model(folder, Path(target), parsed.tokenizer)
    if parsed.json:
        print_json({"source": source, "commit": commit, "run": target} | asdict(done))
        return 0
    print(f"{source}{f' at {commit}' if commit else ''}: {done.family}, {done.parameters:,} parameters")
    print(f"exported and read back, its logits change by at most {done.max_logit_change:.1e}")
    print(f"run: {target}")
    return 0
