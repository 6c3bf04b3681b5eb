"""Read a tokenizer.json without the files next to it."""

from __future__ import annotations

import json
from collections.abc import Mapping
from pathlib import Path
from typing import Any

from jaxgpt.data.tokenizers.base import ByteTokenizer, CharTokenizer, Tokenizer, WordTokenizer
from jaxgpt.data.tokenizers.subword import SubwordTokenizer, call_tokenizers, read_library
from jaxgpt.data.tokenizers.transformers_class import NO_CLASS, TokenizerClass
from jaxgpt.data_settings import NAMED_TOKENIZERS
from jaxgpt.errors import UserError
from jaxgpt.files import read_bytes
from jaxgpt.settings import MAX_VOCAB
from jaxgpt.strict_json import parse_json
from jaxgpt.suggestions import did_you_mean

# Files of tokenizers without a tokenizer.json.
OTHER_FILES = ("vocab.json", "merges.txt", "vocab.txt", "tokenizer.model", "spiece.model")
FILE_BYTES = 1 << 27  # maximum size of a tokenizer.json in bytes: 4x the largest published file


def read_tokenizer_json(path: Path) -> Tokenizer:
    """Read a tokenizer.json, without special tokens of other files; raise `UserError` if it cannot be read."""
    library = read_library_file(path, NO_CLASS)
    return built_in(library) or call_tokenizers(lambda: SubwordTokenizer(library), str(path))


def read_library_file(path: Path, tokenizer_class: TokenizerClass) -> Any:
    """Read a tokenizer.json as a tokenizer of the library, with the options of its transformers class.

    Raises:
        UserError: if the file is missing or too large, or its content is not a tokenizer with tokens.
    """
    if not path.is_file():
        raise _missing(path)
    data = read_bytes(path, FILE_BYTES)
    tokenizer_json = parse_json(data, str(path))
    try:
        _check_ids(tokenizer_json)
        changed = tokenizer_class.apply(tokenizer_json)
        text = data.decode() if changed is tokenizer_json else json.dumps(changed)
        library = read_library(text, "this file")
        if not library.get_vocab():
            raise ValueError("it has no tokens")
    except ValueError as e:
        raise UserError(f"{path} is not a readable tokenizer.json ({e}): choose a different file") from None
    except (TypeError, KeyError, AttributeError):
        raise UserError(f"{path} is not a tokenizer.json: it has no vocabulary; choose a different file") from None
    return library


def built_in(library: Any) -> Tokenizer | None:
    """Return the tokenizer of bytes, words or characters with an equal tokenizer.json, or None."""
    tokenizer_json = json.loads(library.to_str())
    candidates: list[Tokenizer] = [ByteTokenizer()]
    if tokenizer_json["model"]["type"] == "WordLevel":
        vocab = library.get_vocab()
        words = sorted(vocab, key=vocab.__getitem__)
        candidates += [WordTokenizer(words), CharTokenizer("".join(words))]
    for tokenizer in candidates:
        if json.loads(tokenizer.to_json()) == tokenizer_json:
            return tokenizer
    return None


def how_to_write_json(directory: Path) -> str:
    """Return the advice to write the tokenizer.json of a directory with other files of a tokenizer."""
    return f"write it with transformers, AutoTokenizer.from_pretrained('{directory}').save_pretrained('{directory}')"


def _check_ids(tokenizer_json: Mapping[str, Any]) -> None:
    """Check that ids are distinct and below `MAX_VOCAB`; the library's export loops up to the largest id."""
    vocab = tokenizer_json["model"]["vocab"]
    ids = list(vocab.values()) if isinstance(vocab, dict) else []
    if len(set(ids)) < len(ids):
        raise ValueError("two tokens have the same id")
    largest = max([*ids, *(token["id"] for token in tokenizer_json.get("added_tokens") or ())], default=0)
    if largest >= MAX_VOCAB:
        raise ValueError(f"id {largest} is not below {MAX_VOCAB}")


def _missing(path: Path) -> UserError:
    """Return the error for a missing tokenizer.json, or a name that is not in `NAMED_TOKENIZERS`."""
    near = did_you_mean(str(path), NAMED_TOKENIZERS)
    fix = f"choose {', '.join(NAMED_TOKENIZERS)}, or the path of a tokenizer.json"
    if path.name == "tokenizer.json" and any((path.parent / name).is_file() for name in OTHER_FILES):
        fix = how_to_write_json(path.parent)
    return UserError(f"no tokenizer at {path}{near}: {fix}")
