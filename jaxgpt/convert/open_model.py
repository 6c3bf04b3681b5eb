"""Open a model directory of transformers or nanoGPT, or a GGUF file: its config and the layout of its tensors."""

from __future__ import annotations

from collections.abc import Collection, Mapping
from pathlib import Path
from typing import Any, NamedTuple

from jaxgpt.config import ModelConfig
from jaxgpt.convert import gpt2
from jaxgpt.convert.families import FAMILIES
from jaxgpt.convert.family import Family
from jaxgpt.convert.files import is_gguf, open_safetensors
from jaxgpt.convert.gguf import model as gguf
from jaxgpt.convert.multimodal import WRAPPERS, check_outer, text_config
from jaxgpt.convert.options import Options
from jaxgpt.convert.read_weights import StoredModel, load_weights
from jaxgpt.convert.tensors import Format
from jaxgpt.errors import UserError, short_repr
from jaxgpt.files import read_json


class LoadedModel(NamedTuple):
    """A model read from another system's files."""

    config: ModelConfig
    params: Any  # weights, as in `LM.params`
    form: Format  # names and layout of the tensors in the files


def open_model(source: Path, accept: Collection[str] = ()) -> StoredModel:
    """Read the config of a model in a directory or GGUF file, and the headers of its weights.

    Raises:
        UserError: if `source` is not a model, or the model is not supported.
    """
    if source.is_file() and is_gguf(source):
        return gguf.open_gguf(source, accept)
    if not source.is_dir():
        raise UserError(
            f"{source} is not a directory with config.json and safetensors, nor a .gguf file: pass the directory of the model"
        )
    values = read_json(source / "config.json")
    if values.get("model_type") is not None:
        return _open_transformers(source, values, accept)
    if (source / "checkpoints").is_dir():
        raise UserError(f"{source} is already a run: it does not need to be imported")
    if "n_layer" in values and "block_size" in values:
        return _open_nanogpt(source, values, accept)
    raise _unknown_family(None, values, str(source / "config.json"))


def read_model(source: Path) -> LoadedModel:
    """Read a directory or file that `import_model` accepts."""
    model = open_model(source)
    return LoadedModel(model.config, load_weights(model), model.form)


def _open_nanogpt(source: Path, values: Mapping[str, Any], accept: Collection[str]) -> StoredModel:
    """Open a directory with a config.json of nanoGPT's settings; `values` is its content."""
    options = Options(values, str(source / "config.json"), accept)
    weights = open_safetensors(source)
    model = gpt2.read_nanogpt(options, weights)
    options.done()
    return StoredModel("nanogpt", model, gpt2.NANOGPT, weights)


def _open_transformers(source: Path, values: Mapping[str, Any], accept: Collection[str]) -> StoredModel:
    """Open a transformers directory, or the text model of a multimodal directory; `values`: content of config.json."""
    where = str(source / "config.json")
    kind = values["model_type"]
    if not isinstance(kind, str):
        raise _unknown_family(kind, values, where)
    is_wrapped = kind in WRAPPERS
    if is_wrapped:
        own = text_config(values, where)
        options = Options(own, f"{where}: text_config", accept)
    else:
        own = dict(values)
        options = Options(own, where, accept)

    family = _family(own, options, where)
    config = family.config_from_hf(options)
    options.done()
    if is_wrapped:
        check_outer(values, options, where, accept)
    if not config.vocab_size:
        raise options.refuse("vocab_size", 0, "it must be at least 1")

    form = family.form_of(own, config) if family.form_of else family.form
    weights = open_safetensors(source)
    return StoredModel(family.name, config, form._replace(wrapped=is_wrapped), weights)


def _family(values: Mapping[str, Any], options: Options, where: str) -> Family:
    """Return the family of a config.json; raise `UserError` if it or its class is not supported."""
    kind = values.get("model_type")
    if not isinstance(kind, str) or kind not in FAMILIES:
        raise _unknown_family(kind, values, where)
    family = FAMILIES[kind]
    named = values.get("architectures")
    if named and named not in ([name] for name in family.architectures):
        raise options.refuse("architectures", named, f"expected {family.architectures[0]}")
    return family


def _unknown_family(kind: Any, values: Mapping[str, Any], where: str) -> UserError:
    """Return the error for a `model_type` without a family, with the type of its text model if it has one."""
    known = ", ".join([*FAMILIES, *WRAPPERS])
    text = values.get("text_config")
    inner = f" with the text model {short_repr(text.get('model_type'))}" if isinstance(text, dict) else ""
    return UserError(
        f"{where}: model_type {short_repr(kind)}{inner} is not supported: use one of {known}; docs/families.md shows how to "
        f"add a family"
    )
