"""Special tokens and chat templates of an exported model."""

from __future__ import annotations

from collections.abc import Collection
from typing import Any

from jaxgpt.config import Config
from jaxgpt.convert.templates import with_default_variables
from jaxgpt.data.chat.encoding import stop_ids
from jaxgpt.data.tokenizers.base import Tokenizer
from jaxgpt.data.tokenizers.special import SpecialTokens


def exported_special_tokens(tokenizer: Tokenizer, config: Config, always: Collection[str] = ()) -> SpecialTokens:
    """Return the special tokens of an exported model.

    The variables of the run become defaults of its chat templates; `always` as in `with_default_variables`.
    """
    generation = _generation_entries(tokenizer, config)
    entries = _tokenizer_entries(tokenizer, config) | dict(tokenizer.special.tokenizer)
    special = SpecialTokens(generation, entries, tokenizer.special.missing)
    return with_default_variables(special, config.data.template_variables, always)


def _generation_entries(tokenizer: Tokenizer, config: Config) -> dict[str, Any]:
    """Return the content of generation_config.json: the content of the model's file; the tokenizer supplies missing ids.

    The end of the assistant's turn in the chat template comes first among the ids that end a text.
    """
    stored = dict(tokenizer.special.generation)
    if not stored:
        # As in transformers, this flag marks a file that is derived from config.json.
        stored["_from_model_config"] = True

    eos = tokenizer.eos_id  # the first end id in `stored`; without it, the usual end-of-text id
    bos = next(iter(tokenizer.bos_ids), eos)  # generation from an empty prompt begins with this id
    entries: dict[str, Any] = {"bos_token_id": bos, "eos_token_id": eos} | stored

    ends = list(stop_ids(tokenizer, config.data))
    if ends and ends[0] != eos:
        entries["eos_token_id"] = ends if len(ends) > 1 else ends[0]
    return entries


def _tokenizer_entries(tokenizer: Tokenizer, config: Config) -> dict[str, Any]:
    """Return defaults of tokenizer_config.json, with the tokens that begin and end a text."""
    entries: dict[str, Any] = {
        "tokenizer_class": "PreTrainedTokenizerFast",
        "model_max_length": config.model.block_size,
        "clean_up_tokenization_spaces": False,
    }
    if tokenizer.eos_id is not None:
        entries["eos_token"] = tokenizer.decode([tokenizer.eos_id])
    if tokenizer.bos_ids:  # only a token that is prepended to texts has this name
        entries["bos_token"] = tokenizer.decode([tokenizer.bos_ids[0]])
    return entries
