"""Text to ids and back. Every tokenizer is kept as `tokenizer.json` in the format of Hugging Face's `tokenizers`."""

from __future__ import annotations

import json
import re
import unicodedata
from collections.abc import Callable, Iterable, Sequence
from pathlib import Path
from typing import Any, Protocol, TypeVar

import numpy as np

from jaxgpt.config import MAX_VOCAB, UserError, did_you_mean
from jaxgpt.strict import parse_json, read_bytes, shown

T = TypeVar("T")
KINDS = ("char", "word", "byte", "gpt2", "bpe", "ids")
EOS_NAMES = ("<|endoftext|>", "<|end_of_text|>", "<EOS>", "</s>")
LIMIT = 1 << 27  # bytes of a tokenizer's file; the largest published ones have a quarter
# Patterns that begin a word at every space which follows a word, so that a text may be cut there: Llama 3's and Qwen's.
CUTTABLE = tuple(
    r"(?i:'s|'t|'re|'ve|'m|'ll|'d)|[^\r\n\p{L}\p{N}]?\p{L}+|"
    + numbers
    + r"| ?[^\s\p{L}\p{N}]+[\r\n]*|\s*[\r\n]+|\s+(?!\S)|\s+"
    for numbers in (r"\p{N}{1,3}", r"\p{N}")
)
CHARACTERS = r"[\s\S]"  # the pattern of our own character tokenizers
GPT2_REPO, GPT2_REVISION = "openai-community/gpt2", "607a30d783dfa663caf39e06633721c8d4cfcd7e"


class Tokenizer(Protocol):
    """What the rest of the program knows of a tokenizer.

    Attributes:
        vocab_size: V; ids are below it.
        eos_id: the id that ends a text, if there is one.
        glue: what stands between two texts that are put together.
    """

    glue: str

    @property
    def vocab_size(self) -> int: ...
    @property
    def eos_id(self) -> int | None: ...
    def encode(self, text: str) -> np.ndarray:
        """Ids as int32. Raises `UserError` for text that has no ids."""
        ...

    def decode(self, ids: Sequence[int] | np.ndarray) -> str:
        """Text of ids."""
        ...

    def to_json(self) -> str:
        """The content of `tokenizer.json`."""
        ...


class CharTokenizer:
    """One id for each character, in the order of their code points."""

    eos_id: int | None = None
    glue = ""

    def __init__(self, characters: Iterable[str]) -> None:
        self.characters = sorted(set(characters))
        self._points = np.array([ord(c) for c in self.characters], np.uint32)

    @property
    def vocab_size(self) -> int:
        return len(self.characters)

    def encode(self, text: str) -> np.ndarray:
        points = np.frombuffer(text.encode("utf-32-le", "surrogatepass"), np.uint32)
        ids = np.searchsorted(self._points, points).clip(max=max(self.vocab_size - 1, 0))
        unknown = self._points[ids] != points if self.vocab_size else np.ones(len(points), bool)
        if unknown.any():
            place = int(unknown.argmax())
            char = text[place]
            name = unicodedata.name(char, "unnamed")
            raise UserError(
                f"character {char!r} (U+{ord(char):04X}, {name}) at position {place} is not among "
                f"the tokenizer's {self.vocab_size} characters: leave it out, or train on text that has it"
            )
        return ids.astype(np.int32)

    def decode(self, ids: Sequence[int] | np.ndarray) -> str:
        return "".join(self.characters[i] for i in np.asarray(ids, np.int64))

    def to_json(self) -> str:
        from tokenizers import Regex, decoders, pre_tokenizers

        vocab = {c: i for i, c in enumerate(self.characters)}
        return _word_level(vocab, pre_tokenizers.Split(Regex(CHARACTERS), "isolated"), decoders.Fuse())


