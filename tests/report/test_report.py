"""jaxgpt data report: on everything that `--data.path` accepts."""

from __future__ import annotations

import json
import math
import zlib
from pathlib import Path
from typing import Any

import folders
import numpy as np
import pytest
from folders import SMALL, run_folder
from helpers import TEXT, jaxgpt

from jaxgpt.data import Data, Tokens
from jaxgpt.data.opened import Recorded
from jaxgpt.data.tokenizers.base import CharTokenizer
from jaxgpt.report import describe
from jaxgpt.report.duplicates import document_copies


class WithEnd(CharTokenizer):
    """A tokenizer with the end-of-text id 0."""

    end_ids = (0,)


def described(*args: str) -> dict[str, Any]:
    result = jaxgpt("data", "report", *args, "--json")
    assert result.code == 0, result.err
    values: dict[str, Any] = result.json
    assert jaxgpt("data", "report", *args).code == 0
    return values


def losses(values: dict[str, Any]) -> dict[str, float]:
    return {name: row["loss"] for name, row in values["baselines"].items()}


def test_a_text() -> None:
    Path("text.txt").write_text(TEXT + "7 times 7 is 49, and 7 plus 7 is 14.\n\n")
    found = described("text.txt", "--data.train-fraction", "0.5")
    n = len(TEXT) + 38
    assert (found["train_tokens"], found["validation_tokens"], found["bytes_per_token"]) == (n // 2, n - n // 2, 1)
    assert (found["vocabulary"], found["vocabulary_used"]) == (len(set(TEXT)), len(set(TEXT)))
    assert (found["documents"], found["lines"], found["duplicate_lines"]) == (1, 401, 1)
    each = losses(found)
    assert each["uniform"] == pytest.approx(math.log(len(set(TEXT))))
    assert each["uniform"] > each["unigram"] > each["bigram"] > each["trigram"] > 0
    for row in found["baselines"].values():
        assert row["bits_per_byte"] == pytest.approx(row["loss"] / math.log(2))
    assert 0 < found["overlap"] < 1
    out = jaxgpt("data", "report", "text.txt", "--data.train-fraction", "0.5").out
    assert "\nlines       401, 1 duplicate (0.2%)\n" in out


def test_a_folder() -> None:
    """Each text file is a document."""
    Path("texts").mkdir()
    for name, text in (("a.txt", TEXT), ("b.txt", "12345\n" * 10), ("c.txt", TEXT)):
        Path("texts", name).write_text(text)
    Path("texts", "d.bin").write_bytes(b"\0")
    Path("texts", "e.txt").write_text(TEXT[:20])
    Path("texts", "f.txt").write_text("")
    Path("texts", "config.json").write_text("")
    found = described("texts", "--data.train-fraction", "0.6")
    assert (found["documents"], found["duplicate_documents"]) == (4, 1)
    assert found["overlap"] == pytest.approx(1, abs=0.01)


def test_bits_per_byte_count_the_bytes_of_the_held_out_text() -> None:
    """A token may have several bytes; words do not keep white space, so their text is unknown."""
    Path("text.txt").write_text("".join("aé東"[i * i % 3] for i in range(500)))
    found = described("text.txt", "--data.train-fraction", "0.5")
    held_out = Path("text.txt").read_text()[250:]
    ratio = len(held_out.encode()) / len(held_out)
    for row in found["baselines"].values():
        assert row["bits_per_byte"] == pytest.approx(row["loss"] / math.log(2) / ratio)
    Path("words.txt").write_text("uno  dos\ntres " * 50)
    words = described("words.txt", "--data.tokenizer", "word")
    assert set(words["baselines"]) == {"uniform", "unigram", "bigram", "trigram"}
    assert words["baselines"]["uniform"]["bits_per_byte"] is None


def test_token_files(monkeypatch: pytest.MonkeyPatch) -> None:
    """The values do not depend on the blocks; a single file can be used for training only."""
    Path("tokens").mkdir()
    tokenizer = CharTokenizer(TEXT)
    ids = tokenizer.encode(TEXT)
    ids[:7000].astype("<u2").tofile("tokens/train.bin")
    ids[7000:].astype("<u2").tofile("tokens/val.bin")
    Path("tokenizer.json").write_text(tokenizer.to_json())
    found = described("tokens", "--data.tokenizer", "tokenizer.json")
    assert (found["train_tokens"], found["validation_tokens"]) == (7000, len(ids) - 7000)
    assert (found["bytes_per_token"], found["documents"], found["lines"]) == (1, None, None)
    held_out = zlib.compress(TEXT[7000:].encode(), 9, wbits=-15)
    assert found["baselines"]["gzip"]["bits_per_byte"] == pytest.approx(8 * len(held_out) / len(TEXT[7000:]))
    monkeypatch.setattr(describe, "READ", 100)
    assert described("tokens", "--data.tokenizer", "tokenizer.json") == found
    only_train = ["--data.tokenizer", "tokenizer.json", "--data.train-fraction", "1"]
    single = described("tokens/train.bin", *only_train)
    assert (single["overlap"], single["validation_tokens"], single["evaluated_tokens"]) == (None, 0, 6998)


def test_a_copy_in_token_files_without_validation_files_overlaps(monkeypatch: pytest.MonkeyPatch) -> None:
    """The last file is split; the copy crosses the ends of blocks."""
    Path("tokens").mkdir()
    ids = np.random.default_rng(0).integers(0, 200, 300).astype("<u2")
    ids.tofile("tokens/train_0.bin")
    np.concatenate([ids[:40], ids[:60]]).tofile("tokens/train_1.bin")
    monkeypatch.setattr(describe, "READ", 16)
    found = described("tokens", "--data.train-fraction", "0.85", "--data.tokenizer", "byte")
    assert (found["train_tokens"], found["overlap"]) == (340, 1)


def test_a_long_text_is_sampled(monkeypatch: pytest.MonkeyPatch) -> None:
    Path("text.txt").write_text(TEXT)
    whole = losses(described("text.txt", "--data.train-fraction", "0.5"))
    monkeypatch.setattr("jaxgpt.report.blocks.SAMPLED", 500)
    monkeypatch.setattr(describe, "COUNTED", 5000)
    monkeypatch.setattr(describe, "EVALUATED", 5000)
    part = described("text.txt", "--data.train-fraction", "0.5")
    assert (part["counted_tokens"], part["evaluated_tokens"]) == (4980, 4980)
    assert losses(part)["unigram"] == pytest.approx(whole["unigram"], rel=0.02)
    assert losses(part)["trigram"] == pytest.approx(whole["trigram"], rel=0.2)
    out = jaxgpt("data", "report", "text.txt", "--data.train-fraction", "0.5").out
    assert "validation tokens; n-grams are counted in 4,980 training tokens." in out


def test_documents_end_with_end_tokens() -> None:
    """With data.documents mask, no trigram spans two documents."""
    found = described("statquest")
    assert (found["documents"], found["duplicate_documents"], found["evaluated_tokens"]) == (4, 1, 10)
    assert found["overlap"] is None
    masked = described("statquest", "--data.documents", "mask")
    assert masked["evaluated_tokens"] == 4, (
        "the third tokens of the questions, and the ends of all documents with two words"
    )


@pytest.mark.parametrize("parts", [([1, 2, 3], [4, 0, 5]), ([4, 0, 5], [1, 2, 3])])
def test_a_split_without_end_tokens_is_one_document_if_the_other_has_some(parts: tuple[list[int], list[int]]) -> None:
    train, val = (Tokens([np.array(ids)]) for ids in parts)
    recorded = Recorded(boundary=len(train))  # the splits are different files
    data = Data(train, val, True, WithEnd(TEXT), source="", fingerprint="", recorded=recorded)
    assert document_copies(data, [train, val]) == (3, 0)


@pytest.mark.parametrize("boundary", range(1, 9))
def test_a_document_that_the_split_divides_is_counted_once(boundary: int) -> None:
    train, val = Tokens([np.array([1, 2, 0, 3, 4, 0, 1, 2, 0])]).split(boundary)
    data = Data(train, val, True, WithEnd(TEXT), source="", fingerprint="")
    assert document_copies(data, [train, val]) == (3, 1)


def test_a_run(tmp_path: Path) -> None:
    """A run's data are described with the run's tokenizer, unless a different tokenizer is given."""
    Path("text.txt").write_text(folders.TEXT * 20)
    run = run_folder(tmp_path / "run", SMALL)
    config = json.loads((run / "config.json").read_text())
    config["data"] |= {"path": "text.txt", "tokenizer": "byte", "train_fraction": 0.5}
    (run / "config.json").write_text(json.dumps(config))
    found = described(str(run))
    assert (found["train_tokens"], found["vocabulary"]) == (len(folders.TEXT) * 10, len(set(folders.TEXT)))
    assert described(str(run), "--data.tokenizer", "byte")["vocabulary"] == 256


def test_conversations(tmp_path: Path) -> None:
    """Only targets count: the tokens of the assistant. The tokenizer and the context length come from the run."""
    run = run_folder(tmp_path / "run", SMALL)
    lines = [{"prompt": "to be", "completion": " not to b"}, {"prompt": "b", "completion": " on"}] * 2
    lines += [{"prompt": "to bo", "completion": " not to b"}, {"prompt": "o", "completion": " on"}]  # held out
    Path("talks.jsonl").write_text("\n".join(map(json.dumps, lines)))
    found = described(str(run), "--data.path", "talks.jsonl", "--data.train-fraction", "0.67")
    assert (found["documents"], found["duplicate_documents"]) == (6, 2)
    assert (found["train_tokens"], found["validation_tokens"]) == (36, 18)
    assert found["evaluated_tokens"] == 9 + 2, "the first of ' on' follows one token"
    assert (found["bytes_per_token"], found["lines"]) == (None, None)
    assert "loss on" in found["source"]


@pytest.mark.parametrize(
    ("args", "message"),
    [
        (["report", "shakespear"], "(did you mean shakespeare?)"),
        (["report", "talks.jsonl"], "talks.jsonl holds conversations, not text"),
        (["report", "page.jsonl"], "page.jsonl, line 1: not valid JSON"),
        (["report", "documents.jsonl"], "line 1: no known shape: the fields are ['text']; use one of"),
        (["report", "talks.txt", "--data.documents", "mask"], "data.documents"),
        (["report", "big.bin"], "choose their tokenizer with --data.tokenizer"),
        (["report", "big.bin", "--data.tokenizer", "byte"], "id 33554432 is outside the vocabulary"),
    ],
)
def test_errors(args: list[str], message: str) -> None:
    Path("ab.txt").write_text("ab")
    Path("talks.jsonl").write_text('{"prompt": "a", "completion": "b"}\n')
    Path("page.jsonl").write_text("<html>\n")
    Path("documents.jsonl").write_text('{"text": "a"}\n')
    Path("talks.txt").write_text(TEXT)
    header = np.zeros(256, "<i4")
    header[:3] = 20240801, 7, 4
    Path("big.bin").write_bytes(header.tobytes() + np.array([1, 2, 1 << 25, 3], "<u4").tobytes())
    result = jaxgpt("data", *args)
    assert (result.code, result.out, result.err.count("\n")) == (2, "", 1)
    assert message in result.err


def test_the_sources_of_a_mixture() -> None:
    Path("a.txt").write_text("ab" * 200)
    Path("b.txt").write_text("bc\n" * 300)
    result = jaxgpt("data", "report", "python-char", "--data.mix", "a.txt=3", "b.txt=1")
    assert result.code == 0, result.err
    assert "source      a.txt, 75.0% of the training windows\ndata        a.txt\n" in result.out
    assert "\nsource      b.txt, 25.0% of the training windows\n" in result.out
    assert result.out.count("of 4 tokens occur") == 2, "one vocabulary"
    result = jaxgpt("data", "report", "python-char", "--data.mix", "a.txt=3", "b.txt=1", "--json")
    sources = json.loads(result.out)["sources"]
    assert [(source["path"], source["share"]) for source in sources] == [("a.txt", 0.75), ("b.txt", 0.25)]
