"""Import a model directory or a GGUF file as a run."""

from __future__ import annotations

from collections.abc import Collection
from dataclasses import asdict
from pathlib import Path
from typing import Any, NamedTuple

from jaxgpt.atomic import write_atomically
from jaxgpt.checkpoint.new_path import check_new_run
from jaxgpt.checkpoint.new_run import complete_run
from jaxgpt.checkpoint.stream import stream_params
from jaxgpt.config import Config, DataConfig, ModelConfig, TrainConfig
from jaxgpt.convert.card.original import CARD, read_card
from jaxgpt.convert.imported_tokenizer import imported_tokenizer
from jaxgpt.convert.open_model import open_model
from jaxgpt.convert.read_weights import read_leaves, skipped_tensors
from jaxgpt.data.tokenizers.removed_tokens import note_on_removed, without_ids_from
from jaxgpt.errors import UserError
from jaxgpt.model.params import abstract_params, count_parameters


class Imported(NamedTuple):
    """A summary of an import.

    Attributes:
        family: a name in `FAMILIES`, nanogpt, lora, or a llama.cpp architecture.
        parameters: number of parameters of the model or, for lora, of the adapters.
        skipped: number of tensors of a multimodal model that are not part of its text model.
        note: tokens, or files of an adapter, that the import ignored, and why; "": none.
    """

    family: str
    parameters: int
    skipped: int = 0
    note: str = ""


def import_model(source: Path, target: Path, tokenizer: str = "", accept: Collection[str] = ()) -> Imported:
    """Write a run directory from a transformers or nanoGPT directory, or a GGUF file, without PyTorch.

    Args:
        source: a GGUF file, or a directory with config.json, safetensors files and, if `tokenizer` is empty, tokenizer.json.
        target: a new path; the run is created atomically.
        tokenizer: byte, gpt2, ids or a path; empty: the tokenizer in `source`.
        accept: unsupported options of config.json, or metadata keys of a GGUF file, to ignore.

    Raises:
        UserError: if `target` exists, `source` is incomplete, damaged or unsupported, or the tokenizer does not fit the model.
    """
    check_new_run(target)
    stored = open_model(source, accept)
    model = stored.config
    leaves = read_leaves(stored)  # checks the shapes first: a tokenizer of a wrong size may not fit in memory

    # Added tokens without a row in the embedding are removed.
    complete = imported_tokenizer(source, stored, tokenizer)
    fitting = without_ids_from(complete, model.vocab_size)
    if fitting.vocab_size > model.vocab_size:
        sizes = f"the tokenizer has {fitting.vocab_size} ids, but the model only {model.vocab_size}"
        raise UserError(f"{source}: {sizes}; choose a tokenizer with --tokenizer")

    config = imported_config(target, model)
    with complete_run(target, config, fitting) as run:
        stream_params(run.checkpoints, abstract_params(model), leaves, {"config": asdict(config)})
    card = read_card(source) if source.is_dir() else ""
    if card:  # a run directory may contain further files, such as the card
        write_atomically(target / CARD, card)
    return Imported(
        family=stored.family,
        parameters=count_parameters(model),
        skipped=skipped_tensors(stored),
        note=note_on_removed(complete, fitting),
    )


def imported_config(target: Path, model: ModelConfig, **settings: Any) -> Config:
    """Return the config of an imported run at `target`; `settings`: settings of `Config` besides the model."""
    data = DataConfig(dataset="none", tokenizer=str(target.absolute() / "tokenizer.json"))
    return Config(preset="imported", model=model, data=data, train=TrainConfig(batch_size=4), **settings)
