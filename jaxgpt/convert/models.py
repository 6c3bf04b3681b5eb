"""Import a model directory or GGUF file as a run, and export a run as a directory for transformers."""

from __future__ import annotations

import re
from collections.abc import Collection
from pathlib import Path
from typing import Any, NamedTuple

from jaxgpt.config import Config, DataConfig, ModelConfig, TrainConfig
from jaxgpt.convert import gemma, gguf, gguf_tokenizer, gpt2, llama, neox
from jaxgpt.convert.family import Family, canonical, engines
from jaxgpt.convert.files import SECOND_COPY, SINGLE, Weights, check_new, new_directory
from jaxgpt.convert.options import Options
from jaxgpt.convert.tensors import Format, check_change, load_weights, probe_logits, save_weights
from jaxgpt.data.tokenizer import SpecialTokens, Tokenizer
from jaxgpt.data.tokenizer_files import (
    GPT2_REPO,
    GPT2_REVISION,
    IDS,
    load_tokenizer,
    make_tokenizer,
    read_special_tokens,
    save_tokenizer,
    without_ids_from,
)
from jaxgpt.errors import UserError, short_repr
from jaxgpt.files import read_json, write_json
from jaxgpt.hub import download
from jaxgpt.lm import LM, load, save

OF_LLAMA = (llama.LLAMA, llama.MISTRAL, llama.QWEN2, llama.QWEN3)
FAMILIES = {family.name: family for family in (gpt2.FAMILY, *OF_LLAMA, neox.FAMILY, gemma.FAMILY, llama.OLMO2)}

PATTERNS = (
    "config.json generation_config.json adapter_config.json *.safetensors *.safetensors.index.json tokenizer.json "
    "tokenizer_config.json chat_template.jinja"
).split()
PINNED = {GPT2_REPO: GPT2_REVISION}
ALIASES = {name: f"openai-community/{name}" for name in ("gpt2", "gpt2-medium", "gpt2-large", "gpt2-xl")}


class Converted(NamedTuple):
    """The result of an import or export."""

    family: str  # a name in `FAMILIES`, nanogpt or lora
    parameters: int  # number of parameters; lora: number of parameters of the adapters
    max_logit_change: float = 0.0  # largest logit difference between the model and its exported files; 0 for an import
    engines: tuple[str, ...] = ()  # programs that support the exported model; empty for imports and adapters


def fetch_model(name: str, revision: str = "") -> tuple[Path, str]:
    """Return the local directory and commit of a hub repository, downloaded to the hub's cache if needed.

    `name` is `owner/name`, or the bare name of one of OpenAI's four GPT-2 models. `revision` is a commit, tag or branch;
    empty: the commit in `PINNED`, otherwise main. Raises `UserError` if the name is invalid, or the download fails.
    """
    repo = ALIASES.get(name, name)
    if not re.fullmatch(r"\w[\w.-]*/\w[\w.-]*", repo):
        raise UserError(f"{name} is not a file, a directory or a hub repository (owner/name)")
    path = download(repo, PATTERNS, revision=revision or PINNED.get(repo, "main"), ignore=[SECOND_COPY])
    return path, path.name


def import_model(source: Path, target: Path, tokenizer: str = "", accept: Collection[str] = ()) -> Converted:
    """Write a run directory from a transformers or nanoGPT directory, or a GGUF file, without PyTorch.

    Args:
        source: a GGUF file, or a directory with config.json, safetensors files and, if `tokenizer` is empty, tokenizer.json.
        target: a new path; the run is created atomically.
        tokenizer: byte, gpt2, ids or a path; empty: the tokenizer in `source`.
        accept: unsupported options of config.json to ignore.

    Raises:
        UserError: if `target` exists, `source` is incomplete, damaged or unsupported, or the tokenizer does not fit the model.
    """
    check_new(target)
    family, model, form, weights = open_model(source, accept)
    own = without_ids_from(_tokenizer(source, tokenizer, model, weights), model.vocab_size)
    if own.vocab_size > model.vocab_size:
        sizes = f"the tokenizer has {own.vocab_size} ids, but the model only {model.vocab_size}"
        raise UserError(f"{source}: {sizes}; choose a tokenizer with --tokenizer")
    save(LM(imported_config(target, model), load_weights(weights, model, form), own), target)
    return Converted(family, model.parameters)


def imported_config(target: Path, model: ModelConfig, **settings: Any) -> Config:
    """Return the config of an imported run at `target`."""
    data = DataConfig(dataset="none", tokenizer=str(target.absolute() / "tokenizer.json"))
    return Config(preset="imported", model=model, data=data, train=TrainConfig(batch_size=4), **settings)


def export_model(run: str | Path, target: Path, checkpoint: str = "best") -> Converted:
    """Export a run to a directory for transformers' `from_pretrained`.

    Args:
        target: a new path; the directory is created atomically, after checking that the exported model's logits match.
        checkpoint: `best` (lowest validation loss), `last`, or a step.

    Raises:
        UserError: if the run or checkpoint does not exist, `target` exists, or a setting has no equivalent in transformers.
        RuntimeError: if the exported model computes different logits.
    """
    with new_directory(target) as directory:
        config, params, tokenizer, _ = load(run, checkpoint)
        family, model = exported_form(config.model)
        tokenizer.special = _special_tokens(tokenizer, model.block_size)
        ids = {name: tokenizer.special.generation.get(name) for name in IDS}
        write_json(directory / "config.json", family.config_to_hf(model) | {"dtype": "float32"} | ids)
        save_tokenizer(directory, tokenizer)
        save_weights(directory / SINGLE, params, model, family.form)
        before = probe_logits(config.model, params)
        del params
        change = check_change(before, probe_logits(*read_model(directory)[:2]))
    return Converted(family.name, config.model.parameters, change, engines(family, model))


