"""jaxgpt export RUN DIR"""

from __future__ import annotations

import re
from pathlib import Path
from typing import TYPE_CHECKING, Annotated, Literal, NamedTuple

from cyclopts import Parameter

from jaxgpt.cli.console import progress
from jaxgpt.cli.options import Checkpoint, Json
from jaxgpt.cli.output import print_result
from jaxgpt.errors import UserError, short_repr

if TYPE_CHECKING:
    from jaxgpt.convert.export_model import Exported

SHARD_SIZE = "5GB"
UNITS = {"KB": 10**3, "MB": 10**6, "GB": 10**9}  # bytes in each unit of a file size


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
    from jaxgpt.convert.export_model import export_model
    from jaxgpt.convert.gguf.export import export_gguf
    from jaxgpt.convert.peft.adapters import export_adapter

    # Check the options before the work.
    options = ExportOptions(
        directory=directory,
        is_adapter=adapter or bool(base),
        dtype=dtype,
        type=type,
        shard_bytes=parse_size(shard_size),
        license=license,
        push=push,
        public=public,
    )
    options.check()

    target = Path(directory)
    with progress("exporting") as activity:
        if options.is_adapter:
            exported = export_adapter(run, target, checkpoint, base=base, license=license, repo=push)
        elif options.is_gguf:
            exported = export_gguf(run, target, type or "f32", checkpoint)
        else:
            exported = export_model(
                run,
                target,
                checkpoint,
                dtype=dtype,
                shard_bytes=options.shard_bytes,
                license=license,
                repo=push,
            )
        address = ""
        if push:
            activity.stage("uploading")
            address = _upload(options)

    results = {"run": run, "directory": directory, **exported._asdict()}
    if address:
        results["address"] = address
    return print_result(json, results, _facts(run, options, exported, address))


class ExportOptions(NamedTuple):
    """The options of an export that depend on each other; the fields that are not listed here are named as in `export`.

    Attributes:
        is_adapter: whether to write only the adapters.
        shard_bytes: maximum size of a file of weights.
    """

    directory: str
    is_adapter: bool
    dtype: str
    type: str
    shard_bytes: int
    license: str
    push: str
    public: bool

    @property
    def is_gguf(self) -> bool:
        """Whether to write a GGUF file."""
        from jaxgpt.convert.files import is_gguf

        return is_gguf(Path(self.directory))

    def check(self) -> None:
        """Raise `UserError` for an invalid option, or an option that the files do not support."""
        from jaxgpt.convert.card.license import check_license
        from jaxgpt.hub import check_upload

        self._check_format()
        if self.shard_bytes != parse_size(SHARD_SIZE) and (self.is_adapter or self.is_gguf):
            what = "an adapter" if self.is_adapter else "a GGUF file"
            raise UserError(f"--shard-size has no effect on {what}, which is a single file: omit it")
        if self.is_gguf:
            self._check_needs_no_directory()
        if self.public and not self.push:
            raise UserError("--public has no effect without --push: omit it")
        check_license(self.license)
        if self.push:
            check_upload(self.push)

    def _check_needs_no_directory(self) -> None:
        """Raise `UserError` if an option is set that needs a directory."""
        for option, value in (("--license", self.license), ("--push", self.push)):
            if value:
                raise UserError(
                    f"{option} needs a directory: choose a name that does not end in .gguf, or omit {option}"
                )

    def _check_format(self) -> None:
        """Raise `UserError` for a type that the format of the files does not support."""
        if self.is_adapter and self.is_gguf:
            raise UserError(
                f"cannot write an adapter to a GGUF file: {self.directory}; choose a directory, or omit --adapter and --base "
                f"to export the merged model"
            )
        if self.type and not self.is_gguf:
            raise UserError(f"--type {self.type} needs a GGUF file: choose a name that ends in .gguf, or omit --type")
        if self.dtype != "float32" and self.is_gguf:
            raise UserError(f"--dtype {self.dtype} needs a directory: choose the type of a GGUF file with --type")
        if self.dtype != "float32" and self.is_adapter:
            raise UserError(f"adapters are written in float32: omit --dtype {self.dtype}, or export the merged model")


def _facts(run: str, options: ExportOptions, exported: Exported, address: str) -> dict[str, str]:
    """Return the lines about an export, keyed by label; `address`: address of the uploaded files, or ""."""
    access = "public" if options.public else "private"
    return {
        "model": f"{run}, {exported.family}, {exported.parameters:,} parameters",
        "file" if options.is_gguf else "directory": options.directory,
        "supported by": _supported(exported.engines),
        "largest logit difference after reloading": f"{exported.max_logit_change:.1e}",
        "note": exported.note,
        "uploaded to": f"{address} ({access}, if it is new)" if address else "",
    }


def _upload(options: ExportOptions) -> str:
    """Upload the directory to the repository, and return its address."""
    from jaxgpt.convert.uploads import replaced_files
    from jaxgpt.hub import upload

    replaced = replaced_files(options.is_adapter)
    return upload(Path(options.directory), options.push, private=not options.public, replaced=replaced)


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
        UserError: if `size` is not a positive number with a unit of `UNITS`.
    """
    found = re.fullmatch(r"(\d+(?:\.\d+)?) ?([KMG]B)", size.strip(), re.IGNORECASE)
    number = 0.0
    if found:
        number = float(found[1]) * UNITS[found[2].upper()]
    if number < 1:
        raise UserError(f"--shard-size must be a number with KB, MB or GB, such as 5GB, not {short_repr(size)}")
    return round(number)
