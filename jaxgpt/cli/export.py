"""jaxgpt export RUN DIR"""

from __future__ import annotations

import re
from collections.abc import Mapping
from pathlib import Path
from typing import Annotated, Literal

from cyclopts import Parameter

from jaxgpt.cli.options import Checkpoint, Json
from jaxgpt.cli.output import print_result, progress
from jaxgpt.errors import UserError, short_repr

SHARD_SIZE = "5GB"
UNITS = {"KB": 10**3, "MB": 10**6, "GB": 10**9}  # bytes of the units of sizes of files


def export(
    run: str,
    directory: str,
    /,
    *,
    adapter: bool = False,
    base: str = "",
    license: str = "",
    shard_size: str = SHARD_SIZE,
    push: str = "",
    public: Annotated[bool, Parameter(negative_bool=())] = False,
    dtype: Literal["float32", "bfloat16", "float16"] = "float32",
    type: str = "",
    checkpoint: Checkpoint = "best",
    json: Json = False,
) -> int:
    """Convert a run and its tokenizer to a directory that transformers loads with from_pretrained.

    If DIRECTORY ends in .gguf, write a GGUF file for llama.cpp.

    jaxgpt export runs/shakespeare exported
    jaxgpt export runs/shakespeare exported --checkpoint last
    jaxgpt export runs/shakespeare exported --dtype bfloat16  # half the size
    jaxgpt export runs/llama exported --license apache-2.0 --push me/model  # upload it to the Hugging Face Hub
    jaxgpt export runs/llama model.gguf --type q8_0  # for llama.cpp
    jaxgpt export runs/lora adapter --adapter  # a PEFT adapter; without --adapter, the merged model

    Args:
        run: run to convert
        directory: directory or .gguf file to write
        adapter: write the adapters of a LoRA run as a PEFT adapter, instead of the merged model
        dtype: type of the model's weights in a directory; the printed logit difference includes the rounding
        type: type of the matrices of a .gguf file: f32, f16, bf16, q8_0, q5_1, q5_0, q4_1 or q4_0; empty: f32
        base: name or directory of the base model to record (implies --adapter); empty: the path of the base's checkpoint
        license: license for the model card, such as apache-2.0; empty: license of the imported model, otherwise unknown
        shard_size: maximum size of a file of weights in a directory, with KB, MB or GB
        push: upload the directory to this repository of the Hugging Face Hub, OWNER/NAME, as one commit
        public: make a new repository of --push public; otherwise, it is private
    """
    from jaxgpt.convert.card import check_license
    from jaxgpt.convert.files import is_gguf
    from jaxgpt.convert.gguf_export import export_gguf
    from jaxgpt.convert.models import export_model
    from jaxgpt.convert.peft import export_adapter
    from jaxgpt.hub import check_upload

    # Check the options before the work.
    is_adapter = adapter or bool(base)
    to_gguf = is_gguf(Path(directory))
    _check_format(directory, is_adapter, to_gguf, dtype, type)
    if shard_size != SHARD_SIZE and (is_adapter or to_gguf):
        what = "an adapter" if is_adapter else "a GGUF file"
        raise UserError(f"--shard-size has no effect on {what}, which is a single file: omit it")
    if to_gguf:
        _check_needs_no_directory({"--license": license, "--push": push})
    if public and not push:
        raise UserError("--public has no effect without --push: omit it")
    check_license(license)
    shard_bytes = parse_size(shard_size)
    if push:
        check_upload(push)

    with progress("exporting") as activity:
        if is_adapter:
            done = export_adapter(run, Path(directory), checkpoint, base, license, push)
        elif to_gguf:
            done = export_gguf(run, Path(directory), type or "f32", checkpoint)
        else:
            done = export_model(run, Path(directory), checkpoint, dtype, shard_bytes, license, push)
        address = ""
        if push:
            activity.stage("uploading")
            address = _upload(Path(directory), push, public, is_adapter)

    access = "public" if public else "private"
    facts = {
        "model": f"{run}, {done.family}, {done.parameters:,} parameters",
        "file" if to_gguf else "directory": directory,
        "supported by": _supported(done.engines),
        "largest logit difference after reloading": f"{done.max_logit_change:.1e}",
        "note": done.note,
        "uploaded to": f"{address} ({access}, if it is new)" if address else "",
    }
    results = {"run": run, "directory": directory} | done._asdict()
    if address:
        results["address"] = address
    return print_result(json, results, facts)


def _upload(directory: Path, push: str, public: bool, is_adapter: bool) -> str:
    """Upload a directory to a repository, and return its address."""
    from jaxgpt.convert.files import OF_ADAPTERS, OF_MODELS, OF_TOKENIZERS
    from jaxgpt.hub import upload

    # An adapter is uploaded next to a model of the repository. A model replaces an adapter, which would change the model.
    replaced: tuple[str, ...] = (*OF_TOKENIZERS, *OF_ADAPTERS)
    if not is_adapter:
        replaced += OF_MODELS
    return upload(directory, push, private=not public, replaced=replaced)


def _check_format(directory: str, is_adapter: bool, to_gguf: bool, dtype: str, type: str) -> None:
    """Raise `UserError` for a type that the format of the files does not support."""
    if is_adapter and to_gguf:
        raise UserError(
            f"cannot write an adapter to a GGUF file: {directory}; choose a directory, or omit --adapter and --base to "
            f"export the merged model"
        )
    if type and not to_gguf:
        raise UserError(f"--type {type} needs a GGUF file: choose a name that ends in .gguf, or omit --type")
    if dtype != "float32" and to_gguf:
        raise UserError(f"--dtype {dtype} needs a directory: choose the type of a GGUF file with --type")
    if dtype != "float32" and is_adapter:
        raise UserError(f"adapters are written in float32: omit --dtype {dtype}, or export the merged model")


def _check_needs_no_directory(options: Mapping[str, str]) -> None:
    """Raise `UserError` if a value is given for an option that needs a directory."""
    for option, value in options.items():
        if value:
            raise UserError(f"{option} needs a directory: choose a name that does not end in .gguf, or omit {option}")


def _supported(engines: tuple[str, ...]) -> str:
    """Format the programs that support a model; for a directory, only transformers is run by the tests."""
    match engines:
        case ():  # an adapter
            return ""
        case ("llama.cpp",):  # a GGUF file
            return "llama.cpp, according to runs of small models: see docs/models.md"
        case ("transformers",):
            return "transformers only: see docs/models.md"
    return f"transformers; according to their source code, not run: {', '.join(engines[1:])}"


def parse_size(size: str) -> int:
    """Convert a size such as 5GB or 500MB to bytes, with 10**9 bytes in a GB, as in transformers.

    Raises:
        UserError: if it is not a positive number with a unit of `UNITS`.
    """
    found = re.fullmatch(r"(\d+(?:\.\d+)?) ?([KMG]B)", size.strip(), re.IGNORECASE)
    number = 0.0
    if found:
        number = float(found[1]) * UNITS[found[2].upper()]
    if number < 1:
        raise UserError(f"the size of a shard must be a number with KB, MB or GB, such as 5GB: {short_repr(size)}")
    return round(number)