class WordTokenizer:
    """One id for each word; words are what stands between white space."""

    glue = " "

    def __init__(self, words: Iterable[str]) -> None:
        self.words = list(dict.fromkeys(words))
        self._ids = {w: i for i, w in enumerate(self.words)}

    @property
    def vocab_size(self) -> int:
        return len(self.words)

    @property
    def eos_id(self) -> int | None:
        return next((self._ids[name] for name in EOS_NAMES if name in self._ids), None)

    def encode(self, text: str) -> np.ndarray:
        words = text.split()
        for place, word in enumerate(words):
            if word not in self._ids:
                raise UserError(
                    f"word {word!r} at position {place} is not among the tokenizer's {self.vocab_size} words"
                    + did_you_mean(word, self.words)
                )
        return np.array([self._ids[w] for w in words], np.int32)

    def decode(self, ids: Sequence[int] | np.ndarray) -> str:
        return " ".join(self.words[i] for i in np.asarray(ids, np.int64))

    def to_json(self) -> str:
        from tokenizers import pre_tokenizers

        return _word_level(self._ids, pre_tokenizers.WhitespaceSplit(), None)


class SubwordTokenizer:
    """Any tokenizer of the `tokenizers` library: bytes, GPT-2's BPE, one trained here, one of an imported model."""

    glue = ""

    def __init__(self, tokenizer: Any) -> None:
        # The names of special tokens within a user's text are text like any other.
        tokenizer.encode_special_tokens = True
        tokenizer.no_truncation()
        tokenizer.no_padding()
        self._tokenizer = tokenizer
        self._cuttable = _may_cut(tokenizer.to_str())
        self._eos = next((i for i in map(tokenizer.token_to_id, EOS_NAMES) if i is not None), None)
        if getattr(tokenizer.model, "dropout", None):
            tokenizer.model.dropout = None  # of merges, for training; a text has one row of ids
        # Not the number of words: ids may have holes.
        self._vocab_size = max(tokenizer.get_vocab().values(), default=-1) + 1

    @property
    def vocab_size(self) -> int:
        return self._vocab_size

    @property
    def eos_id(self) -> int | None:
        return self._eos

    def encode(self, text: str) -> np.ndarray:
        texts = _cut(text) if self._cuttable else [text]
        pieces = _asked(lambda: self._tokenizer.encode_batch(texts, add_special_tokens=False), "this text")
        return np.concatenate([np.array(p.ids, np.int32) for p in pieces] or [np.zeros(0, np.int32)])

    def decode(self, ids: Sequence[int] | np.ndarray) -> str:
        return _asked(lambda: self._tokenizer.decode([int(i) for i in ids], skip_special_tokens=False), "these ids")

    def to_json(self) -> str:
        return self._tokenizer.to_str(pretty=True)


def make_tokenizer(kind: str, text: str, vocab_size: int, model_vocab_size: int) -> Tokenizer:
    """The tokenizer that `data.tokenizer` names.

    Args:
        kind: char, word, byte, gpt2, bpe, ids, or the path of a tokenizer.json, or of a folder with one or with GPT-2's
            two files.
        text: what char, word and bpe are built from.
        vocab_size: of a trained bpe.
        model_vocab_size: of ids, whose words are the numbers below it.
    """
    match kind:
        case "char":
            return CharTokenizer(text)
        case "word":
            return WordTokenizer(text.split())
        case "ids":
            if not model_vocab_size:
                raise UserError("tokenizer 'ids' needs to know how many there are: set model.vocab_size")
            return WordTokenizer(str(i) for i in range(model_vocab_size))
        case "byte":
            return SubwordTokenizer(_byte_level(_byte_vocab(), []))
        case "gpt2":
            return _gpt2_from_hub()
        case "bpe":
            return _train_bpe(text, vocab_size)
    return load_tokenizer(Path(kind))


def load_tokenizer(path: Path) -> Tokenizer:
    """Read `tokenizer.json`, or a folder with it, with vocab.json and merges.txt, or with encoder.json and vocab.bpe."""
    if path.is_dir():
        for vocab, merges in (("vocab.json", "merges.txt"), ("encoder.json", "vocab.bpe")):
            if (path / vocab).is_file() and (path / merges).is_file() and not (path / "tokenizer.json").is_file():
                return _gpt2_from_files(path / vocab, path / merges)
        path = path / "tokenizer.json"
    if not path.is_file():
        raise UserError(f"no tokenizer at {path}{did_you_mean(str(path), KINDS)}: one of {', '.join(KINDS)}, or a path")
    data = read_bytes(path, LIMIT)
    value = parse_json(data, str(path))
    try:
        return _checked(value, data.decode())
    except ValueError as e:
        raise UserError(f"{path} is no tokenizer.json that can be read ({e})") from None
    except (TypeError, KeyError, AttributeError):
        raise UserError(f"{path} is no tokenizer.json: it has no model with a vocabulary") from None


