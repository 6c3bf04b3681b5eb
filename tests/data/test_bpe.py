"""Training a BPE: equal to the library on usual text, bounded on any text, and interruptible."""

from __future__ import annotations

import random
import signal
import subprocess
import sys
import time
from collections.abc import Iterable, Sequence
from pathlib import Path

import pytest
from helpers import TEXT
from tokenizers import pre_tokenizers, trainers

from jaxgpt.config import PrepareParams
from jaxgpt.data.prepared.prepare import prepare
from jaxgpt.data.text import python_sources
from jaxgpt.data.tokenizers import bpe
from jaxgpt.data.tokenizers.base import EOS_NAMES
from jaxgpt.data.tokenizers.bpe import train_bpe, train_bpe_on_sample
from jaxgpt.data.tokenizers.byte_level import byte_level_bpe
from jaxgpt.data.tokenizers.new import make_tokenizer
from jaxgpt.data.tokenizers.subword import SubwordTokenizer
from jaxgpt.errors import UserError


def library_bpe(texts: Iterable[Sequence[str]], vocab_size: int) -> str:
    """Train with the library alone."""
    tokenizer = byte_level_bpe({}, [])
    alphabet = sorted(pre_tokenizers.ByteLevel.alphabet())
    trainer = trainers.BpeTrainer(
        vocab_size=vocab_size, special_tokens=[EOS_NAMES[0]], initial_alphabet=alphabet, show_progress=False
    )
    tokenizer.train_from_iterator(texts, trainer)
    return SubwordTokenizer(tokenizer).to_json()


@pytest.mark.parametrize(
    "text", [TEXT, python_sources().text[:400_000], "東京は日本の首都である。\n" * 50 + "naïve  \t\n"]
)
def test_usual_text_has_the_vocabulary_of_the_library(text: str) -> None:
    expected = library_bpe([[text]], 600)
    assert train_bpe([[text]], 600).to_json() == expected
    assert make_tokenizer("bpe", text, 600).to_json() == expected


def test_words_up_to_the_limit_are_not_cut() -> None:
    words = " ".join(letter * (bpe.WORD - 1) for letter in "abc")
    assert train_bpe([[words]], 300).to_json() == library_bpe([[words]], 300)


LETTERS = {
    "x": "x",
    "acgt": "ACGT",
    "han": "".join(map(chr, range(0x4E00, 0x4E00 + 3000))),
    "base64": "ABCDabcd0123456789+/",
}


@pytest.mark.parametrize("name", LETTERS)
def test_long_words_take_bounded_time(name: str) -> None:
    """Without a limit, training on 1.5 million letters without a space takes tens of minutes."""
    text = "".join(random.Random(0).choices(LETTERS[name], k=1_500_000 if name == "x" else 60_000))
    began = time.process_time()
    tokenizer = train_bpe([[text]], 400)
    assert time.process_time() - began < 30
    assert tokenizer.decode(tokenizer.encode(text[:5000])) == text[:5000]


def test_distinct_words_are_bounded(monkeypatch: pytest.MonkeyPatch) -> None:
    """The sample is halved until its distinct words fit; repeated words do not count."""
    monkeypatch.setattr(bpe, "DISTINCT", 10_000)
    sizes = list[int]()

    def numbers(size: int) -> Iterable[Sequence[str]]:
        sizes.append(size)
        yield from ([f"{i:010} "] for i in range(size // 11))

    train_bpe_on_sample(numbers, 300, 88_000)
    assert sizes == [88_000, 44_000, 22_000, 11_000, 11_000]
    sizes.clear()

    def repeated(size: int) -> Iterable[Sequence[str]]:
        sizes.append(size)
        yield from (["0123456789 "] for i in range(size // 11))

    train_bpe_on_sample(repeated, 300, 88_000)
    assert sizes == [88_000, 88_000]


def test_a_smaller_sample_covers_every_text(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(bpe, "DISTINCT", 4000)
    numbers = random.Random(0).choices(range(10**9), k=3000)
    texts = [" ".join(f"{letter * 4}{number}" for number in numbers) for letter in "ab"]
    tokenizer = make_tokenizer("bpe", texts, 300)
    for letter in "ab":
        assert len(tokenizer.encode(letter * 4)) == 1


def test_errors_of_the_texts_are_raised() -> None:
    def texts() -> Iterable[Sequence[str]]:
        yield ["a"]
        raise UserError("a.txt, line 2: broken")

    with pytest.raises(UserError, match=r"^a\.txt, line 2: broken$"):
        train_bpe(texts(), 300)


SCRIPT = """
import sys, threading, time
from jaxgpt.cli import main
from jaxgpt.data.tokenizers import bpe

def slow(texts, vocab_size):  # as the library: without the GIL, without looking at signals
    print("training", flush=True)
    threading.Event().wait(60)

bpe._train = slow
sys.exit(main(sys.argv[1:]))
"""


def test_ctrl_c_ends_the_command_while_the_library_trains() -> None:
    Path("a.txt").write_text(TEXT)
    command = [sys.executable, "-c", SCRIPT, "data", "prepare", "a.txt", "--tokenizer", "bpe", "--out", "deep/out"]
    with subprocess.Popen(command, stdout=subprocess.PIPE, stderr=subprocess.PIPE, text=True) as process:
        assert process.stdout is not None
        assert process.stdout.readline() == "training\n"
        process.send_signal(signal.SIGINT)
        began = time.monotonic()
        assert process.wait(60) == 130
        assert time.monotonic() - began < 30
    assert not Path("deep").exists()


@pytest.mark.parametrize("limit", ["fail", "skip"])
def test_an_unreadable_document_ends_the_command_before_the_training(
    limit: str, monkeypatch: pytest.MonkeyPatch
) -> None:
    lines = ['{"text": "hello hello"}'] * 13 + ['{"content": "x"}'] + ['{"text": "hello"}'] * 5
    Path("a.jsonl").write_text("\n".join(lines))
    trained = list[int]()
    train = bpe._train
    monkeypatch.setattr(bpe, "_train", lambda *args: (train(*args), trained.append(1))[0])
    params = PrepareParams("bpe", vocab_size=260, val_fraction=0.0, on_error=limit)
    if limit == "skip":
        assert prepare(["a.jsonl"], Path("out"), params)["skipped"]["documents"] == 1
        return
    with pytest.raises(
        UserError, match=r"a\.jsonl, line 14: no field 'text' .*; to skip such documents, use --on-error skip"
    ):
        prepare(["a.jsonl"], Path("out"), params)
    assert trained == []
    assert not Path("out").exists()
