"""data prepare with separators, copies, short and unreadable documents, changed times, and refusals."""

from __future__ import annotations

import gzip
import json
import os
import random
from collections.abc import Sequence
from dataclasses import replace
from pathlib import Path
from typing import Any

import numpy as np
import pytest
from helpers import TEXT, jaxgpt

from jaxgpt.atomic import write_json
from jaxgpt.config import PrepareParams
from jaxgpt.data.prepared.index import read_index, write_index
from jaxgpt.data.prepared.prepare import prepare
from jaxgpt.data.prepared.skips import skipped_lines
from jaxgpt.data.tokenizers.bpe import train_bpe
from jaxgpt.data.tokenizers.files import load_tokenizer
from jaxgpt.errors import UserError
from jaxgpt.progress import Progress

OUT = Path("out")
MARKER = "<|endoftext|>"


@pytest.fixture(autouse=True)
def tokenizer() -> None:
    Path("tokenizer.json").write_text(train_bpe([[TEXT]], 300).to_json())


def params(**options: Any) -> PrepareParams:
    return PrepareParams("tokenizer.json", val_fraction=0.0, workers=1, **options)


def run(names: Sequence[str], out: Path = OUT, note: Any = lambda text: None, **options: Any) -> dict[str, Any]:
    return prepare(names, out, params(**options), note=note)


def documents(out: Path = OUT) -> list[str]:
    ids = np.fromfile(out / "train_000000.bin", "<u2")[512:]
    return load_tokenizer(Path("tokenizer.json")).decode(ids).split(MARKER)[1:]


def write_lines(path: str, texts: Sequence[str]) -> None:
    Path(path).write_text("\n".join(json.dumps({"text": text}) for text in texts))


