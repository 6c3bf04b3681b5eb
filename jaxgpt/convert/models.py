"""Models in and out: a folder of another system becomes a run directory, a run becomes a folder for transformers."""

from __future__ import annotations

import json
from dataclasses import asdict, dataclass
from pathlib import Path
from typing import Any

from jaxgpt.checkpoint.run import Run, describe
from jaxgpt.checkpoint.store import save_params
from jaxgpt.config import Config, DataConfig, ModelConfig, TrainConfig, UserError
from jaxgpt.convert import gpt2, llama
from jaxgpt.convert.files import SINGLE, Weights, building, text_beside
from jaxgpt.convert.nanogpt import NANOGPT, model_from_options
from jaxgpt.convert.options import Options
from jaxgpt.convert.weights import Format, check_weights, largest_change, load_weights, probe, release, save_weights
from jaxgpt.data.corpus import read_path
from jaxgpt.data.tokenizer import CharTokenizer, Tokenizer, load_tokenizer, make_tokenizer
from jaxgpt.errors import read_json, shown
from jaxgpt.lm import load

GPT2 = Format(gpt2.TABLE, gpt2.PREFIX, f"{gpt2.PREFIX}wte.weight")
LLAMA = Format(llama.TABLE, llama.PREFIX, f"{llama.PREFIX}embed_tokens.weight")
ARCHITECTURES = {"gpt2": "GPT2LMHeadModel", "llama": "LlamaForCausalLM", "qwen3": "Qwen3ForCausalLM"}
TOLERANCE = 1e-5  # largest change of a logit that an export may bring


@dataclass(frozen=True)
class Converted:
    """What was done.

    Attributes:
        family: gpt2, llama, qwen3 or nanogpt.
        parameters: how many.
        max_logit_change: between the model and what was written of it and read again.
    """

    family: str
    parameters: int
    max_logit_change: float


def import_model(source: Path, target: Path, tokenizer: str = "") -> Converted:
    """Write a run directory at `target` from a folder of transformers or nanoGPT. No torch is needed.

    Args:
        source: the folder: config.json (nanoGPT: or recipe.json), safetensors, and a tokenizer's files.
        target: where nothing is yet. It appears whole or not at all.
        tokenizer: instead of the folder's own: a kind (byte, gpt2, ids) or a path.

    Raises:
        UserError: something is missing, of another shape or type, or not computed here; it is named.
    """
    family, model, form, weights = describe_source(source)
    check_weights(weights, model, form)
    words = _tokenizer(source, tokenizer, model)
    if words.vocab_size > model.vocab_size:
        raise UserError(f"{source}: its tokenizer has {words.vocab_size} ids, its model only {model.vocab_size}")
    with building(target) as folder:
        params = load_weights(weights, model, form)
        config = Config(
            preset="imported",
            model=model,
            data=DataConfig(dataset="none", tokenizer=str(target / "tokenizer.json")),
            train=TrainConfig(batch_size=4),
        )
        describe(Run(folder), config, words)
        save_params(Run(folder).checkpoints, params, {"config": asdict(config)})
        before, parameters = probe(model, params), _count(params)
        again = folder / SINGLE
        save_weights(again, params, model, form)
        del params
        release()
        after = probe(model, load_weights(Weights(again), model, form))
        again.unlink()
    return Converted(family, parameters, largest_change(before, after))


def export_model(run: str | Path, target: Path, checkpoint: str = "best") -> Converted:
    """Write a folder that transformers reads with `from_pretrained`.

    Args:
        run: a run directory.
        target: where nothing is yet. It appears whole, and compared with the model, or not at all.
        checkpoint: `best` (lowest validation loss), `last`, or a step.

    Raises:
        UserError: no such run, or a setting of the model that no family of transformers that is known here has; it is named.
        RuntimeError: what was written does not compute the same.
    """
    config, params, tokenizer, _ = load(run, checkpoint)
    family = "llama" if config.model.positions == "rope" else "gpt2"
    adapt, to_hf, form = (
        (gpt2.adapt, gpt2.config_to_hf, GPT2) if family == "gpt2" else (llama.adapt, llama.config_to_hf, LLAMA)
    )
    model = adapt(config.model)
    values = to_hf(model) | {"dtype": "float32", "bos_token_id": tokenizer.eos_id, "eos_token_id": tokenizer.eos_id}
    with building(target) as folder:
        _write_json(folder / "config.json", values)
        _write_json(folder / "generation_config.json", _generation(tokenizer))
        (folder / "tokenizer.json").write_text(tokenizer.to_json(), "utf-8")
        _write_json(folder / "tokenizer_config.json", _tokenizer_config(tokenizer, config.model.block_size))
        save_weights(folder / SINGLE, params, model, form)
        before, parameters = probe(config.model, params), _count(params)
        del params
        release()
        _, back, back_form, weights = describe_source(folder)
        change = largest_change(before, probe(back, load_weights(weights, back, back_form)))
        if not change <= TOLERANCE:
            raise RuntimeError(f"the exported model's logits differ by {change:.2e}: nothing was written")
    return Converted(values["model_type"], parameters, change)


