"""Export a run as a directory for transformers."""

from __future__ import annotations

from pathlib import Path
from typing import Any, NamedTuple

from jaxgpt.atomic import write_json
from jaxgpt.checkpoint.info import Info
from jaxgpt.checkpoint.placement import Place
from jaxgpt.checkpoint.source import WeightSource, read_source
from jaxgpt.config import ModelConfig
from jaxgpt.convert.card.card import CardSubject, export_command, model_card
from jaxgpt.convert.card.original import CARD
from jaxgpt.convert.drafts import new_directory
from jaxgpt.convert.engines import Engine, engines
from jaxgpt.convert.exported_tokens import exported_special_tokens
from jaxgpt.convert.families import express_in_family
from jaxgpt.convert.family import Family
from jaxgpt.convert.probes import check_change, largest_change, probe_logits, reread_logits
from jaxgpt.convert.write_files import DTYPES, SHARD_BYTES
from jaxgpt.convert.write_weights import rounded_weights, save_weights
from jaxgpt.data.tokenizers.base import Tokenizer
from jaxgpt.data.tokenizers.files import save_tokenizer
from jaxgpt.data.tokenizers.special import IDS
from jaxgpt.errors import UserError, short_repr
from jaxgpt.model.params import count_parameters


class Exported(NamedTuple):
    """A summary of an export.

    Attributes:
        family: a name in `FAMILIES`, lora, or llama.cpp and the name of its architecture.
        parameters: number of parameters of the model or, for lora, of the adapters.
        max_logit_change: largest logit difference between the model and its exported files.
        engines: programs that support the exported model; (): an adapter.
        note: description of the texts that have different ids in llama.cpp; "": no such texts.
    """

    family: str
    parameters: int
    max_logit_change: float
    engines: tuple[Engine, ...] = ()
    note: str = ""


def export_model(
    run: str | Path,
    target: Path,
    checkpoint: str = "best",
    dtype: str = "float32",
    shard_bytes: int = SHARD_BYTES,
    license: str = "",
    repo: str = "",
) -> Exported:
    """Export a run to a directory for transformers' `from_pretrained`.

    Args:
        run: run to export.
        target: a new path, or an empty directory; the directory is created atomically, after checking that the exported
            model's logits match.
        checkpoint: `best` (lowest validation loss, or highest held-out reward), `last`, or a step.
        dtype: type of the weights in the files: float32, bfloat16 or float16.
        shard_bytes: maximum bytes of a file of several tensors; larger models get several files and an index.
        license: license for the model card; empty: license of the imported model, otherwise unknown.
        repo: name of the model on the hub, for the model card; empty: the name of `target`.

    Raises:
        UserError: if the run or checkpoint does not exist, `target` exists, `dtype` or `license` is invalid, an element is
            outside the range of `dtype`, or a setting has no equivalent in transformers.
        RuntimeError: if the exported model computes different logits.
    """
    if dtype not in DTYPES:
        raise UserError(f"dtype {short_repr(dtype)} is not supported: use one of {', '.join(DTYPES)}")
    with new_directory(target) as directory:
        source, (info, params) = read_source(run, checkpoint, _info_and_weights)
        config = source.config
        family, model = express_in_family(config.model)

        tokenizer = source.run.tokenizer()  # a new object for this export
        tokenizer.special = exported_special_tokens(tokenizer, config)
        save_tokenizer(directory, tokenizer)
        write_json(directory / "config.json", _config_json(family, model, tokenizer, dtype))

        supported = engines(family, model, tokenizer)
        subject = CardSubject(
            run=Path(run),
            info=info,
            config=config,
            name=repo or target.name,
            command=export_command(run, target, {"checkpoint": checkpoint, "dtype": dtype, "license": license}),
            license=license,
            engines=supported,
        )
        (directory / CARD).write_text(model_card(subject), "utf-8")

        save_weights(directory, params, model, family.form, dtype, shard_bytes)
        # The files must have the logits of the rounded weights; the change by rounding is only reported.
        before = probe_logits(config.model, params)
        expected = before
        if dtype != "float32":
            expected = probe_logits(model, rounded_weights(params, model, family.form, dtype))
        del params  # before the weights in the files are read
        after = reread_logits(directory)
        check_change(expected, after)
    return Exported(
        family=family.name,
        parameters=count_parameters(config.model),
        max_logit_change=largest_change(before, after),
        engines=supported,
    )


def _config_json(family: Family, model: ModelConfig, tokenizer: Tokenizer, dtype: str) -> dict[str, Any]:
    """Return the content of config.json: the model, the type of its weights, and the ids of special tokens."""
    ids = {name: tokenizer.special.generation.get(name) for name in IDS}
    return family.config_to_hf(model) | {"dtype": dtype} | ids


def _info_and_weights(source: WeightSource) -> tuple[Info, Any]:
    """Read the checkpoint.json and the weights together: a training process may delete the checkpoint afterwards."""
    return source.info, source.read(Place())
