"""Opening data: every kind gives the same splits, windows, fingerprints and descriptions."""

from __future__ import annotations

import hashlib
import json
import os
import re
from dataclasses import replace
from pathlib import Path
from typing import Any

import numpy as np
import pytest
from helpers import TEXT, small_run
from hypothesis import given
from hypothesis import strategies as st
from tokenizers import Tokenizer, decoders, models, pre_tokenizers

from jaxgpt.config import Config, DataConfig
from jaxgpt.data import Batches, Tokens, open_data, with_path
from jaxgpt.data.mixed_sources import MixedData
from jaxgpt.data.prepared.sources import find_source
from jaxgpt.data.run_tokenizer import vocab_size
from jaxgpt.data.source_kinds import check_sources
from jaxgpt.data.tokenizers.new import make_tokenizer
from jaxgpt.data_files import has_documents
from jaxgpt.errors import UserError
from jaxgpt.report.text_bytes import bytes_per_token

END = "<EOS>"


def config_of(path: Path | str, **data: object) -> Config:
    return replace(small_run(), data=DataConfig(path=str(path), **data))  # type: ignore[arg-type]


@pytest.fixture
def inputs() -> None:
    """Write one input of each kind."""
    Path("text.txt").write_text(TEXT)
    Path("texts").mkdir()
    Path("texts/a.txt").write_text(TEXT[:3000])
    Path("texts/b.txt").write_text(TEXT[3000:])
    Path("ends.txt").write_text(f"one two three {END} " * 60)
    Path("ids").mkdir()
    ids = (np.arange(3000) * 7 % 90).astype("<u2")
    ids[:2500].tofile("ids/train.bin")
    ids[2500:].tofile("ids/val.bin")
    talks = ({"prompt": f"{n} times 7?", "completion": f" {n * 7}"} for n in range(60))
    Path("talks.jsonl").write_text("".join(json.dumps(talk) + "\n" for talk in talks))


CASES = {
    "text": (DataConfig(path="text.txt"), "char", True),
    "folder": (DataConfig(path="texts", tokenizer="bpe", vocab_size=300, train_fraction=0.5), "300", True),
    "all": (DataConfig(path="text.txt", tokenizer="byte", train_fraction=1.0), "256", False),
    "ids": (DataConfig(path="ids", tokenizer="ids"), "90", True),
    "mask": (DataConfig(path="ends.txt", tokenizer="word", documents="mask"), "4", True),
    "pack": (DataConfig(path="ends.txt", tokenizer="word", documents="pack"), "4", True),
    "conversations": (DataConfig(path="talks.jsonl", tokenizer="byte"), "256", True),
    "mixture": (DataConfig(mix=("text.txt=3", "texts=1")), "char", True),
    "mixed kinds": (DataConfig(mix=("ids=3", "text.txt=1"), tokenizer="byte", train_fraction=1.0), "256", True),
}


@pytest.mark.parametrize("kind", CASES)
@pytest.mark.usefixtures("inputs")
def test_every_kind_obeys_the_laws_of_data(kind: str) -> None:
    data, size, held_out = CASES[kind]
    config = replace(small_run(), data=data)
    config = config.with_model(vocab_size=90) if data.tokenizer == "ids" else config
    found = open_data(config)
    found.check(config)
    T = config.model.block_size
    assert found.held_out == held_out
    assert found.tokenizer.vocab_size == (len(set(TEXT)) if size == "char" else int(size)) == vocab_size(config)
    for split in (found.train, found.val):
        rows = split.windows(np.asarray(split.eval_starts(T, T)), T)
        assert rows.shape[1:] == ((T, 3) if has_documents(config) else (T + 1,))
        assert split.has_documents == has_documents(config)
        ids = rows[..., :2]
        assert -1 <= ids.min() <= ids.max() < found.tokenizer.vocab_size
        assert len(split.take(0, len(split))) == len(split)
    batch = Batches.of(config, found.train).at(3)
    assert batch[:].shape == (config.train.batch_size, *rows.shape[1:])
    again = open_data(config, found.tokenizer)
    assert again.facts() == found.facts()
    assert again.source == found.source
    if isinstance(found, MixedData):
        digest = hashlib.sha256("\n".join(part.fingerprint for part in found.parts).encode())
        assert found.fingerprint == digest.hexdigest()
        assert len(found.train) == sum(len(part.train) for part in found.parts)