def read_model(source: Path) -> tuple[ModelConfig, Any, Format]:
    """The config and the weights of a folder that `import_model` would take, and how its tensors are named."""
    _, model, form, weights = describe_source(source)
    return model, load_weights(weights, model, form), form


def describe_source(source: Path) -> tuple[str, ModelConfig, Format, Weights]:
    """Which family a folder holds, its config in our words, and its tensors, not read yet."""
    if not source.is_dir():
        raise UserError(f"{source} is not a folder with config.json and safetensors")
    where = source / "config.json"
    if not where.is_file() and (source / "recipe.json").is_file():
        where = source / "recipe.json"
    values = read_json(where)
    kind = values.get("model_type")
    if kind is None and "architectures" not in values and "n_layer" in values and "block_size" in values:
        weights = Weights(source)
        return "nanogpt", model_from_options(values, weights, str(where)), NANOGPT, weights
    if not isinstance(kind, str) or kind not in ARCHITECTURES:
        raise UserError(f"{where}: model_type {shown(kind)} is not computed here: one of {', '.join(ARCHITECTURES)}")
    named = values.get("architectures") or [ARCHITECTURES[kind]]
    if named != [ARCHITECTURES[kind]]:
        raise UserError(
            f"{where}: architectures {shown(named)} is not computed here: {ARCHITECTURES[kind]} is expected"
        )
    options = Options(values, str(where))
    if kind == "gpt2":
        model, form = gpt2.config_from_hf(options), GPT2
    else:
        model, form = llama.config_from_hf(options, qwen3=kind == "qwen3"), LLAMA
    options.done()
    return kind, model, form, Weights(source)


def _tokenizer(source: Path, named: str, model: ModelConfig) -> Tokenizer:
    if named in ("char", "word", "bpe"):
        raise UserError(f"--tokenizer {named} is built from a text: give the tokenizer.json that was made of it")
    if named:
        return make_tokenizer(named, "", 0, model.vocab_size)
    if (source / "recipe.json").is_file() and not (source / "tokenizer.json").is_file():
        # nanoGPT's character models keep their table in a pickle, but it is the text's sorted characters.
        text = read_json(source / "recipe.json").get("text")
        if isinstance(text, str):
            return CharTokenizer(read_path(text_beside(source, text)).text)
    try:
        return load_tokenizer(source)
    except UserError as e:
        raise UserError(f"{e} (or choose one with --tokenizer: gpt2, byte, ids, or a path)") from None


def _generation(tokenizer: Tokenizer) -> dict[str, Any]:
    eos = tokenizer.eos_id
    return {"_from_model_config": True, "bos_token_id": eos, "eos_token_id": eos}


def _tokenizer_config(tokenizer: Tokenizer, block_size: int) -> dict[str, Any]:
    values: dict[str, Any] = {
        "tokenizer_class": "PreTrainedTokenizerFast",
        "model_max_length": block_size,
        "clean_up_tokenization_spaces": False,
    }
    if tokenizer.eos_id is not None:
        values["eos_token"] = tokenizer.decode([tokenizer.eos_id])
    return values


def _write_json(path: Path, value: dict[str, Any]) -> None:
    path.write_text(json.dumps(value, indent=2, allow_nan=False) + "\n", "utf-8")


def _count(params: Any) -> int:
    from jaxgpt.trainer.metrics import parameter_count

    return parameter_count(params)
