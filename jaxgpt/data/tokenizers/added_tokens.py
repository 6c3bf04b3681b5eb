"""Added tokens: read them from the files next to tokenizer.json, and add them to a tokenizer of the library."""

from __future__ import annotations

from collections.abc import Collection, Mapping
from pathlib import Path
from typing import Any, NamedTuple

from jaxgpt.data.tokenizers.declared_tokens import token_text
from jaxgpt.directories import ADDED_TOKENS, TOKENIZER_CONFIG
from jaxgpt.errors import UserError, short_repr

OPTIONS = ("single_word", "lstrip", "rstrip", "normalized", "special")  # fields of an added token


class AddedToken(NamedTuple):
    """A token to add to the vocabulary of tokenizer.json."""

    id: int
    content: str
    options: Mapping[str, bool]  # single_word, lstrip, rstrip, normalized, special
    file: str  # the file that defines it


def read_decoder(values: Any, path: Path) -> list[AddedToken]:
    """Read `added_tokens_decoder`: `{"0": {"content": "<unk>", "special": true, ...}, ...}`."""
    where = f"{path}: added_tokens_decoder"
    if not isinstance(values, dict):
        raise UserError(f"{where} must be an object: {short_repr(values)}")
    added = []
    for key, value in values.items():
        if not key.isdecimal() or not isinstance(value, dict):
            raise UserError(f"{where} must map ids to objects with a content: {short_repr({key: value})}")
        content = token_text(value, f"{where}, id {key}")
        options = {name: option for name, option in value.items() if name in OPTIONS and isinstance(option, bool)}
        added.append(AddedToken(int(key), content, options, TOKENIZER_CONFIG))
    return sorted(added, key=lambda token: token.id)


def read_added_tokens(values: Mapping[str, Any], special: Collection[str], path: Path) -> list[AddedToken]:
    """Read the content of added_tokens.json: `{"<unk>": 0, ...}`; tokens that are also in `special` are special."""
    added = []
    for content, i in values.items():
        if type(i) is not int or i < 0:
            raise UserError(
                f"{path}: the id of {short_repr(content)} must be an integer of at least 0: {short_repr(i)}"
            )
        is_special = content in special
        options = {"normalized": not is_special, "special": is_special}
        added.append(AddedToken(i, content, options, ADDED_TOKENS))
    return sorted(added, key=lambda token: token.id)


def has_tokens(library: Any, added: Collection[AddedToken]) -> bool:
    """Return whether the vocabulary contains all tokens."""
    return all(library.token_to_id(token.content) is not None for token in added)


def add_tokens(library: Any, added: Collection[AddedToken], special: Collection[str], directory: Path) -> None:
    """Add the tokens that tokenizer.json lacks, and recognize each special token of the vocabulary in a text.

    As in transformers, the options in `added_tokens_decoder` replace the options in tokenizer.json.

    Args:
        library: tokenizer of the library, which is changed.
        added: the added tokens of the files next to tokenizer.json.
        special: all special tokens, including tokens that the vocabulary lacks.
        directory: directory of the files, for errors.

    Raises:
        UserError: if a new token has a different id than in its file.
    """
    from tokenizers import AddedToken as LibraryToken

    recognized = {token.content for token in library.get_added_tokens_decoder().values()}
    for token in added:
        is_new = library.token_to_id(token.content) is None
        replaces_options = token.file == TOKENIZER_CONFIG
        if is_new or replaces_options or token.content not in recognized:
            is_special = token.options.get("special", False) or token.content in special
            options = {**token.options, "special": is_special}
            library.add_tokens([LibraryToken(token.content, **options)])
            recognized.add(token.content)
        if is_new:
            _check_new_id(library.token_to_id(token.content), token, directory)

    # Special tokens of the vocabulary that no file adds.
    for content in sorted(set(special) - recognized):
        if library.token_to_id(content) is not None:
            library.add_tokens([LibraryToken(content, special=True)])


def _check_new_id(new_id: int, added: AddedToken, directory: Path) -> None:
    """Raise `UserError` if a token that was added to the vocabulary has a different id than in its file."""
    if new_id != added.id:
        raise UserError(
            f"{directory / added.file}: the token {short_repr(added.content)} has the id {added.id}, but would be added to "
            f"tokenizer.json with the id {new_id}: add it to tokenizer.json"
        )