@pytest.fixture
def small_blocks(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr("jaxgpt.data.prepared.text_portions.BLOCK", 50)
    monkeypatch.setattr("jaxgpt.data.prepared.piece_batches.BATCH", 100)
    monkeypatch.setattr("jaxgpt.data.tokenizers.cuts.PIECE", 20)
    monkeypatch.setattr("jaxgpt.data.prepared.writing.SAVE_EVERY", -1.0)
    monkeypatch.setattr(os, "fsync", lambda file: None)


def test_markers_are_counted_as_text_by_default() -> None:
    Path("a.txt").write_text(f"one\n{MARKER}\ntwo {MARKER}")
    write_lines("b.jsonl", [f"three {MARKER}"])
    index = run(["a.txt", "b.jsonl"])
    assert index["markers"] == 3
    assert index["splits"]["train"]["documents"] == 2
    result = jaxgpt("data", "prepare", "a.txt", "--tokenizer", "tokenizer.json", "--out", "other")
    assert f"{MARKER} as ordinary text 2 times; to separate documents there, use --separator '{MARKER}'" in result.out


@pytest.mark.parametrize("block", [5, 13, 14, 50, 1 << 20])
def test_a_separator_splits_a_text_for_any_size_of_the_reads(block: int, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr("jaxgpt.data.prepared.text_portions.BLOCK", block)
    stories = [f"{n} little cats,\n\nand {'a long tail ' * (n % 7)}end" for n in range(40)]
    Path("a.txt").write_text(f"\n{MARKER}\n".join([*stories, "", "\n"]))
    index = run(["a.txt"], separator=MARKER)
    assert documents() == stories
    assert index["markers"] == 0
    assert index["splits"]["train"]["documents"] == 40


@pytest.mark.usefixtures("small_blocks")
def test_copies_are_kept_once_in_every_format() -> None:
    long = " ".join(str(n) for n in range(60))
    write_lines("a.jsonl", ["one", "two", long, "one", " one"])
    Path("b.txt").write_text(f"{long}{MARKER}two{MARKER}{long} {MARKER}{long}")
    Path("c.txt.gz").write_bytes(gzip.compress(long.encode()))
    index = run(["a.jsonl", "b.txt", "c.txt.gz"], dedup="exact", separator=MARKER)
    assert documents() == ["one", "two", long, " one", f"{long} "]
    assert index["dropped"] == {"short": 0, "repeated": 5}
    assert index["splits"]["train"]["documents"] == 5


class Killed(BaseException):
    """Simulates kill -9: no handler catches it."""


@pytest.mark.usefixtures("small_blocks")
@pytest.mark.parametrize("seed", range(6))
def test_a_killed_command_with_dropped_documents_continues_with_the_same_bytes(seed: int) -> None:
    chosen = random.Random(seed)
    texts = [" ".join(chosen.choices(["cat", "dog", "a", "the"], k=chosen.choice([0, 1, 2, 40]))) for _ in range(60)]
    write_lines("a.jsonl", texts[:30])
    with Path("a.jsonl").open("a") as file:
        file.write("\n{}\n")
    Path("b.txt").write_text(MARKER.join(texts[20:]))
    options: dict[str, Any] = {"dedup": "exact", "separator": MARKER, "min_characters": 2, "on_error": "skip"}
    calls = 0

    class Killer(Progress):
        def __call__(self, done: int, total: int, detail: str = "") -> None:
            nonlocal calls
            calls += 1
            if calls % 4 == 0:
                raise Killed

    for _ in range(100):
        try:
            prepare(["a.jsonl", "b.txt"], OUT, params(**options), progress=Killer())
            break
        except Killed:
            continue
    assert calls > 8
    whole = run(["a.jsonl", "b.txt"], Path("whole"), **options)
    assert read_index(OUT) == whole | {"kind": "jaxgpt token shards, version 4"}
    assert documents() == documents(Path("whole"))
    kept = dict.fromkeys(text for text in texts if len(text.strip()) >= 2)
    assert documents() == [*kept]


def test_short_documents_are_dropped_on_request() -> None:
    write_lines("a.jsonl", ["one", "", " \n", "  ab ", "abc"])
    assert run(["a.jsonl"], Path("all"))["splits"]["train"]["documents"] == 5
    index = run(["a.jsonl"], min_characters=3)
    assert index["dropped"]["short"] == 3
    assert documents() == ["one", "abc"]


def test_losses_are_listed_by_file_and_reason_with_truncated_files_first() -> None:
    body = "".join(f'{{"text": "document {n}"}}\n' for n in range(1000)).encode()
    write_lines("a.jsonl", ["good"])
    with Path("a.jsonl").open("a") as file:
        file.write("\n" + '{"txt": 1}\n' * 12 + "nonsense\n")
    Path("b.txt").write_bytes(b"caf\xe9")
    Path("z.jsonl.gz").write_bytes(gzip.compress(body)[:-40])
    index = run(["a.jsonl", "b.txt", "z.jsonl.gz"], on_error="skip")
    assert (index["skipped"]["documents"], index["skipped"]["files"]) == (13, 2)
    lines = skipped_lines(index["skipped"])
    read = index["splits"]["train"]["documents"] - 1
    assert lines[0] == (
        "cannot read z.jsonl.gz: Compressed file ended before the end-of-stream marker was reached; the rest of this file "
        f"after line {read} is lost"
    )
    assert lines[1].startswith("b.txt: not UTF-8 text")
    assert lines[2].startswith("12 documents of a.jsonl; the first: a.jsonl, line 2: no field 'text'")
    assert lines[3].startswith("a.jsonl, line 14: not valid JSON")
    assert len(lines) == 4
    out = jaxgpt(
        "data", "prepare", "a.jsonl", "b.txt", "--on-error", "skip", "--tokenizer", "tokenizer.json", "--out", "o"
    ).out
    assert "1 file and 13 documents unreadable:" in out


@pytest.mark.parametrize("is_complete", [True, False])
def test_new_modification_times_do_not_matter(is_complete: bool) -> None:
    write_lines("a.jsonl", [f"document {n}" for n in range(20)])
    notes = list[str]()
    run(["a.jsonl"], Path("whole"))
    start(["a.jsonl"], is_complete)
    os.utime("a.jsonl", (0, 0))
    run(["a.jsonl"], note=notes.append)
    assert "a.jsonl: files have new modification times; sizes and samples of the content are equal" in notes
    assert documents() == documents(Path("whole"))


def start(names: list[str], is_complete: bool) -> None:
    """Prepare documents; without `is_complete`, a kill prevents the last write of the index."""

    class Stopper(Progress):
        def __call__(self, done: int, total: int, detail: str = "") -> None:
            raise Killed

    if is_complete:
        run(names)
        return
    with pytest.MonkeyPatch.context() as patch:
        patch.setattr("jaxgpt.data.prepared.writing.SAVE_EVERY", -1.0)
        with pytest.raises(Killed):
            prepare(names, OUT, params(), progress=Stopper())


@pytest.mark.parametrize("is_complete", [True, False])
def test_changed_content_of_the_same_size_is_rejected(is_complete: bool) -> None:
    write_lines("a.jsonl", ["document 1"] * 20)
    start(["a.jsonl"], is_complete)
    write_lines("a.jsonl", ["document 2"] * 20)
    before = read_index(OUT)
    with pytest.raises(
        UserError, match=r"a\.jsonl: names, modification times or content of its files changed since out was"
    ):
        run(["a.jsonl"])
    assert read_index(OUT) == before


def make_older(out: Path = OUT) -> None:
    """Rewrite an index as jaxgpt 0.1.0 would have written it."""
    index = read_index(out)
    assert index is not None
    for name in ("separator", "dedup", "min_characters"):
        del index["settings"][name]
    for source in index["settings"]["sources"]:
        del source["content"]
    del index["dropped"], index["markers"]
    for name in ("files", "groups"):
        del index["skipped"][name]
    write_json(out / "index.json", index)
    write_index(out, index)


@pytest.mark.parametrize("is_complete", [True, False])
def test_a_directory_of_an_older_version_continues(is_complete: bool) -> None:
    write_lines("a.jsonl", [f"document {n}" for n in range(20)])
    run(["a.jsonl"], Path("whole"))
    start(["a.jsonl"], is_complete)
    make_older()
    run(["a.jsonl"])
    assert documents() == documents(Path("whole"))
    with pytest.raises(UserError, match=r"out was created with dedup 'none', not 'exact'"):
        run(["a.jsonl"], dedup="exact")


def test_an_older_version_that_skipped_a_file_is_rejected() -> None:
    write_lines("a.json", ["a"])
    write_lines("b.jsonl", ["b"] * 20)
    start(["a.json", "b.jsonl"], is_complete=False)
    make_older()
    index = read_index(OUT)
    assert index is not None
    index["skipped"]["documents"] = 1
    write_index(OUT, index)
    with pytest.raises(UserError, match=r"out was created by jaxgpt 0\.1\.0, which skipped a\.json"):
        run(["a.json", "b.jsonl"], on_error="skip")


@pytest.mark.parametrize(
    ("name", "options"),
    [
        ("page.jsonl", {}),
        ("page.jsonl", {"tokenizer": "bpe", "vocab_size": 300}),
        ("late.jsonl", {}),
        ("late.jsonl", {"tokenizer": "bpe", "vocab_size": 300}),
        ("page.jsonl", {"tokenizer": "gpt2"}),  # before the download of the tokenizer
        ("page.jsonl", {"on_error": "skip"}),  # no documents for training
    ],
)
@pytest.mark.parametrize("existing", ["", "deep", "deep/out"])
def test_a_refusal_leaves_nothing_behind(name: str, options: dict[str, Any], existing: str) -> None:
    Path("page.jsonl").write_text("<html>\n")
    write_lines("late.jsonl", ["good"] * 5)
    with Path("late.jsonl").open("a") as file:
        file.write("\n<html>")
    if existing:
        Path(existing).mkdir(parents=True)
    with pytest.raises(UserError, match=r"line . not valid JSON|no documents for training|line .: not valid JSON"):
        prepare([name], Path("deep/out"), replace(params(), **options))
    assert [*map(str, Path().glob("deep/**/*"))] == (["deep/out"] if existing == "deep/out" else [])
    assert Path("deep").exists() == bool(existing)


def test_a_refusal_keeps_the_files_of_an_earlier_command() -> None:
    write_lines("a.jsonl", ["good"] * 50)
    start(["a.jsonl"], is_complete=False)
    before = {path.name for path in OUT.iterdir()}
    with pytest.raises(UserError, match="created with"):
        run(["a.jsonl"], shard_tokens=7)
    assert {path.name for path in OUT.iterdir()} == before


@pytest.mark.parametrize(
    ("files", "expected"),
    [
        ({"a.txt": "one " * 30, "b.txt": "one " * 30}, "b.txt is equal to src/a.txt"),
        ({"a.txt": "one " * 30, "b.jsonl": "one " * 30}, "src/a.txt and src/b.jsonl begin with the same text"),
        ({"v1-a.txt": "one", "v2-a.txt": "two"}, "src/v1-a.txt and src/v2-a.txt are versions of one text"),
        ({"Cat-train.txt": "one", "CatV2-GPT4-train.txt": "two"}, "are versions of one text"),
        (
            {"stories.txt": "one", "stories-v2.txt": "two"},
            "src/stories.txt and src/stories-v2.txt are versions of one text",
        ),
        ({"stories-readme.txt": "one", "stories-v2.txt": "two"}, ""),
        ({"a.txt": "one " * 30, "b.jsonl": "two " * 30}, ""),
        ({"train-00000.txt": "one", "train-00001.txt": "two"}, ""),
        ({"api_v1.txt": "one", "main.txt": "two", "overview2.txt": "three"}, ""),
        ({"Cat-train.txt": "one", "CatV2-valid.txt": "two"}, ""),
    ],
)
def test_one_corpus_that_is_read_twice_is_noted(files: dict[str, str], expected: str) -> None:
    Path("src").mkdir()
    for name, text in files.items():
        if name.endswith("jsonl"):
            write_lines(f"src/{name}", [text.replace(" ", "\n")])
        else:
            Path("src", name).write_text(text)
    notes = list[str]()
    run(["src"], note=notes.append)
    if expected:
        assert len(notes) == 1
        assert expected in notes[0]
    else:
        assert notes == []


def test_links_to_one_file_are_noted() -> None:
    Path("src").mkdir()
    Path("src/a.txt").write_text("text")
    Path("src/b.txt").symlink_to("a.txt")
    notes = list[str]()
    run(["src", "src/a.txt"], note=notes.append)
    copies = "src/b.txt is equal to src/a.txt (and 1 more)"
    assert notes == [f"some text may be read twice: {copies}: pass only the files to read, or use --dedup exact"]


def test_an_output_inside_the_source_is_not_read() -> None:
    Path("src").mkdir()
    write_lines("src/a.jsonl", ["one", "two"])
    before = run(["src"], Path("src/out"))
    notes = list[str]()
    again = run(["src"], Path("src/other"), note=notes.append)
    assert again["splits"] == before["splits"]
    assert notes == ["src: skipped 1 directory of token ids"]
    run(["src"], Path("src/out"))
    with pytest.raises(UserError, match="--out src is a source"):
        run(["src"], Path("src"))