def _checked(value: Any, text: str) -> Tokenizer:
    """A tokenizer.json, if nothing in it can hang, or give two words one id.

    Raises:
        ValueError: something can.
    """
    from tokenizers import Tokenizer as HFTokenizer

    for pattern in _patterns(value):
        bare = re.sub(r"\[\^?\]?[^]]*\]", "x", re.sub(r"\\[^g]", "x", pattern))
        # Nothing else can take a time that is exponential in the length of a text.
        if re.search(r"\)[*+{]|\\g", bare):
            raise ValueError(f"its pattern {shown(pattern)} repeats a group, which can take for ever")
    vocab = value["model"]["vocab"]
    if isinstance(vocab, dict) and len(set(vocab.values())) < len(vocab):
        raise ValueError("two of its words have the same id")
    library = _asked(lambda: HFTokenizer.from_str(text), "this file")
    tokenizer: Tokenizer = SubwordTokenizer(library)
    if not 0 < tokenizer.vocab_size <= MAX_VOCAB:
        raise ValueError(f"its ids are below {tokenizer.vocab_size}, at least 1 and at most {MAX_VOCAB} are expected")
    return _own(json.loads(library.to_str())) or tokenizer


def _own(value: Any) -> Tokenizer | None:
    """The character or word tokenizer that a tokenizer.json is, if it is one of ours to the letter.

    Raises:
        ValueError: it looks like one of ours, and its ids are not those that ours would have.
    """
    model, splitter = value["model"], value["pre_tokenizer"]
    if model["type"] != "WordLevel" or value["normalizer"] or value["added_tokens"]:
        return None
    words = sorted(model["vocab"], key=model["vocab"].__getitem__)
    if [model["vocab"][word] for word in words] != list(range(len(words))):
        raise ValueError("its ids are not 0, 1, 2, ...")
    if splitter == _split(CHARACTERS):
        if words != sorted(words) or any(len(word) != 1 for word in words):
            raise ValueError("its characters are not in the order of their code points")
        return CharTokenizer(words)
    if splitter == {"type": "WhitespaceSplit"}:
        if [word.split() for word in words] != [[word] for word in words]:
            raise ValueError("one of its words is empty, or has white space in it")
        return WordTokenizer(words)
    return None


def _patterns(value: Any) -> Iterable[str]:
    """Every regular expression in a tokenizer.json."""
    todo = [value.get(part) for part in ("normalizer", "pre_tokenizer", "decoder")]
    while todo:
        match todo.pop():
            case {"Regex": str() as pattern}:
                yield pattern
            case dict() as inner:
                todo += inner.values()
            case list() as inner:
                todo += inner


def _asked(question: Callable[[], T], what: str) -> T:
    """What the library answers. It raises bare Exceptions, and where its Rust gives up, what is not even one of those.

    Raises:
        UserError: it did.
    """
    try:
        return question()
    except BaseException as e:
        if not isinstance(e, Exception) and type(e).__name__ != "PanicException":
            raise
        raise UserError(f"the tokenizer cannot read {what} ({type(e).__name__}: {e})") from None


def _word_level(vocab: dict[str, int], pre_tokenizer: Any, decoder: Any) -> str:
    from tokenizers import Tokenizer as HFTokenizer
    from tokenizers import models

    tokenizer = HFTokenizer(models.WordLevel(vocab, unk_token="<unk>"))
    tokenizer.pre_tokenizer = pre_tokenizer
    if decoder is not None:
        tokenizer.decoder = decoder
    return tokenizer.to_str(pretty=True)


def _byte_level(vocab: dict[str, int], merges: list[tuple[str, str]]) -> Any:
    from tokenizers import Tokenizer as HFTokenizer
    from tokenizers import decoders, models, pre_tokenizers

    tokenizer = HFTokenizer(models.BPE(vocab, merges))
    tokenizer.pre_tokenizer = pre_tokenizers.ByteLevel(add_prefix_space=False)  # type: ignore[assignment]
    tokenizer.decoder = decoders.ByteLevel()  # type: ignore[assignment]
    return tokenizer


def _byte_vocab() -> dict[str, int]:
    """GPT-2's visible stand-in for each byte, with the byte's own value as its id."""
    visible = [*range(33, 127), *range(161, 173), *range(174, 256)]
    hidden = [b for b in range(256) if b not in visible]
    return {chr(b) if b in visible else chr(256 + hidden.index(b)): b for b in range(256)}


