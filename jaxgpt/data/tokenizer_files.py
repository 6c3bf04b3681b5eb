"""Make tokenizers by name, load them from files or the Hugging Face Hub, and save them."""

from __future__ import annotations

import itertools
import json
import math
from collections.abc import Iterator, Mapping, Sequence
from dataclasses import replace
from functools import partial
from pathlib import Path
from typing import Any

from jaxgpt.atomic import write_atomically, write_json
from jaxgpt.data.bos import with_bos
from jaxgpt.data.bpe import train_bpe as train_bpe
from jaxgpt.data.cuts import GPT2_CUTS, cut
from jaxgpt.data.special_files import SpecialFiles, read_special_files
from jaxgpt.data.subword import SubwordTokenizer, call_tokenizers
from jaxgpt.data.tokenizer import ByteTokenizer, CharTokenizer, Tokenizer, WordTokenizer
from jaxgpt.data_settings import FROM_TEXT as FROM_TEXT
from jaxgpt.directories import ADDED, GENERATION, MAP, TEMPLATE, TEMPLATES, TOKENIZER
from jaxgpt.errors import UserError, did_you_mean, plural, short_repr
from jaxgpt.files import read_bytes
from jaxgpt.hub import download
from jaxgpt.settings import MAX_VOCAB
from jaxgpt.strict_json import parse_json

TOKENIZERS = (*FROM_TEXT, "byte", "gpt2", "ids")
# Files of tokenizers without a tokenizer.json.
SHOWN = 8  # maximum number of tokens that a note names
WITHOUT_JSON = ("vocab.json", "merges.txt", "vocab.txt", "tokenizer.model", "spiece.model")
FILE_BYTES = 1 << 27  # maximum size of a tokenizer file in bytes: 4x the largest published file
GPT2_REPO = "openai-community/gpt2"
GPT2_REVISION = "607a30d783dfa663caf39e06633721c8d4cfcd7e"


def make_tokenizer(
    kind: str, text: str | Sequence[str] = "", vocab_size: int = 0, model_vocab_size: int = 0
) -> Tokenizer:
    """Make the tokenizer that `data.tokenizer` specifies; raise `UserError` if it cannot be made.

    Args:
        kind: name (char, word, byte, gpt2, bpe, ids), or the path of a tokenizer.json or its directory.
        text: one or several texts to build char, word or bpe from.
        vocab_size: maximum vocabulary size, for kind bpe.
        model_vocab_size: vocabulary size, for kind ids, where token i is the decimal number i.
    """
    texts = [text] if isinstance(text, str) else text
    match kind:
        case "char":
            return CharTokenizer(set[str]().union(*texts))
        case "word":
            return WordTokenizer(itertools.chain.from_iterable(map(str.split, texts)))
        case "ids":
            if not model_vocab_size:
                raise UserError("data.tokenizer 'ids' needs the number of ids: set --model.vocab-size")
            return WordTokenizer(str(i) for i in range(model_vocab_size))
        case "byte":
            return ByteTokenizer()
        case "gpt2":
            return _gpt2_from_hub()
        case "bpe":
            return train_bpe(partial(_beginnings, texts), vocab_size, sum(map(len, texts)))
    return load_tokenizer(Path(kind))


def _beginnings(texts: Sequence[str], size: int) -> Iterator[list[str]]:
    """Yield the beginnings of texts in pieces: `size` characters in total, divided in proportion to the texts' lengths."""
    total = sum(map(len, texts))
    for text in texts:
        length = math.ceil(len(text) * size / max(total, 1))
        yield cut(text[:length], GPT2_CUTS)


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
    tokenizer = _with_special(_from_json(path, files), files)
    return tokenizer if files.tokenizer_class.begins_texts else with_bos(tokenizer, "no")


def load_saved_tokenizer(path: Path) -> Tokenizer:
    """Load a tokenizer that `save_tokenizer` wrote; its tokenizer.json is used unchanged."""
    return _with_special(_from_json(path), read_special_files(path.parent, {}))


def _with_special(tokenizer: Tokenizer, files: SpecialFiles) -> Tokenizer:
    """Set the special tokens of a tokenizer from its files."""
    special = files.tokens
    if isinstance(tokenizer, SubwordTokenizer):
        has_id = tokenizer.library.token_to_id
        missing = frozenset(name for name, token in special.names.items() if has_id(token) is None)
        special = replace(special, missing=missing)
    tokenizer.special = special
    return tokenizer


def save_tokenizer(directory: Path, tokenizer: Tokenizer) -> None:
    """Write tokenizer.json and the files of its special tokens, each atomically; delete stale files."""
    write_atomically(directory / "tokenizer.json", tokenizer.to_json())
    for name, values in ((GENERATION, tokenizer.special.generation), (TOKENIZER, tokenizer.special.tokenizer)):
        if values:
            write_json(directory / name, values)
        else:
            (directory / name).unlink(missing_ok=True)
    # These files would override the tokens and templates in tokenizer_config.json.
    for path in (directory / TEMPLATE, directory / MAP, directory / ADDED, *(directory / TEMPLATES).glob("*.jinja")):
        path.unlink(missing_ok=True)


