"""Import a model directory as a run, and export a run as a directory for transformers."""

from __future__ import annotations

import json
from collections.abc import Collection
from dataclasses import asdict, dataclass, replace
from pathlib import Path
from typing import Any

from jaxgpt.checkpoint.run import Run, write_settings
from jaxgpt.checkpoint.store import save_params
from jaxgpt.config import Config, DataConfig, ModelConfig, TrainConfig
from jaxgpt.convert import gemma, gpt2, llama, mistral, neox, olmo, qwen
from jaxgpt.convert.family import Family
from jaxgpt.convert.files import SINGLE, Weights, new_folder
from jaxgpt.convert.gguf import GgufWeights, open_gguf, read_tokenizer
from jaxgpt.convert.nanogpt import NANOGPT, model_from_options
from jaxgpt.convert.options import Options
from jaxgpt.convert.weights import (
    Format,
    check_change,
    check_weights,
    free_memory,
    largest_change,
    load_weights,
    probe_logits,
    save_weights,
)
from jaxgpt.data.special_tokens import GENERATION, IDS, TOKENIZER, SpecialTokens, read_special_tokens
from jaxgpt.data.tokenizer import Tokenizer
from jaxgpt.data.tokenizer_files import NoTokenizer, load_tokenizer, make_tokenizer, without_ids_from
from jaxgpt.errors import UserError, short_repr
from jaxgpt.files import read_json
from jaxgpt.lm import load
from jaxgpt.trainer.metrics import parameter_count

FAMILIES = {
    family.name: family
    for family in (
        gpt2.FAMILY,
        llama.FAMILY,
        mistral.FAMILY,
        qwen.QWEN2,
        qwen.QWEN3,
        neox.FAMILY,
        gemma.FAMILY,
        olmo.FAMILY,
    )
}


@dataclass(frozen=True)
class Converted:
    """The result of an import or export.

    Attributes:
        family: a name in `FAMILIES`, or nanogpt.
        parameters: number of parameters.
        max_logit_change: largest logit difference between the model and its reloaded files.
    """

    family: str
    parameters: int
    max_logit_change: float


@dataclass(frozen=True)
class Exported(Converted):
    """The result of an export.

    Attributes:
        engines: programs that compute the exported model; other programs may reject or silently change it.
    """

    engines: tuple[str, ...]


def import_model(source: Path, target: Path, tokenizer: str = "", accept: Collection[str] = ()) -> Converted:
    """Write a run directory from a transformers or nanoGPT directory, or a GGUF file, without PyTorch.

    Args:
        source: the file, or the directory: config.json, safetensors, and the files of a tokenizer.
        target: a new path. The run appears atomically.
        tokenizer: a kind (byte, gpt2, ids) or a path, to replace the directory's own.
        accept: unknown options of config.json to ignore.

    Raises:
        UserError: if a file or tensor is missing, has a wrong shape or type, or is not supported.
    """
    family, model, form, weights = open_model(source, accept)
    check_weights(weights, model, form)
    own = without_ids_from(_tokenizer(source, tokenizer, model, weights), model.vocab_size)
    if own.vocab_size > model.vocab_size:
        raise UserError(f"{source}: its tokenizer has {own.vocab_size} ids, its model only {model.vocab_size}")
    with new_folder(target) as folder:
        params = load_weights(weights, model, form)
        config = imported_config(target, model)
        write_settings(Run(folder), config, own)
        save_params(Run(folder).checkpoints, params, {"config": asdict(config)})
        before, parameters = probe_logits(model, params), parameter_count(params)
        again = folder / SINGLE
        save_weights(again, params, model, form)
        del params
        free_memory()
        after = probe_logits(model, load_weights(Weights(again), model, form))
        again.unlink()
    return Converted(family, parameters, largest_change(before, after))


def imported_config(target: Path, model: ModelConfig, **settings: Any) -> Config:
    """Return the config of an imported run at `target`."""
    data = DataConfig(dataset="none", tokenizer=str(target / "tokenizer.json"))
    return Config(preset="imported", model=model, data=data, train=TrainConfig(batch_size=4), **settings)


def export_model(run: str | Path, target: Path, checkpoint: str = "best") -> Exported:
    """Write a directory that transformers reads with `from_pretrained`.

    Args:
        run: a run directory.
        target: a new path. The directory appears atomically, after a comparison with the model.
        checkpoint: `best` (lowest validation loss), `last`, or a step.

    Raises:
        UserError: if there is no such run, or a setting has no equivalent in the transformers families.
        RuntimeError: if the exported model computes different logits.
    """
    config, params, tokenizer, _ = load(run, checkpoint)
    family, model = exported_form(config.model)
    generation = _generation_config(tokenizer)
    ids = {name: generation.get(name) for name in IDS}
    with new_folder(target) as folder:
        _write_json(folder / "config.json", family.config_to_hf(model) | {"dtype": "float32"} | ids)
        _write_json(folder / GENERATION, generation)
        (folder / "tokenizer.json").write_text(tokenizer.to_json(), "utf-8")
        _write_json(folder / TOKENIZER, _tokenizer_config(tokenizer, config.model.block_size))
        save_weights(folder / SINGLE, params, model, family.form)
        before, parameters = probe_logits(config.model, params), parameter_count(params)
        del params
        free_memory()
        _, back, back_form, weights = open_model(folder)
        change = check_change(before, probe_logits(back, load_weights(weights, back, back_form)))
    return Exported(family.name, parameters, change, family.engines(model))


