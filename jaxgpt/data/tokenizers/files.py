"""Load tokenizers from tokenizer.json and the files next to it, and save them."""

from __future__ import annotations

import json
from collections.abc import Collection, Mapping
from dataclasses import replace
from pathlib import Path
from typing import Any

from jaxgpt.atomic import write_atomically, write_json
from jaxgpt.data.tokenizers.base import ByteTokenizer, CharTokenizer, Tokenizer, WordTokenizer
from jaxgpt.data.tokenizers.bos import with_bos
from jaxgpt.data.tokenizers.special import SpecialTokens
from jaxgpt.data.tokenizers.special_files import AddedToken, SpecialFiles, read_special_files
from jaxgpt.data.tokenizers.subword import SubwordTokenizer, call_tokenizers
from jaxgpt.data.tokenizers.transformers_class import TokenizerClass
from jaxgpt.data_settings import NAMED_TOKENIZERS
from jaxgpt.directories import (
    ADDED_TOKENS,
    CHAT_TEMPLATE,
    CHAT_TEMPLATES,
    GENERATION_CONFIG,
    SPECIAL_TOKENS_MAP,
    TOKENIZER_CONFIG,
)
from jaxgpt.errors import UserError, short_repr
from jaxgpt.files import read_bytes
from jaxgpt.settings import MAX_VOCAB
from jaxgpt.strict_json import parse_json
from jaxgpt.suggestions import did_you_mean

# Files of tokenizers without a tokenizer.json.
OTHER_FILES = ("vocab.json", "merges.txt", "vocab.txt", "tokenizer.model", "spiece.model")
FILE_BYTES = 1 << 27  # maximum size of a tokenizer file in bytes: 4x the largest published file


def load_tokenizer(path: Path, config: Mapping[str, Any] | None = None) -> Tokenizer:
    """Load a tokenizer from tokenizer.json (or its directory) and the files next to it, as transformers does.

    Args:
        path: tokenizer.json, or its directory.
        config: content of the model's config.json, for ids that generation_config.json lacks. None: config.json in the
            directory is read, but only for the class of the tokenizer.

    Raises:
        UserError: if a file cannot be read, or the files contradict each other.
    """
    path = path / "tokenizer.json" if path.is_dir() else path
    files = read_special_files(path.parent, config)
    library = _read_library(path, files.tokenizer_class)

    tokenizer = _built_in(library)
    if tokenizer is None or not _has_tokens(library, files.added):
        _add_tokens(library, files, path.parent)
        # A replaced token stays special in memory, but not in a file: reload the tokens, so that they match a saved tokenizer.
        library = _from_str(library.to_str(), str(path))
        tokenizer = call_tokenizers(lambda: SubwordTokenizer(library), str(path))

    tokenizer.special = _special_tokens(tokenizer, files)
    return tokenizer if files.tokenizer_class.keeps_bos else with_bos(tokenizer, "no")


def load_saved_tokenizer(path: Path) -> Tokenizer:
    """Load a tokenizer that `save_tokenizer` wrote; its tokenizer.json is used unchanged."""
    tokenizer = read_tokenizer_json(path)
    tokenizer.special = _special_tokens(tokenizer, read_special_files(path.parent, {}))
    return tokenizer


def read_tokenizer_json(path: Path) -> Tokenizer:
    """Load a tokenizer.json without the files next to it; raise `UserError` if it cannot be read."""
    library = _read_library(path, TokenizerClass())
    return _built_in(library) or call_tokenizers(lambda: SubwordTokenizer(library), str(path))


def _special_tokens(tokenizer: Tokenizer, files: SpecialFiles) -> SpecialTokens:
    """Return the special tokens of the files, with the names of the tokens that the vocabulary lacks."""
    if not isinstance(tokenizer, SubwordTokenizer):
        return files.tokens
    id_of = tokenizer.library.token_to_id
    missing = frozenset(name for name, token in files.tokens.names.items() if id_of(token) is None)
    return replace(files.tokens, missing=missing)


def save_tokenizer(directory: Path, tokenizer: Tokenizer) -> None:
    """Write tokenizer.json and the files of its special tokens, each atomically; delete stale files."""
    write_atomically(directory / "tokenizer.json", tokenizer.to_json())
    contents = {GENERATION_CONFIG: tokenizer.special.generation, TOKENIZER_CONFIG: tokenizer.special.tokenizer}
    for name, values in contents.items():
        if values:
            write_json(directory / name, values)
        else:
            (directory / name).unlink(missing_ok=True)

    # These files would override the tokens and templates in tokenizer_config.json.
    for name in (CHAT_TEMPLATE, SPECIAL_TOKENS_MAP, ADDED_TOKENS):
        (directory / name).unlink(missing_ok=True)
    for path in (directory / CHAT_TEMPLATES).glob("*.jinja"):
        path.unlink(missing_ok=True)