def exported_form(model: ModelConfig) -> tuple[Family, ModelConfig]:
    """Return the transformers family of a model, and the equivalent config that the family reads.

    Raises `UserError` if a setting has no equivalent in the supported families.
    """
    family = _family_for(canonical(model))
    return family, family.express(model)


def read_model(source: Path) -> tuple[ModelConfig, Any, Format]:
    """Read the config, weights and tensor layout of a directory or file that `import_model` accepts."""
    _, model, form, weights = open_model(source)
    return model, load_weights(weights, model, form), form


def open_model(source: Path, accept: Collection[str] = ()) -> tuple[str, ModelConfig, Format, Weights]:
    """Return the family name, model config, tensor layout and unread tensors of a directory or GGUF file."""
    if source.is_file() and source.suffix == ".gguf":
        return gguf.open_gguf(source, accept)
    if not source.is_dir():
        raise UserError(f"{source} is not a directory with config.json and safetensors, nor a .gguf file")
    where = source / "config.json"
    values = read_json(where)
    options, kind = Options(values, str(where), accept), values.get("model_type")
    if kind is None and (source / "checkpoints").is_dir():
        raise UserError(f"{source} is already a run: it does not need to be imported")
    if kind is None and "n_layer" in values and "block_size" in values:
        weights = Weights(source)
        model = gpt2.read_nanogpt(options, weights)
        options.done()
        return "nanogpt", model, gpt2.NANOGPT, weights
    if not isinstance(kind, str) or kind not in FAMILIES:
        raise UserError(
            f"{where}: model_type {short_repr(kind)} is not supported: use one of {', '.join(FAMILIES)}; docs/families.md "
            f"shows how to add a family"
        )
    family, named = FAMILIES[kind], values.get("architectures")
    if named and named not in ([name] for name in family.architectures):
        raise options.refuse("architectures", named, f"expected {family.architectures[0]}")
    model = family.config_from_hf(options)
    options.done()
    if not model.vocab_size:
        raise options.refuse("vocab_size", 0, "it must be at least 1")
    return kind, model, family.form_of(values, model) if family.form_of else family.form, Weights(source)


def _family_for(model: ModelConfig) -> Family:
    """Return the transformers family closest to a model; `Family.express` checks the settings."""
    if model.positions != "rope":
        return gpt2.FAMILY
    if model.norm == "layernorm":
        return neox.FAMILY
    if model.norm_position in ("both", "output"):
        return gemma.FAMILY if model.norm_position == "both" else llama.OLMO2
    if model.qk_norm:
        return llama.QWEN3
    if model.window_pattern != "L" or (model.qkv_bias and not model.bias):
        return llama.QWEN2
    return llama.MISTRAL if model.sliding_window else llama.LLAMA


def _tokenizer(source: Path, named: str, model: ModelConfig, weights: Weights) -> Tokenizer:
    """Return the tokenizer `named`, or the tokenizer in the source; add the special tokens of a directory."""
    if named in ("char", "word", "bpe"):
        raise UserError(f"--tokenizer {named} is built from a text: pass the tokenizer.json that was built from it")
    if isinstance(weights, gguf.GgufWeights):
        return _gguf_tokenizer(weights, named, model)
    special = read_special_tokens(source, read_json(source / "config.json"))
    if named:
        tokenizer = make_tokenizer(named, "", 0, model.vocab_size)
        tokenizer.special = SpecialTokens(special.generation, tokenizer.special.tokenizer)
        return tokenizer
    fix = "choose a tokenizer with --tokenizer (gpt2, byte, ids, or a path)"
    if not (source / "tokenizer.json").is_file():
        raise UserError(f"{source} has no tokenizer.json: {fix}")
    try:
        tokenizer = load_tokenizer(source)
    except UserError as e:
        raise UserError(f"{e}; {fix}") from None
    tokenizer.special = special
    return tokenizer


def _gguf_tokenizer(weights: gguf.GgufWeights, named: str, model: ModelConfig) -> Tokenizer:
    """Return the tokenizer `named`, or the tokenizer of a GGUF file, with the special tokens of the file."""
    where = str(weights.path)
    if not named:
        return gguf_tokenizer.read_tokenizer(weights.metadata, where)
    special = gguf_tokenizer.read_special_tokens(weights.metadata, where)
    tokenizer = make_tokenizer(named, "", 0, model.vocab_size)
    own = dict(tokenizer.special.tokenizer)
    tokenizer.special = SpecialTokens(special.generation, dict(special.tokenizer) | own)
    return tokenizer


def _special_tokens(tokenizer: Tokenizer, block_size: int) -> SpecialTokens:
    """Return the model's special tokens; the tokenizer supplies missing tokens for transformers."""
    eos, bos = tokenizer.eos_id, next(iter(tokenizer.bos_ids), None)
    generation = {"bos_token_id": eos if bos is None else bos, "eos_token_id": eos}
    named = {"eos_token": eos, "bos_token": bos}
    fixed = {
        "tokenizer_class": "PreTrainedTokenizerFast",
        "model_max_length": block_size,
        "clean_up_tokenization_spaces": False,
    }
    return SpecialTokens(
        generation | (dict(tokenizer.special.generation) or {"_from_model_config": True}),
        fixed
        | {name: tokenizer.decode([i]) for name, i in named.items() if i is not None}
        | dict(tokenizer.special.tokenizer),
    )
