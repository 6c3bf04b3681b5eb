"""Preparing data: shards equal documents encoded one by one, whatever the workers, chunks and crashes."""

from __future__ import annotations

import bz2
import contextlib
import gzip
import hashlib
import itertools
import json
import lzma
import multiprocessing
import os
import random
import struct
from collections.abc import Callable, Iterator, Sequence
from dataclasses import replace
from pathlib import Path
from typing import Any

import numpy as np
import pytest
from helpers import TEXT

from jaxgpt.config import Config, DataConfig, ModelConfig, UserError
from jaxgpt.data import open_data, shards
from jaxgpt.data.documents import (
    Chunk,
    Files,
    Lines,
    Part,
    Rows,
    Table,
    Unreadable,
    list_sources,
    read_chunks,
    sample_text,
)
from jaxgpt.data.fast import batch_encoder
from jaxgpt.data.pieces import GPT2_CUTS, LLAMA3, find_by, split_by
from jaxgpt.data.prepare import Settings, prepare
from jaxgpt.data.shards import document_starts, find_prepared
from jaxgpt.data.tokenizer import Tokenizer, load_tokenizer, make_tokenizer, train_bpe

WORDS = ("the", "Tea", "naïve", "is", "42", "\n", "\n\n", "  ", "don't", "東京、", "<|endoftext|>", "ab", "'s", "🙂")


def documents(n: int, seed: int = 0, longest: int = 60) -> list[str]:
    """Make documents of random words, some of them empty or equal."""
    chosen = random.Random(seed)
    texts = [" ".join(chosen.choices(WORDS, k=chosen.randrange(longest))) for _ in range(n)]
    return [*texts, "", texts[0]]


@pytest.fixture(scope="module")
def tokenizer_path(tmp_path_factory: pytest.TempPathFactory) -> Path:
    path = tmp_path_factory.mktemp("tokenizer") / "tokenizer.json"
    path.write_text(train_bpe([[TEXT, *documents(50)]], 400).to_json())
    return path


@pytest.fixture
def settings(tokenizer_path: Path) -> Settings:
    return Settings(("src",), str(tokenizer_path), shard_tokens=1000, val_fraction=0.2)


