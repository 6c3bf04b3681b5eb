"""The longest span of a sample that occurs in the training data equals a brute-force search."""

from __future__ import annotations

import json
from dataclasses import asdict
from pathlib import Path

import numpy as np
import pytest
from hypothesis import given, settings
from hypothesis import strategies as st

from jaxgpt.config import Config, DataConfig, ModelConfig
from jaxgpt.data import Tokens, open_data
from jaxgpt.data.tokenizers.base import ByteTokenizer
from jaxgpt.errors import UserError
from jaxgpt.report import hashes, memorized
from jaxgpt.report.memorized import Match, longest_matches
from jaxgpt.report.training_spans import find_memorized


def brute_force(sample: list[int], corpus: list[int]) -> Match:
    """Return the longest match, at the first place in the corpus and then in the sample."""
    for n in range(min(len(sample), len(corpus)), 0, -1):
        for place in range(len(corpus) - n + 1):
            for start in range(len(sample) - n + 1):
                if sample[start : start + n] == corpus[place : place + n]:
                    return Match(n, start, place)
    return Match(0, 0, 0)


def ids(high: int, size: int) -> st.SearchStrategy[list[int]]:
    return st.lists(st.integers(0, high), max_size=size)


@given(st.integers(1, 3).flatmap(lambda high: st.tuples(ids(high, 9), ids(high, 40))), st.sampled_from([1, 7, 1 << 18]))
@settings(max_examples=60)
def test_the_match_equals_brute_force(texts: tuple[list[int], list[int]], block: int) -> None:
    sample, corpus = texts
    with pytest.MonkeyPatch.context() as patch:
        patch.setattr(memorized, "SEARCHED", block)
        parts = np.array_split(np.array(corpus, np.uint16), 3)
        assert longest_matches([sample], np.array(corpus, np.int64))[0] == brute_force(sample, corpus)
        assert longest_matches([sample], Tokens(parts))[0] == brute_force(sample, corpus)


def test_planted_spans_are_found_in_one_pass(monkeypatch: pytest.MonkeyPatch) -> None:
    """Find spans of several samples across blocks and at the ends of the corpus, with large ids and colliding hashes."""
    monkeypatch.setattr(memorized, "SEARCHED", 1024)
    rng = np.random.default_rng(0)
    corpus = rng.integers(0, 2**31 - 1, 4_000, np.int32)
    samples = [rng.integers(0, 2**31 - 1, 100, np.int32) for _ in range(4)]
    for sample, place, n in zip(samples, (0, 1000, 3970, 2500), (50, 100, 30, 3), strict=True):
        sample[:n] = corpus[place : place + n]
    expected = [Match(50, 0, 0), Match(100, 0, 1000), Match(30, 0, 3970), Match(3, 0, 2500)]
    assert longest_matches(samples, corpus) == expected
    monkeypatch.setattr(hashes, "mix", lambda x: x & np.uint64(0xF) << np.uint64(60))
    assert longest_matches(samples, corpus) == expected


@pytest.mark.parametrize("sample", [np.zeros((2, 2), int), [0.5], "abc"])
def test_a_sample_must_be_a_row_of_ids(sample: object) -> None:
    with pytest.raises(UserError, match="a row of token ids"):
        longest_matches([sample], np.zeros(3, int))  # type: ignore[arg-type]


def test_the_place_in_a_text() -> None:
    Path("texts").mkdir()
    Path("texts/a.txt").write_text("one line\nanother line\n", "utf-8")
    Path("texts/b.txt").write_text("ümläüte\nzwölf Boxkämpfer jagen Viktor\n" + "held out " * 5, "utf-8")
    config = Config(
        model=ModelConfig(block_size=4), data=DataConfig(path="texts", tokenizer="byte", train_fraction=0.6)
    )
    data = open_data(config)
    ids = list("xzwölf Boxkäx".encode())
    [span, none], validation = find_memorized([ids, []], data)
    assert asdict(span) | {"before": "", "after": ""} == {
        "tokens": 13, "of": 15, "characters": 11, "text": "zwölf Boxkä", "start": 1, "token": 33, "location": "b.txt:2",
        "before": "", "after": "",
    }  # fmt: skip
    assert span.before.endswith("ümläüte\n")
    assert span.after.startswith("mpfer")
    assert none.tokens == 0
    assert validation is not None
    assert 0 < validation < 13


def test_the_place_in_conversations() -> None:
    lines = [{"prompt": f"what is {n}?", "completion": f" it is {n * n}"} for n in range(20)]
    Path("talks.jsonl").write_text("\n".join(map(json.dumps, lines)))
    config = Config(model=ModelConfig(block_size=64), data=DataConfig(path="talks.jsonl", train_fraction=1.0))
    data = open_data(config, ByteTokenizer())
    [span], _ = find_memorized([list(b"it is 169?")], data)
    assert (span.text, span.location) == ("it is 169", f"talks.jsonl, token {span.token}")
    assert span.before.endswith("what is 13? ")


def test_the_place_in_a_mixture() -> None:
    Path("a.txt").write_text("first\n" * 30)
    Path("b.txt").write_text("other\nsecond line\n" * 20)
    config = Config(
        model=ModelConfig(block_size=4),
        data=DataConfig(mix=("a.txt=1", "b.txt=1"), tokenizer="byte", train_fraction=0.8),
    )
    spans, _ = find_memorized([list(b"xfirstx"), list(b"a second line.")], open_data(config))
    assert [(span.text, span.location) for span in spans] == [("first", "a.txt:1"), ("second line", "b.txt:2")]
    assert spans[1].before.endswith("other\n")


def test_spans_and_their_surroundings_are_in_one_source() -> None:
    Path("a.txt").write_text("first\n" * 30)
    Path("b.txt").write_text("once only\n" + "second\n" * 30)
    config = Config(
        model=ModelConfig(block_size=4),
        data=DataConfig(mix=("a.txt=1", "b.txt=1"), tokenizer="byte", train_fraction=0.8),
    )
    data = open_data(config)
    last = data.sources[0].train.take(len(data.sources[0].train) - 4, 4).tolist()
    ids = [*last, *b"once only"]
    [span], _ = find_memorized([ids], data)
    assert (span.text, span.location, span.token) == ("once only", "b.txt:1", len(data.sources[0].train))
    assert (span.before, span.start) == ("", len(last))
    [span], _ = find_memorized([list(b"first\n" * 24)], data)
    assert (span.tokens, span.after) == (len(data.sources[0].train), "")
