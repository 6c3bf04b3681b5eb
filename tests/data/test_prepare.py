"""Preparing data: shards equal documents encoded one by one, for any block size, number of workers, and crashes."""

from __future__ import annotations

import bz2
import functools
import gzip
import hashlib
import io
import json
import lzma
import os
import random
import runpy
import shutil
import struct
import sys
import time
from collections.abc import Callable, Sequence
from dataclasses import fields, replace
from pathlib import Path
from typing import Any

import huggingface_hub.constants
import numpy as np
import pytest
from helpers import TEXT, repository

from jaxgpt.config import Config, DataConfig, ModelConfig, PrepareParams
from jaxgpt.data import open_data
from jaxgpt.data.prepared import text_portions
from jaxgpt.data.prepared.index import read_index, write_index
from jaxgpt.data.prepared.prepare import prepare
from jaxgpt.data.prepared.samples import sample_text
from jaxgpt.data.prepared.settings import settings_entry
from jaxgpt.data.prepared.sources import find_source
from jaxgpt.data.tokenizers.base import Tokenizer
from jaxgpt.data.tokenizers.bpe import train_bpe
from jaxgpt.data.tokenizers.files import load_tokenizer
from jaxgpt.data.tokenizers.new import make_tokenizer
from jaxgpt.data.tokenizers.same_ids import same_ids
from jaxgpt.data.tokenizers.special import SpecialTokens
from jaxgpt.errors import UserError
from jaxgpt.progress import Progress

WORDS = ("the", "Tea", "naïve", "is", "42", "\n", "\n\n", "  ", "don't", "東京、", "<|endoftext|>", "ab", "'s", "🙂")
OUT = Path("out")


def documents(n: int, seed: int = 0, longest: int = 60) -> list[str]:
    """Make documents of random words; some are empty or equal."""
    chosen = random.Random(seed)
    texts = [" ".join(chosen.choices(WORDS, k=chosen.randrange(longest))) for _ in range(n)]
    return [*texts, "", texts[0]]


@pytest.fixture(scope="module")
def tokenizer_path(tmp_path_factory: pytest.TempPathFactory) -> Path:
    path = tmp_path_factory.mktemp("tokenizer") / "tokenizer.json"
    path.write_text(train_bpe([[TEXT, *documents(50)]], 400).to_json())
    return path


@pytest.fixture
def params(tokenizer_path: Path) -> PrepareParams:
    return PrepareParams(str(tokenizer_path), shard_tokens=1000, val_fraction=0.2, workers=1)