def _gpt2_from_files(vocab: Path, merges: Path) -> SubwordTokenizer:
    table = parse_json(read_bytes(vocab, LIMIT), str(vocab))
    try:
        lines = read_bytes(merges, LIMIT).decode("utf-8").split("\n")
        pairs = [(a, b) for a, b in (line.split(" ") for line in lines if line and not line.startswith("#version"))]
        tokenizer = _asked(lambda: _byte_level(table, pairs), "these files")
    except ValueError as e:
        raise UserError(f"{vocab} and {merges} are no BPE that can be read ({e})") from None
    return _with_eos(tokenizer)


def _gpt2_from_hub() -> SubwordTokenizer:
    from huggingface_hub import hf_hub_download
    from tokenizers import Tokenizer as HFTokenizer

    try:
        path = hf_hub_download(GPT2_REPO, "tokenizer.json", revision=GPT2_REVISION)
    except Exception as e:
        raise UserError(
            f"GPT-2's tokenizer is not in the hub's cache and cannot be downloaded ({type(e).__name__}): "
            f"give a folder with its files, --data.tokenizer PATH"
        ) from None
    return SubwordTokenizer(HFTokenizer.from_file(path))


def _train_bpe(text: str, vocab_size: int) -> SubwordTokenizer:
    from tokenizers import pre_tokenizers, trainers

    if vocab_size < 257:
        raise UserError(f"data.vocab_size {vocab_size} is too small: bytes and the end token take 257 ids")
    tokenizer = _byte_level({}, [])
    trainer = trainers.BpeTrainer(
        vocab_size=vocab_size,
        special_tokens=[EOS_NAMES[0]],
        initial_alphabet=sorted(pre_tokenizers.ByteLevel.alphabet()),
        show_progress=False,
    )
    tokenizer.train_from_iterator(_cut(text), trainer)
    return SubwordTokenizer(tokenizer)


def _with_eos(tokenizer: Any) -> SubwordTokenizer:
    from tokenizers import AddedToken

    if tokenizer.token_to_id(EOS_NAMES[0]) is not None:
        tokenizer.add_special_tokens([AddedToken(EOS_NAMES[0], special=True)])
    return SubwordTokenizer(tokenizer)


def _cut(text: str, size: int = 1 << 16) -> list[str]:
    """Pieces that a byte-level BPE encodes apart as it would together: each but the first begins with a space after a
    character that is no white space, where the patterns of GPT-2, Llama 3 and Qwen always begin a word. (A line's end
    would not do: theirs may belong to the punctuation before it.)"""
    pieces, start = [], 0
    while len(text) - start > size:
        cut = text.find(" ", start + size)
        while cut > 0 and text[cut - 1].isspace():
            cut = text.find(" ", cut + 1)
        if cut < 0:
            break
        pieces.append(text[start:cut])
        start = cut
    return [*pieces, text[start:]] if start < len(text) else pieces


def _may_cut(tokenizer_json: str) -> bool:
    """Whether pieces may be encoded apart: bytes of words found by a pattern, and nothing put before a text."""
    data = json.loads(tokenizer_json)
    splitter = data.get("pre_tokenizer") or {}
    steps = splitter.get("pretokenizers", [splitter])
    whole = not any(  # tokens that are looked for in the text itself, and reach over a cut
        not token["special"] and (token["rstrip"] or any(map(str.isspace, token["content"])))
        for token in data["added_tokens"]
    )
    splits = any(step.get("type") == "Split" or step.get("use_regex") for step in steps)
    return (
        whole and splits and all(map(_keeps_words, steps)) and (data["normalizer"] or {}).get("type") in (None, "NFC")
    )


def _keeps_words(step: dict[str, Any]) -> bool:
    """Whether a step of the splitting finds the same words in a piece of a text as in the whole."""
    if step.get("type") == "ByteLevel":
        return not step["add_prefix_space"]
    return any(step == _split(pattern) for pattern in CUTTABLE)


def _split(pattern: str) -> dict[str, Any]:
    """A splitting by a pattern, as tokenizer.json says it."""
    return {"type": "Split", "pattern": {"Regex": pattern}, "behavior": "Isolated", "invert": False}
