"""Import a model directory or GGUF file as a run, and export a run as a directory for transformers."""

from __future__ import annotations

import re
from collections.abc import Collection
from dataclasses import asdict
from pathlib import Path
from typing import Any, NamedTuple

from jaxgpt.atomic import write_atomically, write_json
from jaxgpt.checkpoint.info import Info
from jaxgpt.checkpoint.new_run import check_new_run, complete_run
from jaxgpt.checkpoint.source import Place, WeightSource, read_source
from jaxgpt.checkpoint.stream import stream_params
from jaxgpt.config import Config, DataConfig, ModelConfig, TrainConfig
from jaxgpt.convert import gguf, gguf_special, gguf_tokenizer
from jaxgpt.convert.card import Export, model_card
from jaxgpt.convert.drafts import new_directory
from jaxgpt.convert.engines import engines
from jaxgpt.convert.families import exported_form
from jaxgpt.convert.files import SECOND_COPY, Weights
from jaxgpt.convert.open_model import WRAPPERS, open_model, read_model
from jaxgpt.convert.original_card import CARD, read_card
from jaxgpt.convert.probes import check_change, largest_change, probe_logits
from jaxgpt.convert.read_weights import read_leaves, skipped_tensors
from jaxgpt.convert.templates import with_defaults
from jaxgpt.convert.write_files import DTYPES, SHARD_BYTES
from jaxgpt.convert.write_weights import rounded_weights, save_weights
from jaxgpt.data.chat_encoding import stop_ids
from jaxgpt.data.new_tokenizer import GPT2_REPO, GPT2_REVISION, make_tokenizer
from jaxgpt.data.removed_tokens import note_on_removed, without_ids_from
from jaxgpt.data.special import IDS, SpecialTokens
from jaxgpt.data.special_files import read_special_files
from jaxgpt.data.tokenizer import Tokenizer
from jaxgpt.data.tokenizer_files import how_to_write_json, load_tokenizer, save_tokenizer
from jaxgpt.errors import UserError, short_repr
from jaxgpt.files import read_json
from jaxgpt.hub import download
from jaxgpt.model.params import abstract_params, count_parameters

PATTERNS = (
    "config.json generation_config.json adapter_config.json README.md *.safetensors *.safetensors.index.json tokenizer.json "
    "tokenizer_config.json special_tokens_map.json added_tokens.json chat_template.jinja additional_chat_templates/*.jinja"
).split()
PINNED = {GPT2_REPO: GPT2_REVISION}
ALIASES = {name: f"openai-community/{name}" for name in ("gpt2", "gpt2-medium", "gpt2-large", "gpt2-xl")}


