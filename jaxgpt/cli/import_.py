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
    "Convert a transformers model (GPT-2, Llama, Mistral, Qwen2, Qwen3, GPT-NeoX, Gemma 3, OLMo 2), a nanoGPT model or a\n"
    "GGUF file (Llama) to a run. SOURCE is a directory with safetensors files, a .gguf file, or the name of a model on the\n"
    "Hugging Face Hub; with --init-from, a directory with a LoRA adapter of PEFT.",
    [
        "jaxgpt import openai-community/gpt2 runs/gpt2",
        "jaxgpt import ~/models/llama runs/llama",
        "jaxgpt import SOURCE RUN --tokenizer gpt2  # if SOURCE has no tokenizer",
        "jaxgpt import ADAPTER runs/adapted --init-from runs/llama",
    ],
)


@dataclass(frozen=True)
class Args:
    revision: str = ""  # commit, tag or branch of a model on the Hub; empty: the pinned commit, or main
    init_from: str = ""  # run of the base model, or RUN/checkpoints/STEP, if SOURCE is a LoRA adapter of PEFT
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
    from jaxgpt.convert.peft import CONFIG, import_adapter

    adapter = (folder / CONFIG).is_file()
    if adapter and not parsed.init_from:
        raise UserError(f"{source} is a LoRA adapter: name the run of its base model with --init-from RUN")
    if parsed.init_from and not adapter:
        raise UserError(f"--init-from is for LoRA adapters, and {source} has no {CONFIG}: leave out --init-from")
    if adapter and (parsed.tokenizer or parsed.accept_option):
        raise UserError(
            "--tokenizer and --accept-option do not apply to an adapter, which has the tokenizer of its base"
        )
    with progress("importing"):
        if adapter:
            done = import_adapter(folder, Path(target), parsed.init_from)
        else:
            done = import_model(folder, Path(target), parsed.tokenizer, parsed.accept_option)
    if parsed.json:
        print_json({"source": source, "commit": commit, "run": target} | asdict(done))
        return 0
    print(f"{source}{f' at {commit}' if commit else ''}: {done.family}, {done.parameters:,} parameters")
    print(f"largest difference in logits after exporting the run and importing it again: {done.max_logit_change:.1e}")
    print(f"run: {target}")
    return 0
