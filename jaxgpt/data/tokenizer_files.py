"""Make tokenizers by name, or load them from files or the Hugging Face hub. All are saved as `tokenizer.json`."""

from __future__ import annotations

import itertools
import json
import re
from collections.abc import Iterable, Sequence
from functools import partial
from pathlib import Path
from typing import Any

from jaxgpt.config import MAX_VOCAB
from jaxgpt.data.cuts import GPT2_CUTS, cut, split_by
from jaxgpt.data.hub import reachable
from jaxgpt.data.special_tokens import read_special_tokens
from jaxgpt.data.tokenizer import (
    CHARACTERS,
    EOS_NAMES,
    ByteTokenizer,
    CharTokenizer,
    SubwordTokenizer,
    Tokenizer,
    WordTokenizer,
    byte_level,
    call_tokenizers,
)
from jaxgpt.errors import UserError, did_you_mean, short_repr
from jaxgpt.files import parse_json, read_bytes

FROM_TEXT = ("char", "word", "bpe")  # tokenizers that are made from the text
TOKENIZERS = (*FROM_TEXT, "byte", "gpt2", "ids")
FILE_BYTES = 1 << 27  # size limit of a tokenizer file; four times the largest published one
GPT2_REPO, GPT2_REVISION = "openai-community/gpt2", "607a30d783dfa663caf39e06633721c8d4cfcd7e"
GPT2_FILES = (("vocab.json", "merges.txt"), ("encoder.json", "vocab.bpe"))


class NoTokenizer(UserError):
    """There are no files of a tokenizer."""


def make_tokenizer(
    kind: str, text: str | Sequence[str] = "", vocab_size: int = 0, model_vocab_size: int = 0
) -> Tokenizer:
    """Make the tokenizer of `data.tokenizer`.

    Args:
        kind: char, word, byte, gpt2, bpe, ids, the path of a tokenizer.json, or a directory with one or with GPT-2's files.
        text: one or several texts to build char, word and bpe from.
        vocab_size: vocabulary size of bpe.
        model_vocab_size: vocabulary size of ids: the tokens are the numbers below it.
    """
    texts = [text] if isinstance(text, str) else text
    match kind:
        case "char":
            return CharTokenizer(set[str]().union(*texts))
        case "word":
            return WordTokenizer(itertools.chain.from_iterable(map(str.split, texts)))
        case "ids":
            if not model_vocab_size:
                raise UserError("data.tokenizer 'ids' needs the number of ids: set model.vocab_size")
            return WordTokenizer(str(i) for i in range(model_vocab_size))
        case "byte":
            return ByteTokenizer()
        case "gpt2":
            return _gpt2_from_hub()
        case "bpe":
            return train_bpe((cut(each, GPT2_CUTS) for each in texts), vocab_size)
    return load_tokenizer(Path(kind))


def load_tokenizer(path: Path) -> Tokenizer:
    """Load tokenizer.json, or a directory with tokenizer.json or GPT-2's two files, and its special tokens."""
    directory = path if path.is_dir() else path.parent
    pairs = [pair for pair in GPT2_FILES if path.is_dir() and all((path / name).is_file() for name in pair)]
    if pairs and not (path / "tokenizer.json").is_file():
        tokenizer: Tokenizer = _gpt2_from_files(path / pairs[0][0], path / pairs[0][1])
    else:
        tokenizer = _from_json(path / "tokenizer.json" if path.is_dir() else path)
    tokenizer.special = read_special_tokens(directory)
    return tokenizer


def without_ids_from(tokenizer: Tokenizer, vocab_size: int) -> Tokenizer:
    """Remove the added tokens with ids of `vocab_size` or more, such as Gemma 3's `<image_soft_token>`."""
    if tokenizer.vocab_size <= vocab_size or not isinstance(tokenizer, SubwordTokenizer):
        return tokenizer
    value = json.loads(tokenizer.to_json())
    removed = {token["content"] for token in value["added_tokens"] if token["id"] >= vocab_size}
    value["added_tokens"] = [token for token in value["added_tokens"] if token["content"] not in removed]
    if isinstance(vocab := value["model"].get("vocab"), dict):
        value["model"]["vocab"] = {token: i for token, i in vocab.items() if token not in removed}
    library = type(tokenizer.library)
    smaller = SubwordTokenizer(call_tokenizers(lambda: library.from_str(json.dumps(value)), "this vocabulary"))
    smaller.special = tokenizer.special
    return smaller


def train_bpe(texts: Iterable[Sequence[str]], vocab_size: int) -> SubwordTokenizer:
    """Train a byte-level BPE tokenizer.

    Args:
        texts: lists of texts; no word of the vocabulary crosses the boundary of two texts.
        vocab_size: maximum size of the vocabulary, including the 256 bytes and the end-of-text token.

    Raises:
        UserError: if the vocabulary is too small.
    """
    from tokenizers import pre_tokenizers, trainers

    if vocab_size < 257:
        raise UserError(f"data.vocab_size {vocab_size} is too small: bytes and the end token need 257 ids")
    tokenizer = byte_level({}, [])
    trainer = trainers.BpeTrainer(
        vocab_size=vocab_size,
        special_tokens=[EOS_NAMES[0]],
        initial_alphabet=sorted(pre_tokenizers.ByteLevel.alphabet()),
        show_progress=False,
    )
    tokenizer.train_from_iterator(texts, trainer)
    return SubwordTokenizer(tokenizer)


