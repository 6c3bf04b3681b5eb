"""Make tokenizers by name, or load them from files or the Hub. All are saved as `tokenizer.json`."""

from __future__ import annotations

import itertools
import json
import re
from collections.abc import Iterable, Sequence
from functools import partial
from pathlib import Path
from typing import Any

from jaxgpt.config import MAX_VOCAB, UserError, did_you_mean
from jaxgpt.data.corpus import Progress, Text, no_progress
from jaxgpt.data.encode import CHARACTERS, EOS_NAMES, byte_level, call_tokenizers, quiet_stderr
from jaxgpt.data.encode import ByteTokenizer as ByteTokenizer
from jaxgpt.data.encode import CharTokenizer as CharTokenizer
from jaxgpt.data.encode import SubwordTokenizer as SubwordTokenizer
from jaxgpt.data.encode import Tokenizer as Tokenizer
from jaxgpt.data.encode import WordTokenizer as WordTokenizer
from jaxgpt.data.hub import reachable
from jaxgpt.data.pieces import GPT2_CUTS, find_by, rejoin, split_by
from jaxgpt.data.special import read_special
from jaxgpt.errors import short_repr
from jaxgpt.files import parse_json, read_bytes

KINDS = ("char", "word", "byte", "gpt2", "bpe", "ids")
LIMIT = 1 << 27  # maximum bytes of a tokenizer file; four times the largest published one
GPT2_REPO, GPT2_REVISION = "openai-community/gpt2", "607a30d783dfa663caf39e06633721c8d4cfcd7e"


class NoTokenizer(UserError):
    """There are no files of a tokenizer."""


def make_tokenizer(
    kind: str,
    text: str | Text | Sequence[Text],
    vocab_size: int,
    model_vocab_size: int,
    progress: Progress = no_progress,
) -> Tokenizer:
    """Make the tokenizer of `data.tokenizer`.

    Args:
        kind: char, word, byte, gpt2, bpe, ids, the path of a tokenizer.json, or a folder with one or with GPT-2's two files.
        text: text to build char, word and bpe from, or several.
        vocab_size: vocabulary size of bpe.
        model_vocab_size: vocabulary size of ids, whose tokens are the numbers below it.
        progress: called while the text is read.
    """
    texts = [Text(text.encode(), "")] if isinstance(text, str) else [text] if isinstance(text, Text) else text
    blocks = itertools.chain.from_iterable(each.blocks(progress=progress) for each in texts)
    match kind:
        case "char":
            return CharTokenizer(set[str]().union(*map(set, blocks)))
        case "word":
            pieces = itertools.chain.from_iterable(rejoin(blocks, WordTokenizer.find))
            return WordTokenizer(word for piece in pieces for word in piece.split())
        case "ids":
            if not model_vocab_size:
                raise UserError("data.tokenizer 'ids' needs the number of ids: set model.vocab_size")
            return WordTokenizer(str(i) for i in range(model_vocab_size))
        case "byte":
            return ByteTokenizer()
        case "gpt2":
            return _gpt2_from_hub()
        case "bpe":
            return train_bpe(rejoin(blocks, find_by(GPT2_CUTS)), vocab_size)
    return load_tokenizer(Path(kind))


def load_tokenizer(path: Path) -> Tokenizer:
    """Load tokenizer.json, or a folder with tokenizer.json, vocab.json and merges.txt, or encoder.json and vocab.bpe.

    Special tokens are read from generation_config.json and tokenizer_config.json in the same folder.
    """
    tokenizer = _load(path)
    tokenizer.special = read_special(path if path.is_dir() else path.parent)
    return tokenizer


def _load(path: Path) -> Tokenizer:
    if path.is_dir():
        for vocab, merges in (("vocab.json", "merges.txt"), ("encoder.json", "vocab.bpe")):
            if (path / vocab).is_file() and (path / merges).is_file() and not (path / "tokenizer.json").is_file():
                return _gpt2_from_files(path / vocab, path / merges)
        path = path / "tokenizer.json"
    if not path.is_file():
        raise NoTokenizer(
            f"no tokenizer at {path}{did_you_mean(str(path), KINDS)}: one of {', '.join(KINDS)}, or a path"
        )
    data = read_bytes(path, LIMIT)
    value = parse_json(data, str(path))
    try:
        return _checked(value, data.decode())
    except ValueError as e:
        raise UserError(f"{path} is not a readable tokenizer.json ({e})") from None
    except (TypeError, KeyError, AttributeError):
        raise UserError(f"{path} is not a tokenizer.json: it has no model with a vocabulary") from None


