"""Load tokenizers from tokenizer.json and the files next to it, and save them."""

from __future__ import annotations

from collections.abc import Mapping
from dataclasses import replace
from pathlib import Path
from typing import Any

from jaxgpt.atomic import write_atomically, write_json
from jaxgpt.data.tokenizers.added_tokens import add_tokens, has_tokens
from jaxgpt.data.tokenizers.base import Tokenizer
from jaxgpt.data.tokenizers.bos import with_bos
from jaxgpt.data.tokenizers.special import SpecialTokens
from jaxgpt.data.tokenizers.special_files import SpecialFiles, read_special_files, read_tokenizer_class
from jaxgpt.data.tokenizers.subword import SubwordTokenizer, call_tokenizers, read_library
from jaxgpt.data.tokenizers.tokenizer_json import built_in, read_library_file, read_tokenizer_json
from jaxgpt.directories import (
    ADDED_TOKENS,
    CHAT_TEMPLATE,
    CHAT_TEMPLATES,
    GENERATION_CONFIG,
    SPECIAL_TOKENS_MAP,
    TOKENIZER_CONFIG,
)


def load_tokenizer(path: Path, config: Mapping[str, Any] | None = None) -> Tokenizer:
    """Load a tokenizer from tokenizer.json (or its directory) and the files next to it, as transformers does.

    Args:
        path: tokenizer.json, or its directory.
        config: content of the model's config.json, for the class of the tokenizer, and for ids that generation_config.json
            lacks. None: config.json in the directory is read for the class, but not for the ids.

    Raises:
        UserError: if a file cannot be read, or the files contradict each other.
    """
    path = path / "tokenizer.json" if path.is_dir() else path
    files = read_special_files(path.parent, config)
    tokenizer_class = read_tokenizer_class(path.parent, config)
    library = read_library_file(path, tokenizer_class)

    tokenizer = built_in(library)
    if tokenizer is None or not has_tokens(library, files.added):
        tokenizer = _with_added_tokens(library, files, path)
    set_special(tokenizer, files.special)
    if not tokenizer_class.keeps_bos:
        return with_bos(tokenizer, "no")
    return tokenizer


def _with_added_tokens(library: Any, files: SpecialFiles, path: Path) -> SubwordTokenizer:
    """Return the tokenizer of a library's tokenizer with the added and special tokens of the files next to `path`."""
    add_tokens(library, files.added, files.special.tokens, path.parent)
    # A special token that is replaced by an ordinary token stays special until the library writes and reads it again. Do this
    # now, so that the tokenizer equals the saved tokenizer.
    reloaded = read_library(library.to_str(), str(path))
    return call_tokenizers(lambda: SubwordTokenizer(reloaded), str(path))


def load_saved_tokenizer(path: Path) -> Tokenizer:
    """Load a tokenizer that `save_tokenizer` wrote; its tokenizer.json is used unchanged."""
    tokenizer = read_tokenizer_json(path)
    set_special(tokenizer, read_special_files(path.parent).special)
    return tokenizer


def set_special(tokenizer: Tokenizer, special: SpecialTokens) -> None:
    """Set the special tokens of a tokenizer, and record the names of tokens that its vocabulary lacks."""
    if isinstance(tokenizer, SubwordTokenizer):
        id_of = tokenizer.library.token_to_id
        missing = frozenset(name for name, token in special.names.items() if id_of(token) is None)
        special = replace(special, missing=missing)
    tokenizer.special = special


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
