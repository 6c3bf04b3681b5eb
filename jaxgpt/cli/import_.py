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
    "Convert a transformers model (GPT-2, Llama, Qwen3), a nanoGPT model or a GGUF file (Llama) to a run. SOURCE is a\n"
    "directory with safetensors files, a .gguf file, or the name of a model on the Hugging Face Hub.",
    [
        "jaxgpt import openai-community/gpt2 runs/gpt2",
        "jaxgpt import ~/models/llama runs/llama",
        "jaxgpt import SOURCE RUN --tokenizer gpt2  # if SOURCE has no tokenizer",
    ],
)


@dataclass(frozen=True)
class Args:
    revision: str = ""  # commit, tag or branch of a model on the Hub; empty: the pinned commit, or main
    tokenizer: str = ""  # gpt2, byte, ids, or a path; empty: the tokenizer in SOURCE
    accept_option: tuple[str, ...] = ()  # unknown options of config.json to ignore; the error lists them
    json: bool = False  # print one JSON object instead of text


def run(args: Sequence[str]) -> int:
    [source, target], parsed = COMMAND.parse(Args, args)

    from jaxgpt.convert.hub import fetch_model

    folder, commit = Path(source), ""
    if not folder.exists():
        with progress("downloading"):
            folder, commit = fetch_model(source, parsed.revision)
    elif parsed.revision:
        raise UserError(f"--revision applies to models on the Hub, but {source} is a local path; leave out --revision")

    from jaxgpt.parallel import use_cores

    use_cores(MeshConfig(data=1))
    from jaxgpt.convert.models import import_model

    with progress("importing"):
        done = import_model(folder, Path(target), parsed.tokenizer, parsed.accept_option)
    if parsed.json:
        print_json({"source": source, "commit": commit, "run": target} | asdict(done))
        return 0
    print(f"{source}{f' at {commit}' if commit else ''}: {done.family}, {done.parameters:,} parameters")
    print(f"maximum difference in logits after exporting it and reading it back: {done.max_logit_change:.1e}")
    print(f"run: {target}")
    return 0
