"""Make tokenizers by name, load them from files or the Hugging Face Hub, and save them."""

from __future__ import annotations

import itertools
import json
from collections.abc import Iterable, Mapping, Sequence
from pathlib import Path
from typing import Any

from jaxgpt.config import FROM_TEXT as FROM_TEXT
from jaxgpt.config import MAX_VOCAB
from jaxgpt.data.cuts import GPT2_CUTS, cut
from jaxgpt.data.tokenizer import (
    EOS_NAMES,
    TOKENS,
    ByteTokenizer,
    CharTokenizer,
    SpecialTokens,
    SubwordTokenizer,
    Tokenizer,
    WordTokenizer,
    byte_level,
    call_tokenizers,
)
from jaxgpt.errors import UserError, did_you_mean, short_repr
from jaxgpt.files import parse_json, read_bytes, read_json, write_atomically, write_json
from jaxgpt.hub import download

TOKENIZERS = (*FROM_TEXT, "byte", "gpt2", "ids")
GENERATION, TOKENIZER = "generation_config.json", "tokenizer_config.json"
TEMPLATE = "chat_template.jinja"  # file of a chat template, used instead of the template in tokenizer_config.json
IDS = ("bos_token_id", "eos_token_id", "pad_token_id")
FILE_BYTES = 1 << 27  # maximum size of a tokenizer file in bytes: 4x the largest published file
GPT2_REPO, GPT2_REVISION = "openai-community/gpt2", "607a30d783dfa663caf39e06633721c8d4cfcd7e"


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
            return train_bpe((cut(each, GPT2_CUTS) for each in texts), vocab_size)
    return load_tokenizer(Path(kind))


def load_tokenizer(path: Path) -> Tokenizer:
    """Load tokenizer.json from its path or directory, with the special tokens in the files next to it."""
    path = path / "tokenizer.json" if path.is_dir() else path
    tokenizer = _from_json(path)
    tokenizer.special = read_special_tokens(path.parent)
    return tokenizer


def save_tokenizer(directory: Path, tokenizer: Tokenizer) -> None:
    """Write tokenizer.json and the files of its special tokens, each atomically; delete stale files."""
    write_atomically(directory / "tokenizer.json", tokenizer.to_json())
    for name, values in ((GENERATION, tokenizer.special.generation), (TOKENIZER, tokenizer.special.tokenizer)):
        if values:
            write_json(directory / name, values)
        else:
            (directory / name).unlink(missing_ok=True)
    (directory / TEMPLATE).unlink(missing_ok=True)  # file that would override the template in tokenizer_config.json


def read_special_tokens(directory: Path, config: Mapping[str, Any] | None = None) -> SpecialTokens:
    """Read the files of a directory that define special tokens and the chat template, if present.

    The files are generation_config.json, tokenizer_config.json and chat_template.jinja. `config` is the
    config.json of a transformers model; it provides ids that generation_config.json lacks.

    Raises:
        UserError: if a file cannot be read, or a token or id has the wrong type.
    """
    path, template_path = directory / TOKENIZER, directory / TEMPLATE
    generation = read_json(directory / GENERATION) if (directory / GENERATION).is_file() else {}
    for name in IDS:
        file, value = GENERATION, generation.get(name)
        if value is None:
            file, value = "config.json", (config or {}).get(name)
        if value is None:
            continue
        if any(type(i) is not int for i in (value if isinstance(value, list) else [value])):
            raise UserError(f"{directory / file}: {name} must be an integer or a list of integers: {short_repr(value)}")
        generation[name] = value
    values = read_json(path) if path.is_file() else {}
    template = values.get("chat_template")
    if isinstance(template, list):
        named = [each for each in template if isinstance(each, dict)]
        template = next((each.get("template") for each in named if each.get("name") == "default"), None)
    if template_path.is_file():
        try:
            template = read_bytes(template_path).decode("utf-8")
        except UnicodeDecodeError as e:
            raise UserError(f"{template_path} is not UTF-8 text (byte {e.start})") from None
    tokens = {name: values.get(name) for name in TOKENS} | {"chat_template": template}
    return SpecialTokens(generation, {n: _token(v, f"{path}: {n}") for n, v in tokens.items() if v is not None})


def _token(value: Any, where: str) -> str:
    """Return the text of a token, which older files store in an object."""
    text = value.get("content") if isinstance(value, dict) else value
    if not isinstance(text, str):
        raise UserError(f"{where} must be a string: {short_repr(value)}")
    return text


def without_ids_from(tokenizer: Tokenizer, vocab_size: int) -> Tokenizer:
    """Remove added tokens with ids of `vocab_size` or above, such as Gemma 3's `<image_soft_token>`."""
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
    """Train a byte-level BPE of at most `vocab_size` tokens; minimum 257: all bytes and end-of-text."""
    from tokenizers import pre_tokenizers, trainers

    if vocab_size < 257:
        raise UserError(f"data.vocab_size {vocab_size} is too small: bytes and the end-of-text token need 257 ids")
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
    from tokenizers import Tokenizer as LibraryTokenizer

    if not path.is_file():
        near = did_you_mean(str(path), TOKENIZERS)
        raise UserError(
            f"no tokenizer at {path}{near}: choose {', '.join(TOKENIZERS)}, or the path of a tokenizer.json"
        )
    data = read_bytes(path, FILE_BYTES)
    value = parse_json(data, str(path))
    try:
        _check_ids(value)
        return _known(call_tokenizers(lambda: LibraryTokenizer.from_str(data.decode()), "this file"))
    except ValueError as e:
        raise UserError(f"{path} is not a readable tokenizer.json ({e})") from None
    except (TypeError, KeyError, AttributeError):
        raise UserError(f"{path} is not a tokenizer.json: it has no model with a vocabulary") from None


def _check_ids(value: Any) -> None:
    """Check that ids are distinct and below `MAX_VOCAB`; the library's export loops up to the largest id."""
    vocab = value["model"]["vocab"]
    ids = list(vocab.values()) if isinstance(vocab, dict) else []
    if len(set(ids)) < len(ids):
        raise ValueError("two tokens have the same id")
    largest = max([*ids, *(token["id"] for token in value.get("added_tokens") or ())], default=0)
    if largest >= MAX_VOCAB:
        raise ValueError(f"id {largest} is not below {MAX_VOCAB}")


def _known(library: Any) -> Tokenizer:
    """Return the built-in tokenizer with an equal tokenizer.json, or a `SubwordTokenizer`."""
    vocab, value = library.get_vocab(), json.loads(library.to_str())
    if not vocab:
        raise ValueError("it has no tokens")
    fast: list[Tokenizer] = [ByteTokenizer()]
    if value["model"]["type"] == "WordLevel":
        words = sorted(vocab, key=vocab.__getitem__)
        fast += [WordTokenizer(words), CharTokenizer("".join(words))]
    return next((own for own in fast if json.loads(own.to_json()) == value), SubwordTokenizer(library))


def _gpt2_from_hub() -> Tokenizer:
    try:
        return _from_json(download(GPT2_REPO, ["tokenizer.json"], revision=GPT2_REVISION) / "tokenizer.json")
    except UserError as e:
        raise UserError(f"the tokenizer gpt2: {e}") from None
