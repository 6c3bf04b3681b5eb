"""Tokenizers after save, load, export and import: equal ids and texts of strings with spaces, names and rare characters."""

from __future__ import annotations

import json
from pathlib import Path
from typing import Any

import pytest
from folders import llama_tokenizer
from gguf_files import BPE, SPM
from tokenizers import AddedToken, Tokenizer, models, pre_tokenizers, trainers

from jaxgpt.config import Config
from jaxgpt.convert.exported_tokens import exported_special_tokens
from jaxgpt.convert.gguf.describe import describe_tokenizer
from jaxgpt.convert.gguf.tokenizer import read_tokenizer
from jaxgpt.data.tokenizers.files import load_saved_tokenizer, load_tokenizer, save_tokenizer
from jaxgpt.data.tokenizers.new import make_tokenizer
from jaxgpt.data.tokenizers.subword import SubwordTokenizer
from jaxgpt.errors import UserError

TEXT = "the quick brown fox jumps 12345 over \u00e9 \u6f22\u5b57 \U0001f642 <x> lazy\n\ndogs  " * 20
STRINGS = (
    "",
    " ",
    " a",
    "a ",
    "  a  b  ",
    "\n\n a\n",
    "\r\n\tx",
    " <x> ",
    "a<x>b",
    "a <x> b  <x><x>\n<x>",
    "<unk> <0x41>\x00",
    "\u00e9 e\u0301 \ufb01 \u212b",
    "\u6f22\u5b57\u304b\u306a \ud55c\uad6d\uc5b4",
    "\U0001f642\U0001f469\u200d\U0001f467\U0001f3fd",
    "0123456789 12 3",
    "\u00a0 \u3000 \u200b x",
    "\u2581a \u2581\u2581b",
)


def from_file(folder: Path, value: dict[str, Any]) -> Any:
    folder.mkdir()
    (folder / "tokenizer.json").write_text(json.dumps(value))
    return load_tokenizer(folder)


def trained(folder: Path, kind: str, scheme: str) -> Any:
    """Return a tokenizer with Metaspace and two added tokens."""
    metaspace = pre_tokenizers.Metaspace(prepend_scheme=scheme)
    if kind == "unigram":
        library = Tokenizer(models.Unigram())
        trainer: Any = trainers.UnigramTrainer(vocab_size=120, special_tokens=["<unk>"], unk_token="<unk>")
    else:
        library = Tokenizer(models.BPE(unk_token="<unk>"))
        trainer = trainers.BpeTrainer(vocab_size=200, special_tokens=["<unk>"])
    library.pre_tokenizer = metaspace  # type: ignore[assignment]
    library.train_from_iterator([TEXT], trainer)
    library.add_tokens(
        [AddedToken("<x>", special=True, rstrip=True, normalized=False), AddedToken("fox", single_word=True)]
    )
    return from_file(folder, json.loads(library.to_str()))


KINDS = (
    "char",
    "word",
    "byte",
    "bpe",
    "llama",
    "chat",
    "gguf-bpe",
    "gguf-spm",
    "bpe-first",
    "bpe-always",
    "unigram-first",
)


def tokenizer_of(kind: str, folder: Path) -> Any:
    match kind:
        case "char" | "word" | "byte" | "bpe":
            return make_tokenizer(kind, TEXT, 400)
        case "llama" | "chat":
            return from_file(folder, llama_tokenizer(("<x>",) if kind == "chat" else ()))
        case "gguf-bpe" | "gguf-spm":
            return read_tokenizer(BPE if kind == "gguf-bpe" else SPM, "m.gguf")
    model, scheme = kind.split("-")
    return trained(folder, model, scheme)


def results(tokenizer: Any) -> list[Any]:
    """Return the ids of each string and their text, or the error of a string outside the vocabulary."""
    found: list[Any] = []
    for text in STRINGS:
        try:
            ids = tokenizer.encode(text).tolist()
            found.append((ids, tokenizer.encode_special(text).tolist(), tokenizer.decode(ids)))
        except UserError as e:
            found.append(str(e))
    return found


@pytest.mark.parametrize("kind", KINDS)
def test_ids_are_equal_after_save_load_export_and_import(kind: str, tmp_path: Path) -> None:
    tokenizer = tokenizer_of(kind, tmp_path / "source")
    expected = results(tokenizer)
    for folder in (tmp_path / "run", tmp_path / "run2"):
        folder.mkdir()
        save_tokenizer(folder, tokenizer)
        saved = load_saved_tokenizer(folder / "tokenizer.json")
        assert results(saved) == expected
        saved.special = exported_special_tokens(saved, Config())
        exported = tmp_path / f"{folder.name}-hf"
        exported.mkdir()
        save_tokenizer(exported, saved)
        tokenizer = load_tokenizer(exported)
        assert results(tokenizer) == expected
        assert type(tokenizer) is type(saved)


@pytest.mark.parametrize("kind", ["char", "byte", "bpe", "llama", "chat", "gguf-bpe", "gguf-spm"])
def test_ids_are_equal_after_export_to_a_gguf_file(kind: str, tmp_path: Path) -> None:
    pytest.importorskip("gguf")
    tokenizer = tokenizer_of(kind, tmp_path / "source")
    again = read_tokenizer(describe_tokenizer(tokenizer, tokenizer.vocab_size + 5).metadata, "m.gguf")
    assert results(again) == results(tokenizer)
    assert isinstance(again, SubwordTokenizer) == isinstance(tokenizer, SubwordTokenizer)