def exported_form(config: ModelConfig) -> tuple[Family, ModelConfig]:
    """Return the transformers family of a model, and the config of the same function in this family.

    Raises:
        UserError: if a setting has no equivalent in the supported families.
    """
    if len(windows := set(config.windows)) == 1:  # families without patterns can express it
        (window,) = windows
        local = config.rope_local_theta if window else 0.0
        config = replace(config, sliding_window=window, window_pattern="L", rope_local_theta=local)
    family = _family_for(config)
    return family, family.adapt(config)


def read_model(source: Path) -> tuple[ModelConfig, Any, Format]:
    """Read the config, weights and tensor layout of a directory or file that `import_model` accepts."""
    _, model, form, weights = open_model(source)
    return model, load_weights(weights, model, form), form


def open_model(source: Path, accept: Collection[str] = ()) -> tuple[str, ModelConfig, Format, Weights]:
    """Return the family, the model config and the unread tensors of a directory or GGUF file."""
    if source.is_file() and source.suffix == ".gguf":
        model, gguf_weights = open_gguf(source, accept)
        return "llama", model, llama.FAMILY.form, gguf_weights
    if not source.is_dir():
        raise UserError(f"{source} is not a folder with config.json and safetensors, nor a .gguf file")
    where = source / "config.json"
    values = read_json(where)
    kind, named = values.get("model_type"), values.get("architectures")
    if kind is None and named is None and "n_layer" in values and "block_size" in values:
        options, weights = Options(values, str(where), accept), Weights(source)
        model = model_from_options(options, weights)
        options.done()
        return "nanogpt", model, NANOGPT, weights
    if kind is None:  # as in some files of 2019
        kind = next((name for name, family in FAMILIES.items() if named == [family.architectures[0]]), None)
    if kind is None and (source / "checkpoints").is_dir():
        raise UserError(f"{source} is already a run: it does not need to be imported")
    if not isinstance(kind, str) or kind not in FAMILIES:
        raise UserError(
            f"{where}: model_type {short_repr(kind)} is not supported: one of {', '.join(FAMILIES)}; docs/families.md "
            f"shows how to add a family"
        )
    family = FAMILIES[kind]
    if named and not (isinstance(named, list) and len(named) == 1 and named[0] in family.architectures):
        raise UserError(
            f"{where}: architectures {short_repr(named)} is not supported: {family.architectures[0]} is expected"
        )
    options = Options(values, str(where), accept)
    model = family.config_from_hf(options)
    options.done()
    if not model.vocab_size:
        raise options.refuse("vocab_size", 0, "it must be at least 1")
    return kind, model, family.form_of(values) if family.form_of else family.form, Weights(source)


def _family_for(model: ModelConfig) -> Family:
    """Return the family of transformers closest to a model; its `adapt` checks whether it can express the model."""
    if model.positions != "rope":
        return gpt2.FAMILY
    if model.norm == "layernorm":
        return neox.FAMILY
    if model.norm_position in ("both", "output"):
        return gemma.FAMILY if model.norm_position == "both" else olmo.FAMILY
    if model.qk_norm:
        return qwen.QWEN3
    if len(set(model.windows)) > 1 or (model.qkv_bias and not model.bias):
        return qwen.QWEN2
    return mistral.FAMILY if model.sliding_window else llama.FAMILY


def _tokenizer(source: Path, named: str, model: ModelConfig, weights: Weights) -> Tokenizer:
    """Return the tokenizer of a directory, or the named tokenizer, with the directory's special tokens."""
    if named in ("char", "word", "bpe"):
        raise UserError(f"--tokenizer {named} is built from a text: pass the tokenizer.json that was built from it")
    if isinstance(weights, GgufWeights):
        return make_tokenizer(named, "", 0, model.vocab_size) if named else read_tokenizer(weights)
    config = source / "config.json"
    special = read_special_tokens(source, read_json(config) if config.is_file() else None)
    if named:
        tokenizer = make_tokenizer(named, "", 0, model.vocab_size)
        tokenizer.special = SpecialTokens(special.generation, tokenizer.special.tokenizer)
        return tokenizer
    try:
        tokenizer = load_tokenizer(source)
    except NoTokenizer:
        raise UserError(
            f"{source} has no tokenizer.json: choose a tokenizer with --tokenizer (gpt2, byte, ids, or a path)"
        ) from None
    except UserError as e:
        raise UserError(f"{e}; or choose another with --tokenizer (gpt2, byte, ids, or a path)") from None
    tokenizer.special = special
    return tokenizer


def _generation_config(tokenizer: Tokenizer) -> dict[str, Any]:
    """Return the generation_config.json that the model came with, completed by the tokenizer's tokens."""
    eos, bos = tokenizer.eos_id, next(iter(tokenizer.bos_ids), tokenizer.eos_id)
    default = {"bos_token_id": bos, "eos_token_id": eos}
    return default | dict(tokenizer.special.generation or {"_from_model_config": True})


def _tokenizer_config(tokenizer: Tokenizer, block_size: int) -> dict[str, Any]:
    values: dict[str, Any] = {
        "tokenizer_class": "PreTrainedTokenizerFast",
        "model_max_length": block_size,
        "clean_up_tokenization_spaces": False,
    }
    if tokenizer.eos_id is not None:
        values["eos_token"] = tokenizer.decode([tokenizer.eos_id])
    for i in tokenizer.bos_ids[:1]:
        values["bos_token"] = tokenizer.decode([i])
    return values | dict(tokenizer.special.tokenizer)


def _write_json(path: Path, value: dict[str, Any]) -> None:
    path.write_text(json.dumps(value, indent=2, allow_nan=False) + "\n", "utf-8")
