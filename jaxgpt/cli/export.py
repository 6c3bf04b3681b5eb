"""jaxgpt export RUN DIR"""

from __future__ import annotations

from pathlib import Path

from jaxgpt.cli.output import print_result, progress
from jaxgpt.cli.parse import Checkpoint, Json


def export(
    run: str,
    directory: str,
    /,
    *,
    adapter: bool = False,
    base: str = "",
    checkpoint: Checkpoint = "best",
    json: Json = False,
) -> int:
    """Convert a run and its tokenizer to a directory that transformers loads with from_pretrained.

    jaxgpt export runs/shakespeare exported
    jaxgpt export runs/shakespeare exported --checkpoint last
    jaxgpt export runs/lora adapter --adapter  # a PEFT adapter; without --adapter, the merged model

    Args:
        run: run to convert
        directory: directory to write
        adapter: write the adapters of a LoRA run as a PEFT adapter, instead of the merged model
        base: name or directory of the base model to record (implies --adapter); empty: the path of the base's checkpoint
    """
    from jaxgpt.convert.models import export_model
    from jaxgpt.convert.peft import export_adapter

    with progress("exporting"):
        if adapter or base:
            done = export_adapter(run, Path(directory), checkpoint, base)
        else:
            done = export_model(run, Path(directory), checkpoint)
    facts = {
        "model": f"{run}, {done.family}, {done.parameters:,} parameters",
        "directory": directory,
        "supported by": ", ".join(done.engines) + (" only: see docs/models.md" if len(done.engines) == 1 else ""),
        "largest logit difference after reloading": f"{done.max_logit_change:.1e}",
    }
    return print_result(json, {"run": run, "directory": directory} | done._asdict(), facts)