@pytest.mark.parametrize(
    ("case", "kinds"),
    [
        ("pack", ["text"]),
        ("ids", ["token ids"]),
        ("conversations", ["conversations"]),
        ("mixed kinds", ["mixture", "token ids", "text"]),
    ],
)
@pytest.mark.usefixtures("inputs")
def test_data_have_the_kinds_of_their_sources(case: str, kinds: list[str]) -> None:
    data, *_ = CASES[case]
    config = replace(small_run(), data=data)
    found = open_data(config.with_model(vocab_size=90) if case == "ids" else config)
    assert [found.kind, *(part.kind for part in found.sources if part is not found)] == kinds
    assert found.is_examples == (case == "conversations")


@pytest.mark.parametrize("tokenizer", ["char", "word", "byte", "bpe", "tokenizer.json", "ids"])
@pytest.mark.parametrize(
    "source", ["repeats", "statquest", "texts", "ids", "talks.jsonl", "text.txt=1 ends.txt=2", "ids=1 texts=1"]
)
@pytest.mark.usefixtures("inputs")
def test_the_vocabulary_that_is_counted_is_the_one_that_is_trained(source: str, tokenizer: str) -> None:
    """The size that `plan`, `bench` and `info` use equals the size in training, or both raise the same error."""
    Path("tokenizer.json").write_text(make_tokenizer("bpe", TEXT, 280).to_json())
    named = {"dataset": source} if source in ("repeats", "statquest") else {"mix": tuple(source.split())}
    named = {"path": source} if Path(source).exists() else named
    data = DataConfig(**named, tokenizer=tokenizer, vocab_size=300, documents="flow")  # type: ignore[arg-type]
    config = replace(small_run(), data=data)
    try:
        built = open_data(config).tokenizer.vocab_size
    except UserError as e:
        with pytest.raises(UserError, match=re.escape(str(e)[:30])):
            vocab_size(config)
    else:
        assert vocab_size(config) == built


@pytest.mark.parametrize("path", ["text.txt", "talks.jsonl", "ids"])
@pytest.mark.usefixtures("inputs")
def test_evaluation_on_a_path_uses_all_of_it(path: str) -> None:
    config = config_of("texts", tokenizer="byte")
    run = open_data(config)
    found = open_data(with_path(config, path), run.tokenizer)
    if path == "ids":
        assert (found.held_out, len(found.val)) == (True, 500), "validation files are used if there are any"
    else:
        assert not found.held_out
        assert found.val is found.train
        assert found.fingerprint == hashlib.sha256(Path(path).read_bytes()).hexdigest()
    assert round(bytes_per_token(found) * len(found.val)) == (
        len(TEXT) if path == "text.txt" else len(found.val) if path == "ids" else 0
    )


@pytest.mark.parametrize("fraction", [0.9, 1.0])
@pytest.mark.usefixtures("inputs")
def test_bytes_of_the_validation_text_come_from_its_ids(fraction: float) -> None:
    for tokenizer in ("char", "byte", "bpe"):
        config = config_of("text.txt", tokenizer=tokenizer, vocab_size=300, train_fraction=fraction)
        found = open_data(config)
        text = found.tokenizer.decode(found.val.take(0, len(found.val)))
        assert round(bytes_per_token(found) * len(found.val)) == len(text.encode())
        assert TEXT.endswith(text)
    assert bytes_per_token(open_data(config_of("text.txt", tokenizer="word"))) == 0, "words do not keep white space"


@pytest.mark.parametrize(
    "model", [models.WordLevel({"<unk>": 0, "a": 1}, "<unk>"), models.Unigram([("<unk>", 0), ("a", -1)], 0)]
)
@pytest.mark.parametrize("last", ["a", "b"])
def test_bytes_of_unknown_text_are_unknown(model: Any, last: str, tmp_path: Path) -> None:
    """The unknown token is decoded to its name, not to the text."""
    library = Tokenizer(model)
    library.pre_tokenizer = pre_tokenizers.Split("a", "isolated")
    library.decoder = decoders.Fuse()
    library.save(str(tmp_path / "tokenizer.json"))
    (tmp_path / "text").write_text("a" * 98 + last)
    found = open_data(config_of(str(tmp_path / "text"), tokenizer=str(tmp_path), train_fraction=0.5))
    assert bytes_per_token(found) == (last == "a")


