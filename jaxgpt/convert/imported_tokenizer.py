"""The tokenizer of an imported model: from the model's files, or chosen by the user."""

from __future__ import annotations

from collections.abc import Mapping
from pathlib import Path
from typing import Any

from jaxgpt.convert.gguf.model import GgufWeights
from jaxgpt.convert.gguf.special import read_special_tokens as read_gguf_tokens
from jaxgpt.convert.gguf.tokenizer import read_tokenizer as read_gguf_tokenizer
from jaxgpt.convert.multimodal import token_config
from jaxgpt.convert.read_weights import StoredModel
from jaxgpt.data.tokenizers.base import Tokenizer
from jaxgpt.data.tokenizers.files import load_tokenizer, set_special
from jaxgpt.data.tokenizers.new import make_tokenizer
from jaxgpt.data.tokenizers.special import SpecialTokens
from jaxgpt.data.tokenizers.special_files import read_special_files
from jaxgpt.data.tokenizers.tokenizer_json import how_to_write_json
from jaxgpt.data_settings import FROM_TEXT
from jaxgpt.errors import UserError
from jaxgpt.files import read_json


def imported_tokenizer(source: Path, stored: StoredModel, named: str = "") -> Tokenizer:
    """Return the tokenizer of an imported model.

    With a tokenizer `named`, the ids that begin and end a text come from the model's files. Names of tokens and chat
    templates come from the files next to the named tokenizer; the model's files supply missing names and templates.

    Args:
        source: directory or GGUF file of the model.
        stored: the opened model.
        named: byte, gpt2, ids or a path; "": the tokenizer in `source`.

    Raises:
        UserError: if the tokenizer is missing, invalid or not supported.
    """
    if named in FROM_TEXT:
        raise UserError(f"--tokenizer {named} is built from a text: pass the tokenizer.json that was built from it")
    if not named:
        return _own_tokenizer(source, stored)

    of_model = _special_tokens(source, stored)
    tokenizer = make_tokenizer(named, model_vocab_size=stored.config.vocab_size)
    entries = dict(of_model.tokenizer) | dict(tokenizer.special.tokenizer)
    set_special(tokenizer, SpecialTokens(of_model.generation, entries))
    return tokenizer


def _special_tokens(source: Path, stored: StoredModel) -> SpecialTokens:
    """Return the special tokens and chat templates in the files of a model."""
    if isinstance(stored.weights, GgufWeights):
        return read_gguf_tokens(stored.weights.metadata, str(stored.weights.path))
    return read_special_files(source, _token_config(source)).special


def _own_tokenizer(source: Path, stored: StoredModel) -> Tokenizer:
    """Return the tokenizer in the files of a model, with its special tokens."""
    if isinstance(stored.weights, GgufWeights):
        return read_gguf_tokenizer(stored.weights.metadata, str(stored.weights.path))

    fix = "choose a tokenizer with --tokenizer (gpt2, byte, ids, or a path)"
    if not (source / "tokenizer.json").is_file():
        raise UserError(f"{source} has no tokenizer.json: {how_to_write_json(source)}, or {fix}")
    try:
        return load_tokenizer(source, _token_config(source))
    except UserError as e:
        raise UserError(f"{e}; {fix}") from None


def _token_config(source: Path) -> Mapping[str, Any]:
    """Return the content of config.json with the ids of special tokens."""
    return token_config(read_json(source / "config.json"))