def _from_json(path: Path) -> Tokenizer:
    if not path.is_file():
        near = did_you_mean(str(path), TOKENIZERS)
        raise NoTokenizer(f"no tokenizer at {path}{near}: choose one of {', '.join(TOKENIZERS)}, or a path")
    data = read_bytes(path, FILE_BYTES)
    value = parse_json(data, str(path))
    try:
        return _checked(value, data.decode())
    except ValueError as e:
        raise UserError(f"{path} is not a readable tokenizer.json ({e})") from None
    except (TypeError, KeyError, AttributeError):
        raise UserError(f"{path} is not a tokenizer.json: it has no model with a vocabulary") from None


def _checked(value: Any, text: str) -> Tokenizer:
    """Load a tokenizer.json with unique ids and patterns that take linear time.

    Raises:
        ValueError: if it has others.
    """
    from tokenizers import Tokenizer as LibraryTokenizer

    for pattern in _patterns(value):
        bare = re.sub(r"\[\^?\]?[^]]*\]", "x", re.sub(r"\\[^g]", "x", pattern))
        if re.search(r"\)[*+{]|\\g", bare):  # only these can take exponential time
            raise ValueError(f"its pattern {short_repr(pattern)} repeats a group, which can take exponential time")
    vocab = value["model"]["vocab"]
    ids = list(vocab.values()) if isinstance(vocab, dict) else []
    if len(set(ids)) < len(ids):
        raise ValueError("two tokens have the same id")
    # Checked before loading: to write a vocabulary, the library counts up to the largest id.
    for i in [*ids, *(token["id"] for token in value.get("added_tokens") or ())]:
        if i >= MAX_VOCAB:
            raise ValueError(f"id {i} is not below {MAX_VOCAB}")
    if value == json.loads(ByteTokenizer().to_json()):
        return ByteTokenizer()
    library = call_tokenizers(lambda: LibraryTokenizer.from_str(text), "this file")
    if not library.get_vocab():
        raise ValueError("it has no tokens")
    value = json.loads(library.to_str())
    own = _from_words(value) if value["model"]["type"] == "WordLevel" else None
    return own or SubwordTokenizer(library)


def _from_words(value: Any) -> Tokenizer | None:
    """Return the character or word tokenizer with this tokenizer.json; None if it is neither.

    Raises:
        ValueError: if it has their structure and ids of a different kind.
    """
    vocab, splitter = value["model"]["vocab"], value["pre_tokenizer"]
    if value["normalizer"] or value["added_tokens"]:
        return None
    words = sorted(vocab, key=vocab.__getitem__)
    if [vocab[word] for word in words] != list(range(len(words))):
        raise ValueError("its ids are not 0, 1, 2, ...")
    if splitter == split_by(CHARACTERS):
        if words != sorted(words) or any(len(word) != 1 for word in words):
            raise ValueError("its characters are not sorted by code point")
        return CharTokenizer(words)
    if splitter == {"type": "WhitespaceSplit"}:
        if [word.split() for word in words] != [[word] for word in words]:
            raise ValueError("one of its words is empty or contains white space")
        return WordTokenizer(words)
    return None


def _patterns(value: Any) -> Iterable[str]:
    """Yield every regular expression in a tokenizer.json."""
    todo = [value.get(part) for part in ("normalizer", "pre_tokenizer", "decoder")]
    while todo:
        match todo.pop():
            case {"Regex": str() as pattern}:
                yield pattern
            case dict() as inner:
                todo += inner.values()
            case list() as inner:
                todo += inner


def _gpt2_from_files(vocab: Path, merges: Path) -> SubwordTokenizer:
    from tokenizers import AddedToken

    table = parse_json(read_bytes(vocab, FILE_BYTES), str(vocab))
    try:
        lines = read_bytes(merges, FILE_BYTES).decode("utf-8").split("\n")
        pairs = [(a, b) for a, b in (line.split(" ") for line in lines if line and not line.startswith("#version"))]
        library = call_tokenizers(lambda: byte_level(table, pairs), "these files")
    except ValueError as e:
        raise UserError(f"cannot read {vocab} and {merges} as the files of a BPE tokenizer ({e})") from None
    if library.token_to_id(EOS_NAMES[0]) is not None:
        library.add_special_tokens([AddedToken(EOS_NAMES[0], special=True)])
    return SubwordTokenizer(library)


def _gpt2_from_hub() -> SubwordTokenizer:
    from huggingface_hub import hf_hub_download
    from tokenizers import Tokenizer as LibraryTokenizer

    find = partial(hf_hub_download, GPT2_REPO, "tokenizer.json", revision=GPT2_REVISION)
    try:
        try:
            path = find(local_files_only=True)
        except Exception:
            path = find(local_files_only=not reachable())
    except Exception:
        raise UserError(
            "GPT-2's tokenizer is not in the cache of the Hugging Face Hub, which cannot be reached: use a directory with its "
            "files as the tokenizer, or a different tokenizer"
        ) from None
    return SubwordTokenizer(LibraryTokenizer.from_file(path))