@pytest.mark.parametrize(
    ("data", "message"),
    [
        (DataConfig(path="ids"), r"ids holds token ids, not text: .* --data\.tokenizer"),
        (DataConfig(path="talks.jsonl"), r"talks\.jsonl holds conversations, not text: .* --init-from RUN"),
        (DataConfig(mix=("text.txt=1", "talks.jsonl=1"), tokenizer="byte"), r"add --data\.documents mask"),
        (DataConfig(path="text.txt", documents="mask"), r"mask needs an end-of-text id .* the tokenizer lacks it"),
        (DataConfig(path="text.txt", tokenizer="ids"), r"set --model\.vocab-size"),
        (DataConfig(path="missing.txt"), r"no such file or directory: missing\.txt"),
        (DataConfig(path="missing.jsonl", tokenizer="byte"), r"no such file or directory: missing\.jsonl"),
        (DataConfig(path="missing.bin", tokenizer="byte"), r"no such file or directory: missing\.bin"),
        (DataConfig(path="txt.txt"), r"no such file or directory: txt\.txt \(did you mean text\.txt"),
        (DataConfig(dataset="none"), r"--data\.path"),
    ],
)
@pytest.mark.usefixtures("inputs")
def test_data_that_does_not_fit_is_an_error(data: DataConfig, message: str) -> None:
    with pytest.raises(UserError, match=message):
        open_data(replace(small_run(), data=data))


@pytest.mark.parametrize("name", ["a", "a.txt", "a.bin", "a.json", "a.jsonl", "a.jsonl.gz", "a.parquet"])
def test_a_pipe_is_an_error_and_no_wait(name: str, tmp_path: Path) -> None:
    pipe = tmp_path / name
    os.mkfifo(pipe)
    for read in (
        lambda: open_data(config_of(pipe, tokenizer="byte")),
        lambda: check_sources(config_of(pipe, tokenizer="byte")),
        lambda: find_source(str(pipe)),
    ):
        with pytest.raises(UserError, match="is neither a file nor a directory"):
            read()


def test_a_broken_link_is_an_error_with_its_target(tmp_path: Path) -> None:
    link = tmp_path / "a.txt"
    link.symlink_to(tmp_path / "gone.txt")
    for read in (lambda: open_data(config_of(link)), lambda: find_source(str(link))):
        with pytest.raises(UserError, match=r"a\.txt is a link to a missing file or directory: .*gone\.txt"):
            read()


def test_too_little_data_is_an_error_of_training_only() -> None:
    Path("short.txt").write_text("a b c")
    config = config_of("short.txt", tokenizer="byte")
    with pytest.raises(UserError, match=r"too few tokens for evaluation: 1 in short"):
        open_data(config)
    found = open_data(with_path(config, "short.txt"))
    assert len(found.val) == 5
    with pytest.raises(UserError, match=r"model\.block_size \d+ needs .* there are 5 in short\.txt: lower it"):
        found.check(config)
    Path("ends.txt").write_text(TEXT + END)
    masked = config_of("ends.txt", tokenizer="word", documents="mask", train_fraction=0.5)
    with pytest.raises(UserError, match=r"mask needs an end-of-text id after each document, but ends\.txt"):
        open_data(masked).check(masked)


@given(st.integers(0, len(TEXT) - 1))
def test_the_fingerprint_of_a_text_changes_with_every_character(place: int) -> None:
    def fingerprint(text: str) -> str:
        Path("text.txt").write_text(text)
        return open_data(config_of("text.txt")).fingerprint

    changed = "7" if TEXT[place] != "7" else "8"
    assert fingerprint(TEXT) == fingerprint(TEXT) != fingerprint(TEXT[:place] + changed + TEXT[place + 1 :])


def test_the_fingerprint_of_token_files_covers_their_ids(tmp_path: Path) -> None:
    ids = (np.arange(5000) % 90).astype("<u2")
    config = config_of(tmp_path, tokenizer="ids").with_model(vocab_size=90)
    found = []
    for last in (ids[-1], ids[-1], 3):
        ids[-1] = last
        ids.tofile(tmp_path / "train.bin")
        found.append(open_data(config).fingerprint)
    assert found[0] == found[1] != found[2]


@given(st.integers(1, 40), st.integers(1, 500_000))
def test_chunks_and_dtypes_do_not_change_a_fingerprint(cuts: int, cut: int) -> None:
    ids = np.arange(cuts * 1000) % 251
    one = Tokens([ids.astype(np.uint8)])
    many = Tokens([ids[:cut], ids[cut:].astype(np.uint32)])
    assert one.fingerprint() == many.fingerprint()
    assert one.fingerprint() != Tokens([ids[:-1]]).fingerprint()


def test_a_character_that_a_tokenizer_lacks_is_an_error_with_the_path(tmp_path: Path) -> None:
    path = tmp_path / "a.txt"
    path.write_text(TEXT)
    tokenizer = open_data(config_of(path)).tokenizer
    path.write_text(TEXT + "\u03a9")
    with pytest.raises(UserError, match=r"a\.txt: character '\u03a9' "):
        open_data(config_of(path), tokenizer)