@pytest.fixture(autouse=True)
def quick_disk(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(os, "fsync", lambda file: None)


@pytest.fixture
def small_blocks(monkeypatch: pytest.MonkeyPatch) -> None:
    """Split text files into small pieces, and record the progress after every piece."""
    monkeypatch.setattr("jaxgpt.data.prepared.text_portions.BLOCK", 300)
    monkeypatch.setattr("jaxgpt.data.prepared.piece_batches.BATCH", 1000)
    monkeypatch.setattr("jaxgpt.data.tokenizers.cuts.PIECE", 50)
    monkeypatch.setattr("jaxgpt.data.prepared.writing.SAVE_EVERY", -1.0)


def write_sources(parquet: bool = False) -> list[str]:
    """Write documents in every format, and return their texts in reading order."""
    Path("src/g").mkdir(parents=True)
    texts = list[str]()

    def chosen(n: int, seed: int) -> list[str]:
        texts.extend(documents(n, seed))
        return documents(n, seed)

    def lines(seed: int) -> bytes:
        return "\n".join(json.dumps({"id": 1, "text": text}) for text in chosen(40, seed)).encode()

    Path("src/a.jsonl").write_bytes(b"\xef\xbb\xbf" + lines(1) + b"\n\n")
    Path("src/b.jsonl.gz").write_bytes(gzip.compress(lines(2)))
    Path("src/c.jsonl.xz").write_bytes(lzma.compress(lines(3)))
    Path("src/d.NDJSON.bz2").write_bytes(bz2.compress(lines(4)))
    if parquet:
        import pyarrow
        from pyarrow import parquet as pq

        columns = {"n": [0] * 302, "text": chosen(300, 6)}
        pq.write_table(pyarrow.table(columns), "src/f.parquet", row_group_size=77)
    for i, text in enumerate(documents(10, 7)):
        Path(f"src/g/{i:02}.txt").write_text(text, newline="")
        texts.extend([text] if text else [])
    long = documents(100, 8, 90)
    Path("src/h.txt").write_bytes(b"\xef\xbb\xbf" + " ".join(long).encode())
    Path("src/i.txt.gz").write_bytes(gzip.compress("\n".join(long).encode()))
    Path("src/.hidden").write_text("not read")
    return [*texts, " ".join(long), "\n".join(long)]


def split(texts: Sequence[str], fraction: float) -> tuple[list[str], list[str]]:
    """Choose the training and validation documents by their first block."""
    hashes = [hashlib.sha256(text[: text_portions.BLOCK].encode()).digest()[:8] for text in texts]
    val = [i > 0 and int.from_bytes(each, "big") < fraction * 2**64 for i, each in enumerate(hashes)]
    return [t for t, v in zip(texts, val, strict=True) if not v], [t for t, v in zip(texts, val, strict=True) if v]


def llmc_shards(path: str, texts: Sequence[str]) -> list[bytes]:
    """Write files as llm.c's fineweb.py does: the end-of-text id before each document, 1,000 ids in each shard."""
    tokenizer = load_tokenizer(Path(path))
    ids = [i for text in texts for i in (tokenizer.eos_id, *tokenizer.encode(text).tolist())]
    parts = [ids[i : i + 1000] for i in range(0, len(ids), 1000)]
    return [struct.pack("<256i", 20240520, 1, len(p), *[0] * 253) + struct.pack(f"<{len(p)}H", *p) for p in parts]


def nanogpt_bin(path: str, texts: Sequence[str]) -> bytes:
    """Write a file as nanoGPT's prepare.py does: the end-of-text id after each document, no header."""
    tokenizer = load_tokenizer(Path(path))
    ids = [i for text in texts for i in (*tokenizer.encode(text).tolist(), tokenizer.eos_id)]
    return struct.pack(f"<{len(ids)}H", *ids)


def contents(directory: Path) -> dict[str, bytes]:
    return {path.name: path.read_bytes() for path in sorted(directory.glob("[!.]*"))}


def shards_of(directory: Path, name: str) -> list[bytes]:
    return [path.read_bytes() for path in sorted(directory.glob(f"{name}*.bin"))]


def config(**data: Any) -> Config:
    return Config(data=DataConfig(path="out", **data), model=ModelConfig(block_size=16))


def run(params: PrepareParams, out: Path = OUT, names: Sequence[str] = ("src",), **options: Any) -> dict[str, Any]:
    return prepare(names, out, params, **options)


@pytest.mark.parametrize("small", [False, True])
def test_shards_equal_those_of_llmc(params: PrepareParams, small: bool, request: pytest.FixtureRequest) -> None:
    if small:
        pytest.importorskip("pyarrow")
        request.getfixturevalue("small_blocks")
    texts = write_sources(parquet=small)
    index = run(params)
    train, val = split(texts, 0.2)
    assert len(val) > 10
    assert shards_of(OUT, "train") == llmc_shards(params.tokenizer, train)
    assert shards_of(OUT, "val") == llmc_shards(params.tokenizer, val)
    assert (index["splits"]["train"]["documents"], index["splits"]["val"]["documents"]) == (len(train), len(val))
    assert index["splits"]["train"]["bytes"] == sum(len(text.encode()) for text in train)
    # Without validation documents, the shards equal llm.c's, except that llm.c validates on its first shard.
    run(replace(params, val_fraction=0.0), Path("all"))
    assert shards_of(Path("all"), "train") == llmc_shards(params.tokenizer, texts)
    open_data(config())


@pytest.mark.usefixtures("small_blocks")
def test_files_equal_those_of_nanogpt(params: PrepareParams) -> None:
    """The number of workers changes nothing."""
    train, val = split(write_sources(), 0.2)
    run(replace(params, format="nanogpt"))
    assert Path("out/train.bin").read_bytes() == nanogpt_bin(params.tokenizer, train)
    assert Path("out/val.bin").read_bytes() == nanogpt_bin(params.tokenizer, val)
    Path("src/z.jsonl").write_text("{}")
    for workers in (1, 3):
        run(replace(params, workers=workers, on_error="skip"), Path(str(workers)))
    assert contents(Path("3")) == contents(Path("1"))


def test_training_reads_the_directory(params: PrepareParams) -> None:
    write_sources()
    run(params)
    data = open_data(config(documents="mask"))
    assert data.held_out
    assert data.tokenizer.to_json() == load_tokenizer(Path(params.tokenizer)).to_json()
    assert data.train.end_ids == data.tokenizer.end_ids
    assert open_data(config(tokenizer="byte")).tokenizer.to_json() == data.tokenizer.to_json()
    with pytest.raises(UserError, match=r"out was prepared with a different tokenizer .* than the model's"):
        open_data(config(), make_tokenizer("char", TEXT))
    # A mixture has the tokenizer of its prepared sources.
    Path("text.txt").write_text(TEXT)
    mixed = Config(data=DataConfig(mix=("out=1", "text.txt=1")), model=ModelConfig(block_size=16))
    assert open_data(mixed).tokenizer.to_json() == data.tokenizer.to_json()
    run(replace(params, tokenizer="bpe", vocab_size=300), Path("other"))
    with pytest.raises(UserError, match="other was prepared with a different tokenizer"):
        open_data(replace(mixed, data=DataConfig(mix=("out=1", "other=1"))))


def with_added(path: Path, *tokens: dict[str, Any]) -> Tokenizer:
    """Return a tokenizer with further added tokens, which have new ids unless they are given."""
    value = json.loads(path.read_text())
    for token in tokens:
        flags = dict.fromkeys(("single_word", "lstrip", "rstrip", "normalized", "special"), False)
        i = max([*value["model"]["vocab"].values(), *(each["id"] for each in value["added_tokens"])]) + 1
        value["added_tokens"].append({"id": i} | flags | token)
    changed = Path("changed") / "tokenizer.json"
    changed.parent.mkdir(exist_ok=True)
    changed.write_text(json.dumps(value))
    return load_tokenizer(changed)


USER = {"content": "<|user|>", "special": True}
MARK = {"content": "Qz", "normalized": False}
IN_MODEL = {  # added tokens of the model; the tokenizer of the data has MARK
    "none": [],
    "a different name": [MARK | {"content": "Zx"}],
    "a different id": [USER, MARK],
    "a special token": [MARK | {"special": True}],
    "a token that absorbs spaces": [MARK | {"rstrip": True}],
    "a word": [MARK | {"single_word": True}],
    "one more": [MARK, MARK | {"content": "Zx"}],
}


@pytest.mark.parametrize("case", IN_MODEL)
def test_added_tokens_change_the_ids_of_data(case: str, tokenizer_path: Path) -> None:
    own = with_added(tokenizer_path, MARK)
    given = with_added(tokenizer_path, *IN_MODEL[case])
    assert not same_ids(given, own)
    assert not same_ids(own, given)
    assert same_ids(own, with_added(tokenizer_path, MARK))


def test_an_option_of_added_tokens_without_effect_does_not_change_the_ids(tokenizer_path: Path) -> None:
    """Without a normalizer, a token that is searched in normalized text is found in the same places."""
    assert same_ids(with_added(tokenizer_path, MARK | {"normalized": True}), with_added(tokenizer_path, MARK))


def test_special_tokens_of_a_model_may_be_missing_in_its_data(tokenizer_path: Path) -> None:
    """Their names in a text are text, so the ids of the text are equal."""
    base = load_tokenizer(tokenizer_path)
    assert same_ids(with_added(tokenizer_path, USER), base)
    assert same_ids(base, with_added(tokenizer_path, USER))
    assert same_ids(with_added(tokenizer_path, USER | {"rstrip": True}), with_added(tokenizer_path, USER))


def test_a_special_token_with_two_meanings_is_a_different_tokenizer(tokenizer_path: Path) -> None:
    own = with_added(tokenizer_path, USER)
    assert not same_ids(with_added(tokenizer_path, USER | {"content": "<|tool|>"}), own)
    assert not same_ids(with_added(tokenizer_path, {"content": "<|tool|>", "special": True}, USER), own)


def test_the_end_of_documents_must_be_a_token_of_the_model(tokenizer_path: Path) -> None:
    own = with_added(tokenizer_path, {"content": "<|end|>", "special": True})
    own.special = SpecialTokens({"eos_token_id": own.vocab_size - 1})
    assert not same_ids(load_tokenizer(tokenizer_path), own)


def test_spaces_at_the_beginning_of_a_text_distinguish_tokenizers(tokenizer_path: Path) -> None:
    value = json.loads(tokenizer_path.read_text())
    value["normalizer"] = {"type": "Strip", "strip_left": True, "strip_right": False}
    Path("tokenizer.json").write_text(json.dumps(value))
    assert not same_ids(load_tokenizer(Path("tokenizer.json")), load_tokenizer(tokenizer_path))


def test_equal_tokenizers_of_characters_have_equal_ids() -> None:
    assert same_ids(make_tokenizer("char", TEXT), make_tokenizer("char", TEXT))


def change_index(**change: Any) -> None:
    write_index(OUT, (read_index(OUT) or {}) | change)


def edit_index(old: str, new: str) -> None:
    Path("out/index.json").write_text(Path("out/index.json").read_text().replace(old, new))


@pytest.mark.parametrize(
    ("damage", "message"),
    [
        (lambda: Path("out/train_000001.bin").unlink(), "train_000001.bin is missing"),
        (lambda: os.truncate("out/train_000000.bin", 1024), "train_000000.bin .* does not have 3,024 bytes"),
        (lambda: Path("out/train_9.bin").write_bytes(b"ab"), "train_9.bin is not in index.json"),
        (lambda: Path("out/tokenizer.json").write_text("{}"), "out/tokenizer.json is missing or does not match"),
        (lambda: change_index(complete=False), "out is unfinished: run its"),
        (lambda: change_index(kind="jaxgpt token shards"), "holds token ids, not text"),
        (lambda: Path("out/index.json").write_text("{"), "out/index.json: not valid JSON"),
        (lambda: edit_index('"tokens"', '"token"'), "out/index.json does not match its own checksum: prepare"),
    ],
)
def test_an_index_that_contradicts_its_files_is_rejected(
    params: PrepareParams, damage: Callable[[], None], message: str
) -> None:
    write_sources()
    run(params)
    damage()
    with pytest.raises(UserError, match=message):
        open_data(config())


class Killed(BaseException):
    """Simulates kill -9: no handler catches it."""


class Stopped(Progress):
    """Ends the command after the first batch of documents, as a kill does."""

    def __call__(self, done: int, total: int, detail: str = "") -> None:
        assert 0 <= done <= total
        assert "tokens" in detail
        raise Killed


def test_a_complete_directory_is_compared_with_its_checksums(params: PrepareParams) -> None:
    write_sources()
    run(params)
    before = contents(OUT)
    notes = list[str]()
    run(params, note=notes.append)
    assert contents(OUT) == before
    assert "out is complete" in notes[0]
    data = bytearray(before["train_000000.bin"])
    data[2000] ^= 1
    Path("out/train_000000.bin").write_bytes(data)
    with pytest.raises(UserError, match=r"train_000000.bin does not match its SHA-256"):
        run(params)
    Path("out/train_000000.bin").write_bytes(before["train_000000.bin"])
    Path("out/tokenizer.json").unlink()
    with pytest.raises(UserError, match=r"tokenizer.json is missing"):
        run(params)


@pytest.mark.parametrize(
    ("names", "change", "message"),
    [
        (
            ["src"],
            {"shard_tokens": 2000},
            "created with shard_tokens 1000, not 2000: use the same value, or a different --out",
        ),
        (["src"], {"format": "nanogpt"}, "created with format 'llm.c', not 'nanogpt'"),
        (["src"], {"tokenizer": "bpe"}, "created with tokenizer "),
        (["src/a.jsonl"], {}, r"created with sources src \(\d+ files, .* bytes\), not src/a.jsonl \(1 file,"),
        (["src"], {"tokenizer.json": 300}, "created with tokenizer_sha256"),
        (["src"], {"src/new.txt": 0}, "created with sources"),
    ],
)
def test_an_unfinished_directory_takes_the_same_arguments_only(
    params: PrepareParams, names: list[str], change: dict[str, Any], message: str
) -> None:
    write_sources()
    Path("tokenizer.json").write_text(Path(params.tokenizer).read_text())
    params = replace(params, tokenizer="tokenizer.json")
    with pytest.raises(Killed):
        run(params, progress=Stopped())
    before = contents(OUT)
    for path in (path for path in change if "." in path):
        Path(path).write_text(train_bpe([[TEXT]], 300).to_json())
    fields = {name: value for name, value in change.items() if "." not in name}
    with pytest.raises(UserError, match=message):
        run(replace(params, **fields), names=names)
    assert contents(OUT) == before
    with pytest.raises(UserError, match="out is unfinished: run its jaxgpt data prepare command again"):
        open_data(config())


def test_a_shard_that_lost_its_end(params: PrepareParams) -> None:
    write_sources()
    with pytest.raises(Killed):
        run(params, progress=Stopped())
    for shard in Path("out").glob("*.bin"):
        shard.write_bytes(b"")
    with pytest.raises(UserError, match=r"is missing or shorter than in index.json: delete out and start again"):
        run(params)


def test_nothing_is_lost_by_other_settings_before_the_first_document(params: PrepareParams) -> None:
    write_sources()
    Path("model").mkdir()
    Path("model/tokenizer.json").write_text(Path(params.tokenizer).read_text())
    Path("model/tokenizer_config.json").write_text('{"chat_template": "a"}')
    Path("one.txt").write_text("a")

    with pytest.raises(Killed):
        run(replace(params, tokenizer="model"), names=["one.txt"], progress=Stopped())
    assert load_tokenizer(OUT).special.chat_template == "a"
    Path("out/train_000007.bin").touch()
    run(params)
    run(params, Path("new"))
    assert contents(OUT) == contents(Path("new"))


LONG = b"caf\xc3\xa9 " * 100
LINES = b'{"text": "a"}\n{"text": "b"}\n'
BAD = [  # file, content, message, and number of readable characters
    ("b.jsonl", b'{"text": "a",\n"n": {\n}}\n', r"b.jsonl, \w+ 1: one JSON object is spread", ""),
    ("b.jsonl", b'{\n"text": "a"}\n', r"b.jsonl, \w+ 1: one JSON object is spread", ""),
    ("b.jsonl", b'{"text": "a"\n', r"b.jsonl, line 1: not valid JSON \(Expecting", ""),
    ("b.jsonl", b'{"text": "a"}\n[1]\n', "b.jsonl, line 2: expected an object, found list", "a"),
    ("b.jsonl", b'\n{"body": "a"}\n', r"line 2: no field 'text' in \['body'\]: choose a field with --field", ""),
    ("b.json", b'{\n"text": "a"\n', r"b.json: not valid JSON \(Expecting", ""),
    ("b.json", b'[{"text": "a"}, {"tex": "b"}]', r"b.json, item 2: no field 'text' in \['tex'\]", "a"),
    ("b.json", b'[{"text": "a"}, {"text": "b', "b.json: the array of the .json file has no end", "a"),
    ("b.jsonl", b'{"text": 3}', "b.jsonl, line 1: the field 'text' must be a string, not 3", ""),
    ("b.jsonl", b'{"text": "\\ud83d"}', "b.jsonl, line 1: the field 'text' has an unpaired surrogate", ""),
    (
        "b.jsonl",
        b'{"text": "a", "text": "b"}',
        r"line 1: the field 'text' must be a string, not \(a key .* twice\)",
        "",
    ),
    ("b.jsonl", b'{"text": "a\\u0000"}', r"b.jsonl, line 1: not text \(it has a NUL", ""),
    ("b.txt", b"caf\xe9 ", r"b.txt: not UTF-8 text: convert it to UTF-8 text, JSON Lines", ""),
    ("b.txt", LONG + b"\xe9 ", "b.txt: not UTF-8 text", ""),
    ("b.txt", b"a" * 700 + b" \0 b", "b.txt: not text", ""),
    ("b.txt", b"a" * 3000, r"b.txt: 1,\d+ characters without a place to cut them", ""),
    ("b.parquet", b"text " * 9, "cannot read b.parquet: Parquet magic bytes not found", ""),
    ("b.jsonl.gz", b"plain", "cannot read b.jsonl.gz: Not a gzipped file", ""),
    ("b.jsonl.gz", gzip.compress(LINES * 9, mtime=0)[:-9], "cannot read b.jsonl.gz: Compressed file ended", "ab" * 9),
]


def test_parquet_without_pyarrow(params: PrepareParams, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setitem(sys.modules, "pyarrow", None)
    Path("a.parquet").write_bytes(b"PAR1")
    with pytest.raises(UserError, match=r"a\.parquet needs the package pyarrow: pip install 'jaxgpt\[data\]'"):
        run(params, names=["a.parquet"])


ANYTHING = b'"score": NaN, "big": 1e999, "half": "\\ud83d", "twice": {"b": 1, "b": 2}, "long": ' + b"9" * 5000


@pytest.mark.parametrize("name", ["b.jsonl", "b.json"])
def test_fields_that_are_not_read_hold_anything(params: PrepareParams, name: str) -> None:
    record = b'{"text": "a", ' + ANYTHING + b"}"
    Path(name).write_bytes(record + b"\n" if name == "b.jsonl" else b"[" + record + b"]")
    index = run(replace(params, val_fraction=0.0), names=[name])
    assert index["skipped"]["documents"] == 0
    assert shards_of(OUT, "train") == llmc_shards(params.tokenizer, ["a"])


@pytest.mark.parametrize(("name", "data", "message", "between"), BAD)
def test_an_unreadable_document_is_named(
    params: PrepareParams, name: str, data: bytes, message: str, between: str, monkeypatch: pytest.MonkeyPatch
) -> None:
    if name == "b.parquet":
        pytest.importorskip("pyarrow")
    monkeypatch.setattr(text_portions, "BLOCK", 500)
    monkeypatch.setattr("jaxgpt.data.prepared.text_documents.UNCUT", 1000)
    Path("a.jsonl").write_text('{"text": "before"}\n')
    Path(name).write_bytes(data)
    Path("c.txt").write_text("after")
    names = ["a.jsonl", name, "c.txt"]
    params = replace(params, val_fraction=0.0)
    with pytest.raises(UserError, match=message) as raised:
        run(params, names=names)
    assert str(raised.value).endswith("; to skip such documents, use --on-error skip")
    index = run(replace(params, on_error="skip"), names=names)
    is_document = "line" in message or "item" in message or "not text" in message or "not valid" in message
    assert (index["skipped"]["documents"], index["skipped"]["files"]) == (is_document, not is_document)
    assert str(raised.value).startswith(index["skipped"]["first"][0])
    read = between[: index["splits"]["train"]["documents"] - 2]  # the first documents of a truncated archive are read
    assert shards_of(OUT, "train") == llmc_shards(params.tokenizer, ["before", *read, "after"])


@pytest.mark.parametrize("dropped", [b"caf\xe9 in Latin-1", b"x"], ids=["unreadable", "short"])
def test_the_first_document_that_is_not_dropped_is_for_training(params: PrepareParams, dropped: bytes) -> None:
    Path("a.txt").write_bytes(dropped)
    Path("b.txt").write_text("ok, in validation by its digest")
    params = replace(params, val_fraction=0.99, on_error="skip", min_characters=5)
    index = run(params, names=["a.txt", "b.txt"])
    assert [index["splits"][split]["documents"] for split in ("train", "val")] == [1, 0]


@pytest.mark.usefixtures("small_blocks")
@pytest.mark.parametrize("style", ["llm.c", "nanogpt"])
def test_the_unreadable_part_of_a_long_text_is_skipped(params: PrepareParams, style: Any) -> None:
    """Documents before and after a damaged text stay separate."""
    Path("a.txt").write_bytes(b"a word " * 5000 + b"\xff")
    Path("b.txt").write_text("after")
    params = replace(params, val_fraction=0.0, shard_tokens=10**6, on_error="skip", format=style)
    index = run(params, names=["a.txt", "b.txt"])
    assert (index["splits"]["train"]["documents"], index["skipped"]["files"]) == (2, 1)
    assert index["skipped"]["first"][0].endswith("; the rest of this file is lost")
    [data] = shards_of(OUT, "train")
    tokenizer = load_tokenizer(Path(params.tokenizer))
    ids = np.frombuffer(data, "<u2")[512 * (style == "llm.c") :]
    text = tokenizer.decode(ids).split("<|endoftext|>")
    readable, after = text[1:] if style == "llm.c" else text[:-1]
    assert ("a word " * 5000).startswith(readable)
    assert len(readable) > 7000
    assert after == "after"


@pytest.mark.parametrize("is_cut_as_before", [True, False])
def test_an_unfinished_directory_with_other_pieces_is_not_continued(
    is_cut_as_before: bool, params: PrepareParams
) -> None:
    """Version 0.1.0 did not cut texts for tokenizers that split off digits; an index counts the pieces."""
    value = json.loads(Path(params.tokenizer).read_text())
    if not is_cut_as_before:
        digits = {"type": "Digits", "individual_digits": True}
        value["pre_tokenizer"] = {"type": "Sequence", "pretokenizers": [digits, value["pre_tokenizer"]]}
    Path("digits.json").write_text(json.dumps(value))
    Path("a.txt").write_text("some words " * 10)
    params = replace(params, tokenizer="digits.json")
    index = run(params, names=["a.txt"])
    settings = {name: value for name, value in index["settings"].items() if name != "separator"}
    change_index(complete=False, settings=settings)
    if is_cut_as_before:
        run(params, names=["a.txt"])
    else:
        with pytest.raises(UserError, match=r"out was created by jaxgpt 0\.1\.0, which cut texts differently"):
            run(params, names=["a.txt"])


@pytest.mark.usefixtures("small_blocks")
def test_all_blocks_before_damage_are_read(monkeypatch: pytest.MonkeyPatch, params: PrepareParams) -> None:
    """The damage is in the third block."""
    block = 10_000  # above the 8,192 bytes that Python decodes at a time
    monkeypatch.setattr(text_portions, "BLOCK", block)
    Path("a.txt").write_bytes(b"a word " * 4000 + b"\xff")
    Path("b.txt").write_text("after")
    index = run(replace(params, val_fraction=0.0, on_error="skip"), names=["a.txt", "b.txt"])
    assert index["splits"]["train"]["documents"] == 2
    assert index["splits"]["train"]["bytes"] > 2 * block - 100


@pytest.mark.parametrize("separator", ["---", "\n---\n", "\n\n"])
@pytest.mark.parametrize("block", [3, 5, 8])
def test_line_breaks_around_separators_belong_to_no_document(
    block: int, separator: str, monkeypatch: pytest.MonkeyPatch
) -> None:
    """The blocks in which a file is read may end anywhere."""
    monkeypatch.setattr(text_portions, "BLOCK", block)
    random.seed(block)
    for _ in range(100):
        parts = random.choices(["a", "b", " ", "\n", "\r\n", "\n\n", "--", "---", "é"], k=30)
        text = "".join(parts)
        expected = [document.strip("\r\n") for document in text.split(separator)]
        found = [""]
        for portion in text_portions.read_portions(io.StringIO(text, newline=""), separator):
            found[-1] += portion.text
            if portion.is_last:
                found.append("")
        assert found[:-1] == expected


def test_a_long_run_of_line_breaks_takes_linear_time(monkeypatch: pytest.MonkeyPatch) -> None:
    """The line breaks may be inside of a document, or before a separator. Quadratic time was about 20 seconds."""
    monkeypatch.setattr(text_portions, "BLOCK", 100)
    breaks = "\n" * 500_000
    start = time.process_time()
    portions = [*text_portions.read_portions(io.StringIO(f"a{breaks}b{breaks}---c"), "---")]
    assert time.process_time() - start < 2
    assert [portion.text[-1] for portion in portions if portion.is_last] == ["b", "c"]
    assert sum(len(portion.text) for portion in portions) == len(breaks) + 3


@pytest.mark.parametrize(("separator", "is_noted"), [("\\n", True), ("</s>", True), ("\n", False)])
def test_a_separator_that_no_file_contains_is_noted(separator: str, is_noted: bool, params: PrepareParams) -> None:
    """In most shells, "\\n" is a backslash and the letter n."""
    Path("a.txt").write_text("one\ntwo\nthree\n")
    notes = list[str]()
    index = run(replace(params, separator=separator, val_fraction=0.0), names=["a.txt"], note=notes.append)
    assert index["splits"]["train"]["documents"] == (1 if is_noted else 3)
    assert any(f"--separator {separator!r} separates no documents" in each for each in notes) == is_noted


def test_files_with_structure_are_noted(params: PrepareParams) -> None:
    source = Path("tables")
    source.mkdir()
    for name in ("a.csv", "b.TSV", "c.json", "d.txt"):
        (source / name).write_text(f'{{"text": "words of {name}"}}')
    notes = list[str]()
    run(params, names=["tables"], note=notes.append)
    assert notes == [
        "tables/a.csv (and 1 more): CSV, TSV read as plain text; write its texts to JSON Lines or Parquet to read only them"
    ]


def test_names_that_are_not_utf8_are_escaped_in_the_index(params: PrepareParams) -> None:
    """Python reads such names with surrogates. An index that contains one could not be read again."""
    source = Path("names")
    source.mkdir()
    (source / "a.jsonl").write_text('{"text": "good"}')
    (source / os.fsdecode(b"caf\xe9.jsonl")).write_text('{"text": 1}\nnot JSON')
    params = replace(params, val_fraction=0.0, on_error="skip")
    index = run(params, names=["names"])
    assert [first[:31] for first in index["skipped"]["first"]] == [
        f"names/caf\\udce9.jsonl, line {n}: " for n in (1, 2)
    ]
    assert index["skipped"]["first"][0].count("line 1") == 1
    assert run(params, names=["names"]) == index


def test_unreadable_rows_are_named(params: PrepareParams) -> None:
    pyarrow = pytest.importorskip("pyarrow")
    from pyarrow import parquet

    column = pyarrow.array([b"good", None, b"b\0d", b"\xe9", b"end"])
    column = pyarrow.Array.from_buffers(pyarrow.string(), len(column), column.buffers())
    parquet.write_table(pyarrow.table({"text": column, "n": [1] * 5}), "a.parquet")
    params = replace(params, val_fraction=0.0)
    index = run(replace(params, on_error="skip"), names=["a.parquet"])
    assert shards_of(OUT, "train") == llmc_shards(params.tokenizer, ["good", "end"])
    assert [text.split(":")[0] for text in index["skipped"]["first"]] == [f"a.parquet, row {i}" for i in (1, 2, 3)]
    with pytest.raises(UserError, match=r"a.parquet has no column 'body': choose one of \['text', 'n'\] with --field"):
        run(replace(params, field="body"), Path("other"), ["a.parquet"])
    with pytest.raises(UserError, match=r"cannot read a.parquet: .*int64"):
        run(replace(params, field="n"), Path("other"), ["a.parquet"])
    with pytest.raises(
        UserError, match=r"no documents for training \(1 file skipped\): use other sources; the first error: \S"
    ):
        run(replace(params, field="n", on_error="skip"), Path("none"), ["a.parquet"])


def test_a_dataset_of_the_hub_is_its_files(params: PrepareParams, monkeypatch: pytest.MonkeyPatch) -> None:
    write_sources()
    Path("src/d.NDJSON.bz2").rename("src/d.ndjson.bz2")  # patterns of the hub distinguish case
    shutil.copytree("src", "hub/datasets--someone--texts/snapshots/commit")
    Path("hub/datasets--someone--texts/refs").mkdir()
    Path("hub/datasets--someone--texts/refs/main").write_text("commit")
    Path("hub/datasets--someone--texts/snapshots/commit/README.md").write_text("not a document")
    download = functools.partial(huggingface_hub.snapshot_download, cache_dir="hub")
    monkeypatch.setattr(huggingface_hub, "snapshot_download", download)
    monkeypatch.setattr(huggingface_hub.constants, "HF_HUB_OFFLINE", True)
    run(params)
    run(params, Path("all"), ["hf:someone/texts"])
    assert shards_of(Path("all"), "train") == shards_of(OUT, "train")
    run(params, Path("local"), ["src/a.jsonl"])
    run(params, Path("one"), ["hf:someone/texts/a.*"])
    assert shards_of(Path("one"), "train") == shards_of(Path("local"), "train")
    for name, message in {
        "someone/texts/b.csv": "no files",
        "someone/else": "not in the hub",
        "x": "not a valid",
    }.items():
        with pytest.raises(UserError, match=message):
            run(params, Path("none"), [f"hf:{name}"])
    assert not Path("none").exists()


def test_a_dataset_is_downloaded(params: PrepareParams, monkeypatch: pytest.MonkeyPatch) -> None:
    """The server of docs/data.md answers the requests of a download; only the files of the pattern are read."""
    write_sources()
    Path("served/someone").mkdir(parents=True)
    shutil.copytree("src", "served/someone/texts")
    serving = runpy.run_path(str(repository() / "benchmarks" / "hub.py"))["serving"]
    constants = huggingface_hub.constants
    monkeypatch.setattr(constants, "HF_HUB_OFFLINE", False)
    monkeypatch.setattr(constants, "HF_HUB_CACHE", str(Path("cache").resolve()))
    with serving(Path("served")) as url:
        monkeypatch.setattr(constants, "ENDPOINT", url)
        template = f"{url}/{{repo_id}}/resolve/{{revision}}/{{filename}}"
        monkeypatch.setattr(constants, "HUGGINGFACE_CO_URL_TEMPLATE", template)
        run(params, names=["hf:someone/texts/a.*"])
        with pytest.raises(UserError, match="someone/else at main: the repository does not exist"):
            run(params, Path("none"), ["hf:someone/else"])
    run(params, Path("local"), ["src/a.jsonl"])
    assert shards_of(OUT, "train") == shards_of(Path("local"), "train")
    assert [path.name for path in Path("cache").rglob("snapshots/*/*")] == ["a.jsonl"]


@pytest.mark.parametrize(
    ("names", "change", "message"),
    [
        (["empty"], {}, "empty has no files, or only empty files"),
        (["src"], {"field": "t\udce9"}, "field .* unpaired surrogate"),
        (["src"], {"tokenizer": "byte"}, "the tokenizer byte has no end-of-text token"),
        (["src"], {"tokenizer": "nowhere"}, "no tokenizer at nowhere"),
        (["src"], {"tokenizer": "char"}, "the tokenizer char has no end-of-text token"),
        (["src"], {"tokenizer": "bpe", "vocab_size": 70_000, "format": "nanogpt"}, "cannot hold .* 70,000"),
    ],
)
def test_bad_arguments_write_nothing(
    params: PrepareParams, names: list[str], change: dict[str, Any], message: str
) -> None:
    write_sources()
    Path("empty").mkdir()
    Path("empty/empty.txt").touch()
    with pytest.raises(UserError, match=message):
        run(replace(params, **change), names=names)
    assert not OUT.exists()


def test_bpe_is_trained_on_a_sample_of_every_file(params: PrepareParams) -> None:
    Path("src").mkdir()
    for letter in "abc":
        Path(f"src/{letter}.jsonl").write_text(f'{{"text": "{letter * 8} {letter * 8}"}}\n' * 500)
        Path(f"src/{letter}.empty").touch()
    sample = [*sample_text([find_source("src")], params, 3000)]
    texts = [text for pieces in sample for text in pieces]
    assert all(1000 <= sum(map(len, [text for text in texts if text[0] == letter])) < 1100 for letter in "abc")
    index = run(replace(params, tokenizer="bpe", vocab_size=290))
    tokenizer = load_tokenizer(Path("out/tokenizer.json"))
    assert all(len(tokenizer.encode(letter * 8)) == 1 for letter in "abc")
    assert index["tokenizer"]["name"] == "bpe"
    assert index["tokenizer"]["vocab_size"] == tokenizer.vocab_size


def test_the_end_token_of_a_model_separates_documents(params: PrepareParams) -> None:
    """The files next to tokenizer.json specify it; they are written again."""
    value = json.loads(Path(params.tokenizer).read_text())
    end = len(value["model"]["vocab"])
    value["added_tokens"].append(value["added_tokens"][0] | {"id": end, "content": "<|turn|>"})
    Path("model").mkdir()
    Path("model/tokenizer.json").write_text(json.dumps(value))
    Path("model/generation_config.json").write_text(json.dumps({"eos_token_id": [end, 0]}))
    Path("a.txt").write_text("one text " * 900)
    index = run(replace(params, tokenizer="model"), names=["a.txt"])
    assert index["tokenizer"]["end_id"] == end
    data = open_data(config(documents="mask"))
    assert data.train.end_ids == (end, 0)
    assert data.train.take(0, 1) == end


def test_large_vocabularies_have_32_bit_ids(params: PrepareParams) -> None:
    value = json.loads(Path(params.tokenizer).read_text())
    value["model"]["vocab"]["never"] = 70_000
    Path("large.json").write_text(json.dumps(value))
    Path("a.txt").write_text("text")
    run(replace(params, tokenizer="large.json"), names=["a.txt"])
    data = Path("out/train_000000.bin").read_bytes()
    assert struct.unpack("<3i", data[:12]) == (20240801, 7, (len(data) - 1024) // 4)
    tokenizer = load_tokenizer(Path("large.json"))
    assert np.frombuffer(data[1024:], "<u4").tolist() == [tokenizer.eos_id, *tokenizer.encode("text").tolist()]
    ids = open_data(Config(data=DataConfig(path="out", train_fraction=1.0), model=ModelConfig(block_size=1))).train
    assert ids.take(0, len(ids)).tolist() == np.frombuffer(data[1024:], "<u4").tolist()


def test_every_parameter_that_changes_the_output_is_compared_when_it_continues() -> None:
    recorded = settings_entry(PrepareParams(), [], tokenizer_sha256="", bos_ids=[])
    parameters = {field.name for field in fields(PrepareParams)}
    assert parameters - recorded.keys() == {"workers", "on_error", "bos"}