def how_to_write_json(directory: Path) -> str:
    """Return the advice to write the tokenizer.json of a directory with other files of a tokenizer."""
    return f"write it with transformers, AutoTokenizer.from_pretrained('{directory}').save_pretrained('{directory}')"


def _read_library(path: Path, tokenizer_class: TokenizerClass) -> Any:
    """Read tokenizer.json with the options of its class as a tokenizer of the library."""
    if not path.is_file():
        raise _missing(path)
    data = read_bytes(path, FILE_BYTES)
    value = parse_json(data, str(path))
    try:
        _check_ids(value)
        changed = tokenizer_class.apply(value)
        library = _from_str(data.decode() if changed is value else json.dumps(changed), "this file")
        if not library.get_vocab():
            raise ValueError("it has no tokens")
    except ValueError as e:
        raise UserError(f"{path} is not a readable tokenizer.json ({e}): choose a different file") from None
    except (TypeError, KeyError, AttributeError):
        raise UserError(f"{path} is not a tokenizer.json: it has no vocabulary; choose a different file") from None
    return library


def _from_str(tokenizer_json: str, what: str) -> Any:
    """Parse a tokenizer.json with the library."""
    from tokenizers import Tokenizer as LibraryTokenizer

    return call_tokenizers(lambda: LibraryTokenizer.from_str(tokenizer_json), what)


def _missing(path: Path) -> UserError:
    """Return the error for a missing tokenizer.json, or a name that is not in `NAMED_TOKENIZERS`."""
    near = did_you_mean(str(path), NAMED_TOKENIZERS)
    fix = f"choose {', '.join(NAMED_TOKENIZERS)}, or the path of a tokenizer.json"
    if path.name == "tokenizer.json" and any((path.parent / name).is_file() for name in OTHER_FILES):
        fix = how_to_write_json(path.parent)
    return UserError(f"no tokenizer at {path}{near}: {fix}")


def _has_tokens(library: Any, added: Collection[AddedToken]) -> bool:
    """Return whether the vocabulary contains all tokens."""
    return all(library.token_to_id(token.content) is not None for token in added)


def _add_tokens(library: Any, files: SpecialFiles, directory: Path) -> None:
    """Add the tokens that tokenizer.json lacks, and recognize each special token of the vocabulary in a text.

    As in transformers, the options in `added_tokens_decoder` replace the options in tokenizer.json.
    """
    from tokenizers import AddedToken as LibraryToken

    special = files.tokens.tokens
    known = {token.content for token in library.get_added_tokens_decoder().values()}
    for added in files.added:
        options = dict(added.options)
        options["special"] = options.get("special", False) or added.content in special
        is_new = library.token_to_id(added.content) is None
        if is_new or added.content not in known or added.file == TOKENIZER_CONFIG:
            library.add_tokens([LibraryToken(added.content, **options)])
        known.add(added.content)

        new_id = library.token_to_id(added.content)
        if is_new and new_id != added.id:
            raise UserError(
                f"{directory / added.file}: the token {short_repr(added.content)} has the id {added.id}, but would be added to "
                f"tokenizer.json with the id {new_id}: add it to tokenizer.json"
            )

    # Special tokens that no file adds.
    for token in sorted(special - known):
        if library.token_to_id(token) is not None:
            library.add_tokens([LibraryToken(token, special=True)])


def _check_ids(value: Any) -> None:
    """Check that ids are distinct and below `MAX_VOCAB`; the library's export loops up to the largest id."""
    vocab = value["model"]["vocab"]
    ids = list(vocab.values()) if isinstance(vocab, dict) else []
    if len(set(ids)) < len(ids):
        raise ValueError("two tokens have the same id")
    largest = max([*ids, *(token["id"] for token in value.get("added_tokens") or ())], default=0)
    if largest >= MAX_VOCAB:
        raise ValueError(f"id {largest} is not below {MAX_VOCAB}")


def _built_in(library: Any) -> Tokenizer | None:
    """Return the tokenizer of bytes, words or characters with an equal tokenizer.json, or None."""
    value = json.loads(library.to_str())
    candidates: list[Tokenizer] = [ByteTokenizer()]
    if value["model"]["type"] == "WordLevel":
        vocab = library.get_vocab()
        words = sorted(vocab, key=vocab.__getitem__)
        candidates += [WordTokenizer(words), CharTokenizer("".join(words))]
    for tokenizer in candidates:
        if json.loads(tokenizer.to_json()) == value:
            return tokenizer
    return None