@pytest.fixture(autouse=True)
def quick_disk(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(os, "fsync", lambda file: None)


@pytest.fixture(params=[1 << 20, 300], ids=["large chunks", "small chunks"])
def chunks(request: pytest.FixtureRequest, monkeypatch: pytest.MonkeyPatch) -> None:
    """Divide the documents into chunks of two sizes; the smaller one divides text files, too."""
    monkeypatch.setattr("jaxgpt.data.documents.BLOCK", request.param)
    monkeypatch.setattr("jaxgpt.data.prepare.BATCH", request.param)
    if request.param < 1000:
        monkeypatch.setattr("jaxgpt.data.pieces.PIECE", 50)


def write_sources(folder: Path = Path("src"), arrow: bool = False) -> list[str]:
    """Write documents in every format, and return their texts in the order in which they are to be read."""
    folder.mkdir()
    texts = list[str]()

    def lines(seed: int) -> bytes:
        found = documents(40, seed)
        texts.extend(found)
        return "\n".join(json.dumps({"id": 1, "text": text}) for text in found).encode()

    (folder / "a.jsonl").write_bytes(b"\xef\xbb\xbf" + lines(1) + b"\n\n")
    (folder / "b.jsonl.gz").write_bytes(gzip.compress(lines(2)))
    (folder / "c.jsonl.xz").write_bytes(lzma.compress(lines(3)))
    (folder / "d.ndjson.bz2").write_bytes(bz2.compress(lines(4)))
    if arrow:
        import pyarrow
        from pyarrow import parquet

        with pyarrow.CompressedOutputStream(str(folder / "e.jsonl.zst"), "zstd") as out:
            out.write(lines(5))
        found = documents(300, 6)
        texts.extend(found)
        parquet.write_table(
            pyarrow.table({"n": [0] * len(found), "text": found}), folder / "f.parquet", row_group_size=77
        )
    (folder / "g").mkdir()
    for i, text in enumerate(documents(10, 7)):
        (folder / "g" / f"{i:02}.txt").write_bytes(text.encode())
        texts.extend([text] if text else [])
    long = documents(100, 8, 90)
    (folder / "h.txt").write_bytes(b"\xef\xbb\xbf" + " ".join(long).encode())
    (folder / "i.txt.gz").write_bytes(gzip.compress("\n".join(long).encode()))
    (folder / ".hidden").write_text("not read")
    return [*texts, " ".join(long), "\n".join(long)]


def is_val(text: str, fraction: float) -> bool:
    return int.from_bytes(hashlib.sha256(text.encode()).digest()[:8], "big") < fraction * 2**64


def split(texts: Sequence[str], fraction: float) -> tuple[list[str], list[str]]:
    """Choose the training and validation documents."""
    val = [bool(i) and is_val(text, fraction) for i, text in enumerate(texts)]
    return [t for t, v in zip(texts, val, strict=True) if not v], [t for t, v in zip(texts, val, strict=True) if v]


def llmc_shards(tokenizer: Tokenizer, texts: Sequence[str], shard: int) -> list[bytes]:
    """Write files as the fineweb.py of llm.c does: the end-of-text id before each document, shards filled exactly."""
    ids = [i for text in texts for i in (tokenizer.eos_id, *tokenizer.encode(text).tolist())]
    parts = [ids[i : i + shard] for i in range(0, len(ids), shard)]
    return [struct.pack("<256i", 20240520, 1, len(p), *[0] * 253) + struct.pack(f"<{len(p)}H", *p) for p in parts]


def nanogpt_bin(tokenizer: Tokenizer, texts: Sequence[str]) -> bytes:
    """Write a file as the prepare.py of nanoGPT does: the end-of-text id after each document, no header."""
    ids = [i for text in texts for i in (*tokenizer.encode(text).tolist(), tokenizer.eos_id)]
    return struct.pack(f"<{len(ids)}H", *ids)


def contents(folder: Path) -> dict[str, bytes]:
    return {path.name: path.read_bytes() for path in sorted(folder.iterdir())}


def shards_of(folder: Path, name: str) -> list[bytes]:
    return [path.read_bytes() for path in sorted(folder.glob(f"{name}*.bin"))]


@pytest.mark.parametrize("arrow", [False, True])
@pytest.mark.usefixtures("chunks")
def test_shards_equal_those_of_llmc(settings: Settings, arrow: bool) -> None:
    if arrow:
        pytest.importorskip("pyarrow")
    texts = write_sources(arrow=arrow)
    index = prepare(settings, Path("out"), 1)
    tokenizer = load_tokenizer(Path(settings.tokenizer))
    train, val = split(texts, 0.2)
    assert len(val) > 10
    assert shards_of(Path("out"), "train") == llmc_shards(tokenizer, train, 1000)
    assert shards_of(Path("out"), "val") == llmc_shards(tokenizer, val, 1000)
    assert (index["splits"]["train"]["documents"], index["splits"]["val"]["documents"]) == (len(train), len(val))
    assert index["splits"]["train"]["bytes"] == sum(len(text.encode()) for text in train)
    assert index["sources"][0]["documents"] == len(texts)
    # Without validation documents, the shards are those of llm.c, whose first one is for validation.
    prepare(replace(settings, val_fraction=0.0), Path("all"), 1)
    assert shards_of(Path("all"), "train") == llmc_shards(tokenizer, texts, 1000)
    assert find_prepared(Path("all")) is not None


@pytest.mark.usefixtures("chunks")
def test_files_equal_those_of_nanogpt(settings: Settings) -> None:
    texts = write_sources()
    prepare(replace(settings, format="nanogpt"), Path("out"), 1)
    tokenizer = load_tokenizer(Path(settings.tokenizer))
    train, val = split(texts, 0.2)
    assert Path("out/train.bin").read_bytes() == nanogpt_bin(tokenizer, train)
    assert Path("out/val.bin").read_bytes() == nanogpt_bin(tokenizer, val)


@pytest.mark.parametrize("style", ["llm.c", "nanogpt"])
def test_documents_start_where_the_index_says(settings: Settings, style: Any) -> None:
    texts = write_sources()
    prepare(replace(settings, format=style), Path("out"), 1)
    tokenizer = load_tokenizer(Path(settings.tokenizer))
    data = open_data(config(documents="flow"))
    for name, tokens, expected in zip(("train", "val"), (data.train, data.val), split(texts, 0.2), strict=True):
        starts, offset = list[int](), 0
        for part, found in zip(tokens.parts, document_starts(Path("out"))[name], strict=True):
            starts, offset = starts + [int(start) + offset for start in found], offset + len(part)
        ids = tokens.take(0, len(tokens))
        ends = [tokenizer.eos_id]
        for text, start, end in zip(expected, starts, [*starts[1:], len(ids)], strict=True):
            document = tokenizer.encode(text).tolist()
            assert ids[start:end].tolist() == (ends + document if style == "llm.c" else document + ends)


def config(**data: Any) -> Config:
    return Config(data=DataConfig(path="out", **data), model=ModelConfig(block_size=16))


def test_training_reads_the_folder(settings: Settings) -> None:
    write_sources()
    prepare(settings, Path("out"), 1)
    data = open_data(config(documents="mask"))
    assert data.held_out
    assert data.tokenizer.to_json() == load_tokenizer(Path(settings.tokenizer)).to_json()
    assert data.train.end_ids == data.tokenizer.end_ids
    open_data(config(tokenizer=settings.tokenizer))
    with pytest.raises(UserError, match=r"another tokenizer .* than data\.tokenizer byte: leave out --data\.tokenizer"):
        open_data(config(tokenizer="byte"))
    with pytest.raises(UserError, match=r"leave out --data.tokenizer ids"):
        open_data(config(tokenizer="ids"))
    with pytest.raises(UserError, match="than the tokenizer of the model"):
        open_data(config(), make_tokenizer("char", TEXT, 0, 0))


def test_a_mixture_uses_the_tokenizer_of_its_prepared_sources(settings: Settings) -> None:
    write_sources()
    prepare(settings, Path("out"), 1)
    Path("text.txt").write_text(TEXT)
    mixed = Config(data=DataConfig(mix=("out=1", "text.txt=1")), model=ModelConfig(block_size=16))
    assert open_data(mixed).tokenizer.to_json() == load_tokenizer(Path(settings.tokenizer)).to_json()
    prepare(replace(settings, tokenizer="bpe", vocab_size=300), Path("other"), 1)
    mixed = Config(data=DataConfig(mix=("out=1", "other=1")), model=ModelConfig(block_size=16))
    with pytest.raises(
        UserError, match=r"other was prepared with another tokenizer .* than the tokenizer of the model"
    ):
        open_data(mixed)


def damage_index(change: Callable[[dict[str, Any]], None]) -> None:
    index = json.loads(Path("out/index.json").read_text())
    change(index)
    Path("out/index.json").write_text(json.dumps(index))


@pytest.mark.parametrize(
    ("damage", "message"),
    [
        (lambda: Path("out/train_000001.bin").unlink(), "train_000001.bin is missing, but index.json says 3,024 bytes"),
        (
            lambda: os.truncate("out/train_000000.bin", 1024),
            "train_000000.bin has 1,024 bytes, but index.json says 3,024",
        ),
        (lambda: os.truncate("out/val_000000.starts", 8), "val_000000.starts has 8 bytes"),
        (lambda: Path("out/train_9.bin").write_bytes(b"ab"), "train_9.bin is not in index.json"),
        (lambda: Path("out/tokenizer.json").write_text("{}"), "not the tokenizer of out/index.json"),
        (lambda: damage_index(lambda index: index.update(complete=False)), "out is not finished: run its"),
        (lambda: damage_index(lambda index: index.pop("splits")), "index.json is damaged"),
        (
            lambda: damage_index(lambda index: index["splits"]["val"].update(tokens=7)),
            "tokens of the val shards do not",
        ),
        (lambda: Path("out/index.json").write_text("{"), "out/index.json: not valid JSON"),
    ],
)
def test_an_index_that_contradicts_its_files_is_refused(
    settings: Settings, damage: Callable[[], None], message: str
) -> None:
    write_sources()
    prepare(replace(settings, val_fraction=0.4), Path("out"), 1)
    damage()
    with pytest.raises(UserError, match=message):
        open_data(config())


def test_a_foreign_index_is_ignored(settings: Settings) -> None:
    write_sources()
    prepare(settings, Path("out"), 1)
    Path("out/index.json").write_text('{"shards": []}')
    with pytest.raises(UserError, match="holds token ids, not text: choose their tokenizer"):
        open_data(config())
    with pytest.raises(UserError, match="not empty and was not written by jaxgpt data prepare"):
        prepare(settings, Path("out"), 1)


def flattened(chunks: Sequence[Chunk]) -> list[tuple[str, str]]:
    """Join the parts of each document."""
    merged = list[tuple[str, str]]()
    for place, text in ((place, str(text)) for chunk in chunks for place, text in chunk.payload.documents()):
        if merged and merged[-1][0] == place:
            merged[-1] = place, merged[-1][1] + text
        else:
            merged.append((place, text))
    return merged


def test_reading_continues_from_any_cursor(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr("jaxgpt.data.documents.BLOCK", 500)
    monkeypatch.setattr("jaxgpt.data.pieces.PIECE", 50)
    write_sources()
    _, files = list_sources(["src"], Table())
    found = list(read_chunks(files, Table(), find_by(GPT2_CUTS)))
    assert len(found) > 50
    for i, chunk in enumerate(found):
        rest = read_chunks(files, Table(), find_by(GPT2_CUTS), chunk.span.end)
        assert flattened(list(rest)) == flattened(found[i + 1 :]), chunk.span


def test_every_kind_of_chunk_can_be_sent_to_a_worker(monkeypatch: pytest.MonkeyPatch) -> None:
    pytest.importorskip("pyarrow")
    monkeypatch.setattr("jaxgpt.data.documents.BLOCK", 300)
    monkeypatch.setattr("jaxgpt.data.pieces.PIECE", 50)
    write_sources(arrow=True)
    Path("src/j.pdf").write_bytes(b"%PDF-1.7" + b"-" * 400)
    Path("src/k.jsonl.gz").write_bytes(b"plain")
    found = list(read_chunks(list_sources(["src"], Table())[1], Table(), find_by(GPT2_CUTS)))
    assert {type(chunk.payload) for chunk in found} == {Files, Lines, Part, Rows, Unreadable}
    here, there = multiprocessing.Pipe()
    sent = []
    for chunk in found:
        here.send(chunk)
        sent.append(there.recv())
    assert flattened(sent) == flattened(found)
    assert [chunk.span for chunk in sent] == [chunk.span for chunk in found]


@pytest.mark.usefixtures("chunks")
def test_json_lines_named_json_are_recognized_by_their_first_line() -> None:
    texts = documents(40)
    lines = "\n".join(json.dumps({"id": 1, "body": text}) for text in texts).encode()
    for name, data in (("a.json", lines), ("b.json.gz", gzip.compress(b"\xef\xbb\xbf" + lines))):
        Path(name).write_bytes(data)
        _, files = list_sources([name], Table("body"))
        read = read_chunks(files, Table("body"), find_by(GPT2_CUTS))
        assert [text for chunk in read for _, text in chunk.payload.documents()] == texts
    pretty = json.dumps({"body": ["a b"] * 100}, indent=1)
    for other in (pretty, f"[{pretty}]", '{"text": 1}\n{"body": "a"}', "body\n", "3"):
        Path("a.json").write_text(other)
        read = read_chunks(list_sources(["a.json"], Table("body"))[1], Table("body"), find_by(GPT2_CUTS))
        assert flattened(list(read)) == [("a.json", other)]


class Killed(BaseException):
    """Stands for kill -9: nothing catches it."""


@pytest.mark.parametrize("crashes", [7, pytest.param(70, marks=pytest.mark.long)])
@pytest.mark.parametrize("style", ["llm.c", "nanogpt"])
def test_a_crash_at_any_write_changes_nothing(
    settings: Settings, style: Any, crashes: int, monkeypatch: pytest.MonkeyPatch
) -> None:
    """Stop before each operation on the file system, tear the write, and start again."""
    monkeypatch.setattr("jaxgpt.data.documents.BLOCK", 3000)
    monkeypatch.setattr("jaxgpt.data.prepare.SAVE_EVERY", -1.0)
    write_sources()
    settings = replace(settings, format=style, shard_tokens=4000)
    prepare(settings, Path("whole"), 1)
    expected = contents(Path("whole"))
    left = total = 0

    def crashing(operation: Callable[..., Any]) -> Callable[..., Any]:
        def run(*args: Any) -> Any:
            nonlocal left, total
            left, total = left - 1, total + 1
            if left < 0:
                if operation is write and len(args[1]) > 1:
                    write(args[0], args[1][: len(args[1]) // 2])
                raise Killed
            return operation(*args)

        return run

    write = shards._write
    monkeypatch.setattr(shards, "_write", crashing(write))
    monkeypatch.setattr(os, "replace", crashing(os.replace))
    monkeypatch.setattr(os, "fsync", crashing(os.fsync))
    left = 10**9
    prepare(settings, Path("counted"), 1)
    operations = total
    assert operations > 100
    for first in range(0, operations, operations // crashes):
        out, left = Path(f"out{first}"), first
        with pytest.raises(Killed):
            prepare(settings, out, 1)
        left = operations // 3  # and once more
        with contextlib.suppress(Killed):
            prepare(settings, out, 1)
        left = 10**9
        prepare(settings, out, 1)
        assert contents(out) == expected, f"crash before operation {first} of {operations}"


@pytest.mark.parametrize("workers", [2, pytest.param(3, marks=pytest.mark.ci)])
def test_workers_change_nothing(settings: Settings, workers: int, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr("jaxgpt.data.documents.BLOCK", 3000)
    write_sources()
    prepare(settings, Path("one"), 1)
    prepare(settings, Path("several"), workers)
    assert contents(Path("several")) == contents(Path("one"))


def test_a_finished_folder_is_compared_with_its_checksums(settings: Settings) -> None:
    write_sources()
    prepare(settings, Path("out"), 1)
    before, notes = contents(Path("out")), list[str]()
    prepare(settings, Path("out"), 1, note=notes.append)
    assert contents(Path("out")) == before
    assert "is complete" in notes[0]
    data = bytearray(before["train_000000.bin"])
    data[2000] ^= 1
    Path("out/train_000000.bin").write_bytes(data)
    with pytest.raises(UserError, match=r"train_000000.bin does not have the SHA-256 in index.json"):
        prepare(settings, Path("out"), 1)


def interrupted(settings: Settings, **options: Any) -> None:
    """Write some documents, and stop."""

    def report(status: Any) -> None:
        raise Killed

    with pytest.raises(Killed):
        prepare(settings, Path("out"), 1, report=report, **options)


def test_a_finished_shard_is_saved(settings: Settings) -> None:
    write_sources()
    interrupted(settings)
    index = json.loads(Path("out/index.json").read_text())
    assert index["progress"]["splits"]["train"]["shards"][0]["file"] == "train_000000.bin"


@pytest.mark.parametrize(
    ("change", "message"),
    [
        ({"shard_tokens": 2000}, "begun with --shard-tokens 1000, not --shard-tokens 2000"),
        ({"val_fraction": 0.1}, "begun with --val-fraction 0.2"),
        ({"format": "nanogpt"}, "begun with --format llm.c"),
        ({"table": Table("body")}, "begun with --field text"),
        ({"sources": ("src/a.jsonl",)}, "begun with the sources src: use the same"),
        ({"tokenizer": "bpe"}, "begun with --tokenizer "),
    ],
)
def test_other_settings_are_refused(
    settings: Settings, change: dict[str, Any], message: str, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr("jaxgpt.data.documents.BLOCK", 3000)
    monkeypatch.setattr("jaxgpt.data.prepare.SAVE_EVERY", -1.0)
    write_sources()
    interrupted(settings)
    before = contents(Path("out"))
    with pytest.raises(UserError, match=message):
        prepare(replace(settings, **change), Path("out"), 1)
    assert contents(Path("out")) == before


def test_changed_sources_and_tokenizers_are_refused(settings: Settings, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr("jaxgpt.data.prepare.SAVE_EVERY", -1.0)
    write_sources()
    Path("tokenizer.json").write_text(Path(settings.tokenizer).read_text())
    settings = replace(settings, tokenizer="tokenizer.json")
    interrupted(settings)
    Path("tokenizer.json").write_text(train_bpe([[TEXT]], 300).to_json())
    with pytest.raises(UserError, match=r"tokenizer.json has changed since out was begun"):
        prepare(settings, Path("out"), 1)
    Path("src/new.txt").write_text("new")
    with pytest.raises(UserError, match=r"src has changed since out was begun \(then 18 files"):
        prepare(settings, Path("out"), 1)


def test_an_unfinished_folder_is_not_read_as_text(settings: Settings) -> None:
    write_sources()
    interrupted(replace(settings, shard_tokens=10**6))
    assert not list(Path("out").glob("*.bin"))
    with pytest.raises(UserError, match="out is not finished: run its jaxgpt data prepare command again"):
        open_data(config())


def test_nothing_is_lost_by_other_settings_before_the_first_ids(settings: Settings) -> None:
    write_sources()
    Path("bad.jsonl").write_text("{}\n")
    bad = replace(settings, sources=("bad.jsonl",))
    with pytest.raises(UserError, match=r"bad.jsonl, line 1"):
        prepare(bad, Path("out"), 1)
    assert prepare(settings, Path("out"), 1)["complete"]


def test_the_special_tokens_of_an_earlier_tokenizer_are_not_kept(settings: Settings) -> None:
    """If nothing has been written with it."""
    Path("model").mkdir()
    Path("model/tokenizer.json").write_text(Path(settings.tokenizer).read_text())
    Path("model/generation_config.json").write_text('{"eos_token_id": 1}')
    Path("model/tokenizer_config.json").write_text('{"chat_template": "a"}')
    Path("bad.jsonl").write_text("{}\n")
    with pytest.raises(UserError, match=r"bad.jsonl, line 1"):
        prepare(replace(settings, sources=("bad.jsonl",), tokenizer="model"), Path("out"), 1)
    assert load_tokenizer(Path("out")).special.chat_template == "a"
    write_sources()
    prepare(settings, Path("out"), 1)
    prepare(settings, Path("new"), 1)
    assert contents(Path("out")) == contents(Path("new"))


BAD: dict[str, tuple[str, bytes, str]] = {
    "invalid JSON": ("b.jsonl", b'{"text": "a"\n', r"b.jsonl, line 1: not valid JSON \(Expecting"),
    "no object": ("b.jsonl", b'{"text": "a"}\n[1]\n', "b.jsonl, line 2: expected an object, found list"),
    "missing field": ("b.jsonl", b'\n{"body": "a"}\n', r"b.jsonl, line 2: no field 'text', but \['body'\]: name the"),
    "not a string": ("b.jsonl", b'{"text": 3}', "b.jsonl, line 1: the field 'text' is not a string: 3"),
    "null": ("b.jsonl", b'{"text": null}', "b.jsonl, line 1: the field 'text' is not a string: None"),
    "NUL in JSON": ("b.jsonl", b'{"text": "a\\u0000"}', r"b.jsonl, line 1: not text \(NUL at character 1"),
    "half a character": ("b.jsonl", b'{"text": "\\ud83d"}', "b.jsonl, line 1: not valid JSON"),
    "deep JSON": ("b.jsonl", b"[" * 4000, "b.jsonl, line 1: not valid JSON"),
    "not UTF-8 in JSON": ("b.jsonl", b'{"text": "\xe9"}', "b.jsonl, line 1: not valid JSON"),
    "a long line": ("b.jsonl", b'{"text": "' + b"a" * 9000 + b'"}', "b.jsonl, line 1 is longer than 5,000 bytes"),
    "a long line in the middle": (
        "b.jsonl",
        b'{"text": "a"}\n{"text": "' + b"a" * 9000 + b'"}\n{"text": "b"}\n',
        "b.jsonl, line 2 is longer than 5,000 bytes: shorten it",
    ),
    "not UTF-8": ("b.txt", b"caf\xe9 ", r"b.txt: not UTF-8 \(byte 3\)"),
    "not UTF-8, long": ("b.txt", b"caf\xc3\xa9 " * 100 + b"\xe9 ", r"b.txt: not UTF-8 \(byte 600\)"),
    "half a character, long": ("b.txt", b"caf\xc3\xa9 " * 100 + b"\xc3", r"b.txt: not UTF-8 \(byte 600\)"),
    "NUL": ("b.txt", b"a" * 700 + b" \0 b", "b.txt: not text"),
    "UTF-16": ("b.txt", "text".encode("utf-16"), "b.txt is UTF-16, not plain UTF-8 text"),
    "no cut in JSON": (
        "b.jsonl",
        b'{"text": "a"}\n{"text": "' + b"a" * 2000 + b'"}\n{"text": "b"}\n',
        "b.jsonl, line 2: 2,000 characters without a place to cut them",
    ),
    "no cut": ("b.txt", b"a" * 3000, r"b.txt: 1,\d+ characters without a place to cut them"),
    "a PDF": ("b.pdf", b"%PDF-1.7", "b.pdf is PDF, not plain"),
    "Parquet without its suffix": ("b", b"PAR1", "b is Parquet, not plain UTF-8 text: rename it to end in .parquet"),
    "not gzip": ("b.jsonl.gz", b"plain", "cannot read b.jsonl.gz: Not a gzipped file"),
    "truncated gzip": (
        "b.jsonl.gz",
        gzip.compress(b'{"text": "a"}\n' * 9)[:-9],
        "cannot read b.jsonl.gz: Compressed file ended",
    ),
    "truncated xz": ("b.txt.xz", lzma.compress(b"abc " * 9)[:-9], "cannot read b.txt.xz: Compressed file ended"),
}


@pytest.fixture
def limits(monkeypatch: pytest.MonkeyPatch) -> None:
    for name, value in (("BLOCK", 500), ("LONGEST", 5000), ("UNCUT", 1000)):
        monkeypatch.setattr(f"jaxgpt.data.documents.{name}", value)


@pytest.mark.parametrize("case", BAD)
@pytest.mark.usefixtures("limits")
def test_an_unreadable_document_is_named(settings: Settings, case: str) -> None:
    name, data, message = BAD[case]
    Path("a.jsonl").write_text('{"text": "before"}\n')
    Path(name).write_bytes(data)
    Path("c.txt").write_text("after")
    settings = replace(settings, sources=("a.jsonl", name, "c.txt"), val_fraction=0.0)
    with pytest.raises(UserError, match=message) as raised:
        prepare(settings, Path("out"), 1)
    assert str(raised.value).endswith("to skip such documents, use --on-error skip")
    index = prepare(settings, Path("out"), 1, "skip")
    assert index["skipped"]["documents"] == 1
    assert str(raised.value).startswith(index["skipped"]["first"][0])
    between = "middle" in case or case == "no cut in JSON"
    kept = ["before", *(["a"] if between or "object" in case else []), *(["b"] if between else [])]
    if case == "truncated gzip":
        kept += ["a"] * (index["splits"]["train"]["documents"] - 2)
    tokenizer = load_tokenizer(Path(settings.tokenizer))
    assert shards_of(Path("out"), "train") == llmc_shards(tokenizer, [*kept, "after"], 1000)


def test_unreadable_rows_are_named(settings: Settings, monkeypatch: pytest.MonkeyPatch) -> None:
    pyarrow = pytest.importorskip("pyarrow")
    from pyarrow import parquet

    monkeypatch.setattr("jaxgpt.data.documents.LONGEST", 50)
    column = pyarrow.array([b"good", None, b"b\0d", b"\xe9", b"x" * 99, b"end"])
    column = pyarrow.Array.from_buffers(pyarrow.string(), len(column), column.buffers())
    parquet.write_table(pyarrow.table({"text": column}), "a.parquet")
    settings = replace(settings, sources=("a.parquet",), val_fraction=0.0)
    index = prepare(settings, Path("out"), 1, "skip")
    tokenizer = load_tokenizer(Path(settings.tokenizer))
    assert shards_of(Path("out"), "train") == llmc_shards(tokenizer, ["good", "end"], 1000)
    first = index["skipped"]["first"]
    assert [text.split(":")[0] for text in first] == [
        "a.parquet, row 1",
        "a.parquet, row 2",
        "a.parquet, row 3",
        "a.parquet, row 4 is longer than 50 characters",
    ]
    with pytest.raises(UserError, match=r"a.parquet has no column 'body': name one of \['text'\] with --field"):
        prepare(replace(settings, table=Table("body")), Path("other"), 1)


@pytest.mark.parametrize(
    ("change", "message"),
    [
        ({"sources": ("none",)}, "no such file or folder: none; for a Hugging Face dataset: hf:none"),
        ({"sources": ("empty",)}, "empty contains no files"),
        ({"sources": ("empty.txt",)}, "empty.txt is empty"),
        ({"tokenizer": "byte"}, "the tokenizer byte has no end-of-text token"),
        ({"tokenizer": "nowhere"}, "no tokenizer at nowhere"),
        ({"tokenizer": "char"}, "--tokenizer char is not supported: use gpt2, bpe, or the path of a tokenizer or run"),
        ({"sources": (".",)}, "--out out is inside the source ."),
        ({"shard_tokens": 0}, "--shard-tokens must be at least 1"),
        ({"shard_tokens": 2**31}, "--shard-tokens must be at most 2,147,483,647"),
        ({"val_fraction": 1.0}, "--val-fraction must be at least 0 and below 1"),
        ({"vocab_size": 10}, "--vocab-size must be at least 257"),
        (
            {"tokenizer": "bpe", "vocab_size": 70_000, "format": "nanogpt"},
            "16-bit ids cannot hold a vocabulary of 70,000",
        ),
    ],
)
def test_bad_arguments_write_nothing(settings: Settings, change: dict[str, Any], message: str) -> None:
    write_sources()
    Path("empty").mkdir()
    Path("empty.txt").touch()
    with pytest.raises(UserError, match=message):
        prepare(replace(settings, **change), Path("out"), 1)
    assert not Path("out").exists()


def test_bpe_is_trained_on_a_sample_of_every_file(settings: Settings, monkeypatch: pytest.MonkeyPatch) -> None:
    Path("src").mkdir()
    for letter in "abc":
        Path(f"src/{letter}.jsonl").write_text(f'{{"text": "{letter * 8} {letter * 8}"}}\n' * 500)
    monkeypatch.setattr("jaxgpt.data.documents.BLOCK", 100)
    monkeypatch.setattr("jaxgpt.data.prepare.BPE_SAMPLE", 3000)
    read = 0

    def counting(pieces: Iterator[Sequence[str]], vocab_size: int) -> Any:
        nonlocal read
        kept = [*pieces]
        read = sum(len(text) for texts in kept for text in texts)
        return train_bpe(kept, vocab_size)

    monkeypatch.setattr("jaxgpt.data.prepare.train_bpe", counting)
    index = prepare(replace(settings, tokenizer="bpe", vocab_size=290), Path("out"), 1)
    assert 2000 < read < 4000
    tokenizer = load_tokenizer(Path("out/tokenizer.json"))
    assert all(len(tokenizer.encode(letter * 8)) == 1 for letter in "abc")
    assert index["tokenizer"]["name"] == "bpe"
    assert index["tokenizer"]["vocab_size"] == tokenizer.vocab_size


def test_the_end_token_of_a_model_separates_documents(settings: Settings) -> None:
    """The files beside its tokenizer.json name it, and are written again."""
    value = json.loads(Path(settings.tokenizer).read_text())
    value["added_tokens"].append(value["added_tokens"][0] | {"id": len(value["model"]["vocab"]), "content": "<|turn|>"})
    Path("model").mkdir()
    Path("model/tokenizer.json").write_text(json.dumps(value))
    Path("model/generation_config.json").write_text(json.dumps({"eos_token_id": [len(value["model"]["vocab"]), 0]}))
    Path("src").mkdir()
    Path("src/a.txt").write_text("one text " * 900)
    index = prepare(replace(settings, tokenizer="model"), Path("out"), 1)
    assert index["tokenizer"]["end_id"] == len(value["model"]["vocab"])
    data = open_data(config(documents="mask"))
    assert data.train.end_ids == (len(value["model"]["vocab"]), 0)
    assert data.train.take(0, 1) == len(value["model"]["vocab"])


def test_large_vocabularies_have_32_bit_ids(settings: Settings) -> None:
    value = json.loads(Path(settings.tokenizer).read_text())
    value["model"]["vocab"]["never"] = 70_000
    Path("large.json").write_text(json.dumps(value))
    Path("a.txt").write_text("text")
    prepare(replace(settings, sources=("a.txt",), tokenizer="large.json"), Path("out"), 1)
    data = Path("out/train_000000.bin").read_bytes()
    assert struct.unpack("<3i", data[:12])[:2] == (20240801, 7)
    ids = open_data(Config(data=DataConfig(path="out", train_fraction=1.0), model=ModelConfig(block_size=1))).train
    tokenizer = load_tokenizer(Path("large.json"))
    assert ids.take(0, len(ids)).tolist() == [tokenizer.eos_id, *tokenizer.encode("text").tolist()]
    assert np.frombuffer(data[1024:], "<u4").tolist() == ids.take(0, len(ids)).tolist()


@pytest.mark.ci
def test_a_dataset_folder_is_read(settings: Settings) -> None:
    datasets = pytest.importorskip("datasets")
    assert datasets
    texts = documents(30)
    Path("set").mkdir()
    Path("set/train.jsonl").write_text("".join(json.dumps({"text": text}) + "\n" for text in texts))
    settings = replace(settings, sources=("hf:set",), val_fraction=0.0)
    prepare(settings, Path("out"), 1)
    tokenizer = load_tokenizer(Path(settings.tokenizer))
    assert shards_of(Path("out"), "train") == llmc_shards(tokenizer, texts, 1000)
    with pytest.raises(UserError, match="hf:set has no column 'body'"):
        prepare(replace(settings, table=Table("body")), Path("other"), 1)
    with pytest.raises(UserError, match=r"cannot open hf:set: .*[Ss]plit"):
        prepare(replace(settings, table=Table("text", "", "test")), Path("another"), 1)


def test_a_dataset_that_cannot_be_reached_is_one_line(settings: Settings, monkeypatch: pytest.MonkeyPatch) -> None:
    pytest.importorskip("datasets")
    monkeypatch.setattr("jaxgpt.data.documents.reachable", lambda: False)
    with pytest.raises(UserError, match="hf:no/where: no such folder, and the Hugging Face Hub cannot be reached"):
        prepare(replace(settings, sources=("hf:no/where",)), Path("out"), 1)


def test_tiktoken_gives_the_same_ids(tokenizer_path: Path, data_dir: Path) -> None:
    pytest.importorskip("tiktoken")
    texts = [TEXT, *documents(50, 3), " " * 500 + "a" * 500, "\r\n\t x\u3000y\u00a0 \x1c z"]
    for path in (tokenizer_path, data_dir / "gpt2-bpe"):
        tokenizer = load_tokenizer(path)
        fast, library = batch_encoder(tokenizer)
        assert library == "tiktoken"
        for text, ids in zip(texts, fast(texts), strict=True):
            assert ids.tolist() == tokenizer.encode(text).tolist()


@pytest.mark.parametrize("pattern", LLAMA3)
def test_tiktoken_gives_the_same_ids_with_the_words_of_llama_and_qwen(tokenizer_path: Path, pattern: str) -> None:
    pytest.importorskip("tiktoken")
    value = json.loads(tokenizer_path.read_text())
    level = value["pre_tokenizer"] | {"use_regex": False}
    value["pre_tokenizer"] = {"type": "Sequence", "pretokenizers": [split_by(pattern), level]}
    Path("llama.json").write_text(json.dumps(value))
    tokenizer = load_tokenizer(Path("llama.json"))
    fast, library = batch_encoder(tokenizer)
    assert library == "tiktoken"
    texts = [TEXT, *documents(200, 4), "12345 x'S  \r\n\r\n y!!\n z", " \n " * 9 + "١٢٣٤ ²½ e\u0301"]
    for text, ids in zip(texts, fast(texts), strict=True):
        assert ids.tolist() == tokenizer.encode(text).tolist()


@pytest.mark.ci
def test_tiktoken_classifies_every_character_as_tokenizers_does(data_dir: Path) -> None:
    """Words depend on the class of each character alone, and the two libraries have tables of Unicode of their own."""
    pytest.importorskip("tiktoken")
    tokenizer = load_tokenizer(data_dir / "gpt2-bpe")
    fast, library = batch_encoder(tokenizer)
    assert library == "tiktoken"
    planes = [*range(0x32000), *range(0x32000, 0x110000, 97)]  # there are hardly any characters beyond the third plane
    characters = [chr(c) for c in planes if not 0xD800 <= c < 0xE000]
    for i in range(0, len(characters), 1000):
        text = "".join(f"x{c}x1{c}1!{c}! {c}{c} " for c in characters[i : i + 1000])
        assert fast([text])[0].tolist() == tokenizer.encode(text).tolist(), hex(ord(characters[i]))


def test_a_tokenizer_with_other_merges_is_not_given_to_tiktoken(tokenizer_path: Path) -> None:
    pytest.importorskip("tiktoken")
    value = json.loads(tokenizer_path.read_text())
    value["model"]["merges"] = value["model"]["merges"][1:]  # its token can no longer be reached
    Path("other.json").write_text(json.dumps(value))
    assert batch_encoder(load_tokenizer(Path("other.json")))[1] == "tokenizers"


def test_tiktoken_does_not_run_a_tokenizer_that_takes_whole_words(tokenizer_path: Path) -> None:
    """With `ignore_merges`, a token encoded alone is itself whatever the merges are, so that proves nothing."""
    pytest.importorskip("tiktoken")
    value = json.loads(tokenizer_path.read_text())
    for ignore, expected in ((False, "tiktoken"), (True, "tokenizers")):
        value["model"]["ignore_merges"] = ignore
        Path("tokenizer.json").write_text(json.dumps(value))
        assert batch_encoder(load_tokenizer(Path("tokenizer.json")))[1] == expected


def test_empty_files_take_no_share_of_the_sample(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr("jaxgpt.data.documents.BLOCK", 300)
    monkeypatch.setattr("jaxgpt.data.pieces.PIECE", 50)
    Path("src").mkdir()
    Path("src/text.txt").write_text("some words. " * 2000)
    for i in range(20):
        Path(f"src/empty{i}.txt").touch()
    files = list_sources(["src"], Table())[1]
    texts = sample_text(files, Table(), find_by(GPT2_CUTS), 20_000, skip=True)
    assert len("".join(itertools.chain.from_iterable(texts))) >= 20_000


def test_bytes_that_are_not_text_are_named(tokenizer_path: Path) -> None:
    tokenizer = load_tokenizer(tokenizer_path)
    for encode in (tokenizer.encode, tokenizer.encode_special):
        with pytest.raises(UserError, match=r"the text has '.udcff' at position 1, which is not a valid character"):
            encode("a\udcff")
