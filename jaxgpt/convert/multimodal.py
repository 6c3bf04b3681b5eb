"""Multimodal models: the config.json of the text model in the config.json of the outer model."""

from __future__ import annotations

import re
from collections.abc import Collection, Mapping
from typing import Any

from jaxgpt.convert.options import Options
from jaxgpt.errors import UserError

# Multimodal models whose text model can be imported: `model_type`, and the default `model_type` of their `text_config`.
WRAPPERS = {"gemma3": "gemma3_text", "mistral3": "mistral", "llava": "llama"}
# Options of a multimodal config.json that do not concern its text model.
OF_OTHER_MODELS = re.compile(
    r"(vision|audio|image|video|boi|eoi|mm|multimodal|projector|spatial)_|processor_class$|ignore_index$", re.ASCII
)


def text_config(values: Mapping[str, Any], where: str) -> dict[str, Any]:
    """Return the config.json of the text model in the config.json of a multimodal model.

    As in transformers, options come only from `text_config`, except that `tie_word_embeddings` of the outer model, which has
    the head, takes precedence. Raises `UserError` if `text_config` is not an object.
    """
    if not isinstance(values.get("text_config"), dict):
        raise UserError(
            f"{where}: a model of type {values['model_type']} needs an object text_config, with the options of its text model"
        )
    options = {"model_type": WRAPPERS[values["model_type"]]} | values["text_config"]
    options.pop("architectures", None)  # not the class that transformers loads here
    if "tie_word_embeddings" in values:
        options["tie_word_embeddings"] = values["tie_word_embeddings"]
    return options


def check_outer(values: Mapping[str, Any], text: Options, where: str, accept: Collection[str]) -> None:
    """Raise `UserError` if a multimodal config.json has unknown options outside its `text_config`.

    Options of the other models have no effect here, nor do copies of the text model's options.

    Args:
        values: content of config.json.
        text: options of the text model, after they have been read.
        where: path of config.json, for errors.
        accept: unsupported options to ignore.
    """
    candidates = {name: value for name, value in values.items() if not OF_OTHER_MODELS.match(name)}
    del candidates["text_config"]
    outer = Options(candidates, where, accept)
    outer.skip(*text.handled)
    outer.done()


def token_config(values: Mapping[str, Any]) -> Mapping[str, Any]:
    """Return the values of a config.json, including the ids of special tokens.

    In a multimodal model, the text model provides ids that the outer model lacks, as in transformers.
    """
    if values.get("model_type") not in WRAPPERS:
        return values
    outer = {name: value for name, value in values.items() if value is not None}
    text: dict[str, Any] = values["text_config"]
    return text | outer