def _checked(value: Any, text: str) -> Tokenizer:
    """Load a tokenizer.json after checking that it cannot hang and that ids are unique.

    Raises:
        ValueError: it fails a check.
    """
    from tokenizers import Tokenizer as HFTokenizer
    from tokenizers import models

    for pattern in _patterns(value):
        bare = re.sub(r"\[\^?\]?[^]]*\]", "x", re.sub(r"\\[^g]", "x", pattern))
        # Only these can take time exponential in the length of a text.
        if re.search(r"\)[*+{]|\\g", bare):
            raise ValueError(f"its pattern {short_repr(pattern)} repeats a group, which can take exponential time")
    vocab = value["model"]["vocab"]
    ids = list(vocab.values()) if isinstance(vocab, dict) else []
    if len(set(ids)) < len(ids):
        raise ValueError("two tokens have the same id")
    # Check before the library loads them: to write a vocabulary, it counts up to the largest id.
    for i in [*ids, *(token["id"] for token in value.get("added_tokens") or ())]:
        if i >= MAX_VOCAB:
            raise ValueError(f"id {i} is not below {MAX_VOCAB}")
    if value == json.loads(ByteTokenizer().to_json()):
        return ByteTokenizer()
    with quiet_stderr():
        library = call_tokenizers(lambda: HFTokenizer.from_str(text), "this file")
    tokenizer: Tokenizer = SubwordTokenizer(library)
    if not tokenizer.vocab_size:
        raise ValueError("it has no tokens")
    own = _own(json.loads(library.to_str())) if isinstance(library.model, models.WordLevel) else None
    return own or tokenizer


def _own(value: Any) -> Tokenizer | None:
    """Return a character or word tokenizer if the tokenizer.json is that of one of ours, else None.

    Raises:
        ValueError: it has the structure of ours but other ids.
    """
    model, splitter = value["model"], value["pre_tokenizer"]
    if value["normalizer"] or value["added_tokens"]:
        return None
    words = sorted(model["vocab"], key=model["vocab"].__getitem__)
    if [model["vocab"][word] for word in words] != list(range(len(words))):
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
    table = parse_json(read_bytes(vocab, LIMIT), str(vocab))
    try:
        lines = read_bytes(merges, LIMIT).decode("utf-8").split("\n")
        pairs = [(a, b) for a, b in (line.split(" ") for line in lines if line and not line.startswith("#version"))]
        tokenizer = call_tokenizers(lambda: byte_level(table, pairs), "these files")
    except ValueError as e:
        raise UserError(f"cannot read {vocab} and {merges} as the files of a BPE tokenizer ({e})") from None
    return _with_eos(tokenizer)


def _gpt2_from_hub() -> SubwordTokenizer:
    from huggingface_hub import hf_hub_download
    from tokenizers import Tokenizer as HFTokenizer

    find = partial(hf_hub_download, GPT2_REPO, "tokenizer.json", revision=GPT2_REVISION)
    try:
        try:
            path = find(local_files_only=True)
        except Exception:
            path = find(local_files_only=not reachable())
    except Exception:
        raise UserError(
            "GPT-2's tokenizer is not in the cache of the Hugging Face Hub, which cannot be reached: name a folder "
            "with its files as the tokenizer, or another tokenizer"
        ) from None
    return SubwordTokenizer(HFTokenizer.from_file(path))


def train_bpe(pieces: Iterable[Sequence[str]], vocab_size: int) -> SubwordTokenizer:
    """Train a byte-level BPE tokenizer.

    Args:
        pieces: lists of texts; no word of the vocabulary crosses the border of two texts.
        vocab_size: maximum size of the vocabulary, with the 256 bytes and the end-of-text token.

    Raises:
        UserError: the vocabulary is too small.
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
    tokenizer.train_from_iterator(pieces, trainer)
    return SubwordTokenizer(tokenizer)


def _with_eos(tokenizer: Any) -> SubwordTokenizer:
    from tokenizers import AddedToken

    if tokenizer.token_to_id(EOS_NAMES[0]) is not None:
        tokenizer.add_special_tokens([AddedToken(EOS_NAMES[0], special=True)])
    return SubwordTokenizer(tokenizer)
