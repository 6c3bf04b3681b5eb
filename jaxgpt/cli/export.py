"""jaxgpt export RUN DIR"""

from __future__ import annotations

from pathlib import Path

from jaxgpt.cli.output import print_result, progress
from jaxgpt.cli.parse import Checkpoint, Json
from jaxgpt.errors import UserError


def export(
    run: str,
    directory: str,
    /,
    *,
    adapter: bool = False,
    base: str = "",
    type: str = "",
    checkpoint: Checkpoint = "best",
    json: Json = False,
) -> int:
    """Convert a run and its tokenizer to a directory that transformers loads with from_pretrained.

    If DIRECTORY ends in .gguf, write a GGUF file for llama.cpp.

    jaxgpt export runs/shakespeare exported
    jaxgpt export runs/shakespeare exported --checkpoint last
    jaxgpt export runs/shakespeare model.gguf --type q8_0  # for llama.cpp
    jaxgpt export runs/lora adapter --adapter  # a PEFT adapter; without --adapter, the merged model

    Args:
        run: run to convert
        directory: directory or .gguf file to write
        adapter: write the adapters of a LoRA run as a PEFT adapter, instead of the merged model
        type: type of the matrices of a .gguf file: f32, f16, bf16, q8_0, q5_1, q5_0, q4_1 or q4_0; empty: f32
        base: name or directory of the base model to record (implies --adapter); empty: the path of the base's checkpoint
    """
    from jaxgpt.convert.gguf_export import export_gguf
    from jaxgpt.convert.models import export_model
    from jaxgpt.convert.peft import export_adapter

    is_gguf = directory.endswith(".gguf") and not (adapter or base)
    if type and not is_gguf:
        raise UserError(f"--type {type} needs a GGUF file: choose a name that ends in .gguf, or omit --type")
    with progress("exporting"):
        if adapter or base:
            done = export_adapter(run, Path(directory), checkpoint, base)
        elif is_gguf:
            done = export_gguf(run, Path(directory), type or "f32", checkpoint)
        else:
            done = export_model(run, Path(directory), checkpoint)
    facts = {
        "model": f"{run}, {done.family}, {done.parameters:,} parameters",
        "file" if is_gguf else "directory": directory,
        "supported by": ", ".join(done.engines) + (" only: see docs/models.md" if len(done.engines) == 1 else ""),
        "largest logit difference after reloading": f"{done.max_logit_change:.1e}",
    }
    return print_result(json, {"run": run, "directory": directory} | done._asdict(), facts)
