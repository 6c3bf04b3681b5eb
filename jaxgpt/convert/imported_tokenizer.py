"""The tokenizer of an imported model: from the model's files, or chosen by the user."""

from __future__ import annotations

from pathlib import Path

from jaxgpt.config import ModelConfig
from jaxgpt.convert.gguf import special as gguf_special
from jaxgpt.convert.gguf import tokenizer as gguf_tokenizer
from jaxgpt.convert.gguf.model import GgufWeights
from jaxgpt.convert.multimodal import token_config
from jaxgpt.convert.read_weights import StoredModel
from jaxgpt.data.tokenizers.base import Tokenizer
from jaxgpt.data.tokenizers.files import load_tokenizer
from jaxgpt.data.tokenizers.new import make_tokenizer
from jaxgpt.data.tokenizers.special import SpecialTokens
from jaxgpt.data.tokenizers.special_files import read_special_files
from jaxgpt.data.tokenizers.tokenizer_json import how_to_write_json
from jaxgpt.errors import UserError
from jaxgpt.files import read_json


def imported_tokenizer(source: Path, stored: StoredModel, named: str = "") -> Tokenizer:
    """Return the tokenizer of an imported model, with the special tokens of its files.

    Args:
        source: directory or GGUF file of the model.
        stored: the opened model.
        named: byte, gpt2, ids or a path; "": the tokenizer in `source`.

    Raises:
        UserError: if the tokenizer is missing, invalid or not supported.
    """
    if named in ("char", "word", "bpe"):
        raise UserError(f"--tokenizer {named} is built from a text: pass the tokenizer.json that was built from it")
    if isinstance(stored.weights, GgufWeights):
        return _gguf_tokenizer(stored.weights, stored.config, named)
    return _directory_tokenizer(source, stored.config, named)


def _directory_tokenizer(source: Path, model: ModelConfig, named: str) -> Tokenizer:
    """Return the tokenizer `named`, or the tokenizer in a directory, with the special tokens of the directory."""
    config = token_config(read_json(source / "config.json"))
    if named:
        special = read_special_files(source, config).tokens
        tokenizer = make_tokenizer(named, model_vocab_size=model.vocab_size)
        tokenizer.special = SpecialTokens(special.generation, tokenizer.special.tokenizer)
        return tokenizer

    fix = "choose a tokenizer with --tokenizer (gpt2, byte, ids, or a path)"
    if not (source / "tokenizer.json").is_file():
        raise UserError(f"{source} has no tokenizer.json: {how_to_write_json(source)}, or {fix}")
    try:
        return load_tokenizer(source, config)
    except UserError as e:
        raise UserError(f"{e}; {fix}") from None


def _gguf_tokenizer(weights: GgufWeights, model: ModelConfig, named: str) -> Tokenizer:
    """Return the tokenizer `named`, or the tokenizer of a GGUF file, with the special tokens of the file."""
    where = str(weights.path)
    if not named:
        return gguf_tokenizer.read_tokenizer(weights.metadata, where)
    special = gguf_special.read_special_tokens(weights.metadata, where)
    tokenizer = make_tokenizer(named, model_vocab_size=model.vocab_size)
    entries = dict(special.tokenizer) | dict(tokenizer.special.tokenizer)
    tokenizer.special = SpecialTokens(special.generation, entries)
    return tokenizer