def without_ids_from(tokenizer: Tokenizer, vocab_size: int) -> Tokenizer:
    """Return a tokenizer without added tokens with ids of `vocab_size` or above, such as Gemma 3's `<image_soft_token>`."""
    if tokenizer.vocab_size <= vocab_size or not isinstance(tokenizer, SubwordTokenizer):
        return tokenizer
    value = json.loads(tokenizer.to_json())
    removed = {token["content"] for token in value["added_tokens"] if token["id"] >= vocab_size}
    value["added_tokens"] = [token for token in value["added_tokens"] if token["content"] not in removed]
    vocab = value["model"].get("vocab")
    if isinstance(vocab, dict):
        value["model"]["vocab"] = {token: i for token, i in vocab.items() if token not in removed}
    library = type(tokenizer.library)
    made = call_tokenizers(lambda: library.from_str(json.dumps(value)), "this vocabulary")
    smaller = SubwordTokenizer(made)
    smaller.special = tokenizer.special.without(removed, vocab_size)
    return smaller


def note_on_removed(whole: Tokenizer, smaller: Tokenizer) -> str:
    """Return a note on the tokens that `without_ids_from` has removed; "" if there are none."""
    lost = range(smaller.vocab_size, whole.vocab_size)
    if not lost:
        return ""
    names = ", ".join(filter(None, (whole.decode([each]) for each in lost[:SHOWN])))
    more = ", ..." if len(lost) > SHOWN else ""
    tokens = plural(len(lost), "token")
    return f"the embedding has no rows for {tokens} of the tokenizer, so the names are ordinary text: {names}{more}"


def _from_json(path: Path, files: SpecialFiles | None = None) -> Tokenizer:
    """Read tokenizer.json, and add the tokens that other files define."""
    from tokenizers import Tokenizer as LibraryTokenizer

    if not path.is_file():
        near = did_you_mean(str(path), TOKENIZERS)
        fix = f"choose {', '.join(TOKENIZERS)}, or the path of a tokenizer.json"
        has_others = any((path.parent / name).is_file() for name in WITHOUT_JSON)
        if path.name == "tokenizer.json" and has_others:
            fix = how_to_write(path.parent)
        raise UserError(f"no tokenizer at {path}{near}: {fix}")
    data = read_bytes(path, FILE_BYTES)
    value = parse_json(data, str(path))
    try:
        _check_ids(value)
        text = data.decode() if files is None else _with_class_options(data, value, files)
        library = call_tokenizers(lambda: LibraryTokenizer.from_str(text), "this file")
        known = _known(library)
    except ValueError as e:
        raise UserError(f"{path} is not a readable tokenizer.json ({e}): choose a different file") from None
    except (TypeError, KeyError, AttributeError):
        raise UserError(f"{path} is not a tokenizer.json: it has no vocabulary; choose a different file") from None
    has_all = files is None or all(library.token_to_id(token.content) is not None for token in files.added)
    if known is not None and has_all:
        return known
    if files is not None:
        _add_tokens(library, files, path.parent)
        # A replaced token stays special in memory, but not in a file: reload the tokens, so that they match a saved tokenizer.
        text = library.to_str()
        library = call_tokenizers(lambda: LibraryTokenizer.from_str(text), f"{path}")
    return call_tokenizers(lambda: SubwordTokenizer(library), f"{path}")


def _with_class_options(data: bytes, value: Mapping[str, Any], files: SpecialFiles) -> str:
    """Return a tokenizer.json, with the options of its class in transformers; `value` is the content of `data`."""
    changed = files.tokenizer_class.apply(value)
    return data.decode() if changed is value else json.dumps(changed)


def how_to_write(directory: Path) -> str:
    """Return the advice to write the tokenizer.json of a directory with other files of a tokenizer."""
    return f"write it with transformers, AutoTokenizer.from_pretrained('{directory}').save_pretrained('{directory}')"


def _add_tokens(library: Any, files: SpecialFiles, directory: Path) -> None:
    """Add the tokens that tokenizer.json lacks, and recognize each special token of the vocabulary in a text.

    As in transformers, the options in `added_tokens_decoder` replace the options in tokenizer.json.
    """
    from tokenizers import AddedToken as LibraryToken

    special = files.tokens.tokens
    known = {token.content for token in library.get_added_tokens_decoder().values()}
    for each in files.added:
        options = dict(each.options)
        options["special"] = options.get("special", False) or each.content in special
        is_new = library.token_to_id(each.content) is None
        if is_new or each.content not in known or each.file == TOKENIZER:
            library.add_tokens([LibraryToken(each.content, **options)])
        known.add(each.content)
        got = library.token_to_id(each.content)
        if is_new and got != each.id:
            raise UserError(
                f"{directory / each.file}: the token {short_repr(each.content)} has the id {each.id}, but would be added to "
                f"tokenizer.json with the id {got}: add it to tokenizer.json"
            )
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


def _known(library: Any) -> Tokenizer | None:
    """Return the built-in tokenizer with an equal tokenizer.json, or None."""
    vocab = library.get_vocab()
    value = json.loads(library.to_str())
    if not vocab:
        raise ValueError("it has no tokens")
    fast: list[Tokenizer] = [ByteTokenizer()]
    if value["model"]["type"] == "WordLevel":
        words = sorted(vocab, key=vocab.__getitem__)
        fast += [WordTokenizer(words), CharTokenizer("".join(words))]
    return next((own for own in fast if json.loads(own.to_json()) == value), None)


def _gpt2_from_hub() -> Tokenizer:
    try:
        return _from_json(download(GPT2_REPO, ["tokenizer.json"], revision=GPT2_REVISION) / "tokenizer.json")
    except UserError as e:
        raise UserError(f"the tokenizer gpt2: {e}") from None
