"""jaxgpt import SOURCE OUT"""

from __future__ import annotations

from pathlib import Path

from jaxgpt.cli.console import progress
from jaxgpt.cli.options import Json
from jaxgpt.cli.output import print_result
from jaxgpt.errors import UserError, plural


def import_(
    source: str,
    out: str,
    /,
    *,
    revision: str = "",
    init_from: str = "",
    tokenizer: str = "",
    accept_option: tuple[str, ...] = (),
    json: Json = False,
) -> int:
    """Convert a transformers or nanoGPT model, or a GGUF file, to a run.

    Supported families: GPT-2, Llama, Mistral, Qwen2, Qwen3, GPT-NeoX, Gemma 3, OLMo 2,
    Mixtral, Qwen3-MoE and OLMoE, and the text model of multimodal Gemma 3, Mistral 3
    and LLaVA. With --init-from, SOURCE is a PEFT adapter.

    jaxgpt import openai-community/gpt2 runs/gpt2
    jaxgpt import ~/models/llama runs/llama
    jaxgpt import SOURCE OUT --tokenizer gpt2  # if SOURCE has no tokenizer
    jaxgpt import ADAPTER runs/adapted --init-from runs/llama

    Args:
        source: directory with safetensors files, a .gguf file, or the name of a model on the Hugging Face Hub
        out: run directory to write
        revision: commit, tag or branch of a model on the Hub; empty: for gpt2 a pinned commit, otherwise main
        init_from: run of the base model, or RUN/checkpoints/STEP, if SOURCE is an adapter
        tokenizer: gpt2, byte, ids, or a path; empty: the tokenizer in SOURCE
        accept_option: unsupported options of config.json or a GGUF file to ignore; the error lists them
    """
    from jaxgpt.checkpoint.new_path import check_new_run
    from jaxgpt.convert.hub_models import fetch_model
    from jaxgpt.convert.import_model import import_model
    from jaxgpt.convert.peft.adapters import import_adapter
    from jaxgpt.convert.peft.config import CONFIG

    check_new_run(Path(out))  # before a download
    directory = Path(source)
    commit = ""
    if not directory.exists():
        with progress("downloading"):
            directory, commit = fetch_model(source, revision)
    elif revision:
        raise UserError(f"--revision applies to models on the Hub, but {source} is a local path; omit --revision")

    is_adapter = (directory / CONFIG).is_file()
    if is_adapter and not init_from:
        raise UserError(f"{source} is a LoRA adapter: pass the run of its base model with --init-from RUN")
    if init_from and not is_adapter:
        raise UserError(f"--init-from applies to LoRA adapters, but {source} has no {CONFIG}: omit --init-from")
    if is_adapter and (tokenizer or accept_option):
        raise UserError("an adapter has the settings of its base: omit --tokenizer and --accept-option")

    with progress("importing"):
        if is_adapter:
            imported = import_adapter(directory, Path(out), init_from)
        else:
            imported = import_model(directory, Path(out), tokenizer, accept_option)

    name = f"{source} at {commit}" if commit else source
    skipped = ""
    if imported.skipped:
        skipped = f"{plural(imported.skipped, 'tensor')} that the text model does not use, such as a vision tower"
    facts = {
        "model": f"{name}, {imported.family}, {imported.parameters:,} parameters",
        "run": out,
        "skipped": skipped,
        "note": imported.note,
    }
    return print_result(json, {"source": source, "commit": commit, "run": out} | imported._asdict(), facts)
