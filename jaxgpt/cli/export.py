"""jaxgpt export RUN DIR"""

from __future__ import annotations

from pathlib import Path
from typing import Literal

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
    dtype: Literal["float32", "bfloat16", "float16"] = "float32",
    checkpoint: Checkpoint = "best",
    json: Json = False,
) -> int:
    """Convert a run and its tokenizer to a directory that transformers loads with from_pretrained.

    jaxgpt export runs/shakespeare exported
    jaxgpt export runs/shakespeare exported --checkpoint last
    jaxgpt export runs/shakespeare exported --dtype bfloat16  # half the size
    jaxgpt export runs/lora adapter --adapter  # a PEFT adapter; without --adapter, the merged model

    Args:
        run: run to convert
        directory: directory to write
        adapter: write the adapters of a LoRA run as a PEFT adapter, instead of the merged model
        dtype: type of the model's weights in the files; the logit difference then includes the rounding
        base: name or directory of the base model to record (implies --adapter); empty: the path of the base's checkpoint
    """
    from jaxgpt.convert.models import export_model
    from jaxgpt.convert.peft import export_adapter

    if dtype != "float32" and (adapter or base):
        raise UserError(f"adapters are written in float32: omit --dtype {dtype}, or export the merged model")
    with progress("exporting"):
        if adapter or base:
            done = export_adapter(run, Path(directory), checkpoint, base)
        else:
            done = export_model(run, Path(directory), checkpoint, dtype)
    facts = {
        "model": f"{run}, {done.family}, {done.parameters:,} parameters",
        "directory": directory,
        "supported by": _supported(done.engines),
        "largest logit difference after reloading": f"{done.max_logit_change:.1e}",
    }
    return print_result(json, {"run": run, "directory": directory} | done._asdict(), facts)


def _supported(engines: tuple[str, ...]) -> str:
    """Format the programs that support a model; only transformers is run by the tests."""
    if not engines:  # an adapter
        return ""
    others = ", ".join(engines[1:])
    if not others:
        return "transformers only: see docs/models.md"
    return f"transformers; according to their source code, not run: {others}"