class Converted(NamedTuple):
    """The result of an import or export."""

    family: str  # a name in `FAMILIES`, nanogpt, lora, or a llama.cpp architecture
    parameters: int  # number of parameters; lora: number of parameters of the adapters
    max_logit_change: float = 0.0  # largest logit difference between the model and its exported files; 0 for an import
    engines: tuple[str, ...] = ()  # programs that support the exported model; empty for imports and adapters
    skipped: int = 0  # number of tensors of a multimodal model that are not part of its text model
    note: str = ""  # files of an adapter or tokens that an import ignores, or texts whose ids differ in llama.cpp


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
        accept: unsupported options of config.json, or metadata keys of a GGUF file, to ignore.

    Raises:
        UserError: if `target` exists, `source` is incomplete, damaged or unsupported, or the tokenizer does not fit the model.
    """
    check_new_run(target)
    family, model, form, weights = open_model(source, accept)
    leaves = read_leaves(weights, model, form)  # first: a config may claim a vocabulary that does not fit in memory
    whole = _tokenizer(source, tokenizer, model, weights)
    own = without_ids_from(whole, model.vocab_size)
    if own.vocab_size > model.vocab_size:
        sizes = f"the tokenizer has {own.vocab_size} ids, but the model only {model.vocab_size}"
        raise UserError(f"{source}: {sizes}; choose a tokenizer with --tokenizer")
    config = imported_config(target, model)
    with complete_run(target, config, own) as run:
        stream_params(run.checkpoints, abstract_params(model), leaves, {"config": asdict(config)})
    card = read_card(source) if source.is_dir() else ""
    if card:  # a run keeps files in its directory that are not its own
        write_atomically(target / CARD, card)
    return Converted(
        family, count_parameters(model), skipped=skipped_tensors(weights, form), note=note_on_removed(whole, own)
    )


def imported_config(target: Path, model: ModelConfig, **settings: Any) -> Config:
    """Return the config of an imported run at `target`."""
    data = DataConfig(dataset="none", tokenizer=str(target.absolute() / "tokenizer.json"))
    return Config(preset="imported", model=model, data=data, train=TrainConfig(batch_size=4), **settings)


def export_model(
    run: str | Path,
    target: Path,
    checkpoint: str = "best",
    dtype: str = "float32",
    shard_bytes: int = SHARD_BYTES,
    license: str = "",
    repo: str = "",
) -> Converted:
    """Export a run to a directory for transformers' `from_pretrained`.

    Args:
        run: run to export.
        target: a new path; the directory is created atomically, after checking that the exported model's logits match.
        checkpoint: `best` (lowest validation loss), `last`, or a step.
        dtype: type of the weights in the files: float32, bfloat16 or float16.
        shard_bytes: maximum size of a file of weights; larger models get several files and an index.
        license: license for the model card; empty: license of the imported model, otherwise unknown.
        repo: name of the model on the hub, for the model card; empty: the name of `target`.

    Raises:
        UserError: if the run or checkpoint does not exist, `target` exists, or a setting has no equivalent in transformers.
        RuntimeError: if the exported model computes different logits.
    """
    if dtype not in DTYPES:
        raise UserError(f"dtype {short_repr(dtype)} is not supported: use one of {', '.join(DTYPES)}")
    with new_directory(target) as directory:
        source, (info, params) = read_source(run, checkpoint, _read)
        config = source.config
        tokenizer = source.run.tokenizer()
        family, model = exported_form(config.model)

        # Settings and tokenizer.
        tokenizer.special = exported_special_tokens(tokenizer, config)
        ids = {name: tokenizer.special.generation.get(name) for name in IDS}
        write_json(directory / "config.json", family.config_to_hf(model) | {"dtype": dtype} | ids)
        save_tokenizer(directory, tokenizer)

        # Model card.
        command = f"jaxgpt export {Path(run).name} {target.name} --checkpoint {checkpoint} --dtype {dtype}"
        served = engines(family, model, tokenizer)
        export = Export(
            run=Path(run),
            info=info,
            config=config,
            name=repo or target.name,
            command=command,
            license=license,
            served=served,
        )
        (directory / CARD).write_text(model_card(export))

        save_weights(directory, params, model, family.form, dtype, shard_bytes)
        # The files must have the logits of the rounded weights; the change by rounding is only reported.
        before = probe_logits(config.model, params)
        expected = before
        if dtype != "float32":
            expected = probe_logits(model, rounded_weights(params, model, family.form, dtype))
        del params
        after = probe_logits(*read_model(directory)[:2])
        check_change(expected, after)
    change = largest_change(before, after)
    parameters = count_parameters(config.model)
    return Converted(family.name, parameters, change, served)


def _tokenizer(source: Path, named: str, model: ModelConfig, weights: Weights) -> Tokenizer:
    """Return the tokenizer `named`, or the tokenizer in the source; add the special tokens of a directory."""
    if named in ("char", "word", "bpe"):
        raise UserError(f"--tokenizer {named} is built from a text: pass the tokenizer.json that was built from it")
    if isinstance(weights, gguf.GgufWeights):
        return _gguf_tokenizer(weights, named, model)

    config = read_json(source / "config.json")
    if config.get("model_type") in WRAPPERS:
        # As in transformers, the text model provides ids that the outer model lacks.
        config = config["text_config"] | {name: value for name, value in config.items() if value is not None}
    if named:
        special = read_special_files(source, config).tokens
        tokenizer = make_tokenizer(named, "", 0, model.vocab_size)
        tokenizer.special = SpecialTokens(special.generation, tokenizer.special.tokenizer)
        return tokenizer

    fix = "choose a tokenizer with --tokenizer (gpt2, byte, ids, or a path)"
    if not (source / "tokenizer.json").is_file():
        raise UserError(f"{source} has no tokenizer.json: {how_to_write_json(source)}, or {fix}")
    try:
        return load_tokenizer(source, config)
    except UserError as e:
        raise UserError(f"{e}; {fix}") from None


def _gguf_tokenizer(weights: gguf.GgufWeights, named: str, model: ModelConfig) -> Tokenizer:
    """Return the tokenizer `named`, or the tokenizer of a GGUF file, with the special tokens of the file."""
    where = str(weights.path)
    if not named:
        return gguf_tokenizer.read_tokenizer(weights.metadata, where)
    special = gguf_special.read_special_tokens(weights.metadata, where)
    tokenizer = make_tokenizer(named, "", 0, model.vocab_size)
    own = dict(tokenizer.special.tokenizer)
    tokenizer.special = SpecialTokens(special.generation, dict(special.tokenizer) | own)
    return tokenizer


def _read(source: WeightSource) -> tuple[Info, Any]:
    """Read the checkpoint.json and the weights of a checkpoint."""
    return source.info, source.read(Place())


def exported_special_tokens(tokenizer: Tokenizer, config: Config, always: Collection[str] = ()) -> SpecialTokens:
    """Return the special tokens of an exported model; the tokenizer supplies missing tokens for transformers.

    The end of the assistant's turn in the chat template comes first among the ids that end a text. The variables of the run
    become defaults of its chat templates; `always` as in `with_defaults`.
    """
    eos = tokenizer.eos_id
    bos = next(iter(tokenizer.bos_ids), None)
    generation: dict[str, Any] = {"bos_token_id": eos if bos is None else bos, "eos_token_id": eos}
    generation |= dict(tokenizer.special.generation) or {"_from_model_config": True}
    ends = list(stop_ids(tokenizer, config.data))
    if ends and ends[0] != eos:
        generation["eos_token_id"] = ends if len(ends) > 1 else ends[0]

    tokens = {
        "tokenizer_class": "PreTrainedTokenizerFast",
        "model_max_length": config.model.block_size,
        "clean_up_tokenization_spaces": False,
    }
    for name, i in (("eos_token", eos), ("bos_token", bos)):
        if i is not None:
            tokens[name] = tokenizer.decode([i])
    special = SpecialTokens(generation, tokens | dict(tokenizer.special.tokenizer), tokenizer.special.missing)
    return with_defaults(special, config.data.template_variables, always)
