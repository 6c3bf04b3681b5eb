"""Encoding long texts in blocks gives the ids of the whole text, and is cached."""

from __future__ import annotations

import os
import subprocess
import sys
from collections.abc import Sequence
from concurrent.futures import ThreadPoolExecutor
from pathlib import Path

import numpy as np
import pytest
from hypothesis import given, settings
from hypothesis import strategies as st

from jaxgpt.data import corpus, encoded, pieces
from jaxgpt.data.corpus import Text
from jaxgpt.data.encode import SubwordTokenizer, Tokenizer, byte_level, byte_vocab
from jaxgpt.data.encoded import Encoded, count_bytes, encode_text
from jaxgpt.data.tokenizer import make_tokenizer

WORDS = "the cat sat on the mat, and the dog -- it's 2 o'clock!\n\n  They'll say: \"no\".\n"
WORDS += "\u65e5\u672c\u3001\U0001f600 caf\u00e9\n"
PARTS = [*WORDS.split(" "), " ", "  ", "\n", "\n\n ", "\t"]
TEXTS = st.lists(st.sampled_from(PARTS), min_size=1, max_size=60).map("".join).filter(bool)
CACHED = "bpe"


def library() -> object:
    return byte_level(byte_vocab(), [])


def marked() -> SubwordTokenizer:
    from tokenizers import normalizers

    tokenizer = library()
    tokenizer.normalizer = normalizers.Prepend("x")  # type: ignore[attr-defined]
    return SubwordTokenizer(tokenizer)


KINDS = {
    "byte": lambda text: make_tokenizer("byte", text, 0, 0),
    "char": lambda text: make_tokenizer("char", text, 0, 0),
    "word": lambda text: make_tokenizer("word", text, 0, 0),
    "bpe": lambda text: make_tokenizer("bpe", WORDS * 20, 300, 0),
    "unknown": lambda text: marked(),
}


def at_once(kind: str, tokenizer: Tokenizer, text: str) -> list[int]:
    """Return the ids of a text by another implementation: the library's, or a table."""
    if kind in ("char", "word"):
        parts = list(text) if kind == "char" else text.split()
        known = sorted(set(parts)) if kind == "char" else list(dict.fromkeys(parts))
        return [known.index(part) for part in parts]
    whole = library() if kind == "byte" else tokenizer._tokenizer  # type: ignore[attr-defined]
    return list(whole.encode(text, add_special_tokens=False).ids)  # type: ignore[attr-defined]


def ids_of(done: Encoded) -> list[int]:
    return done.tokens.take(0, len(done.tokens)).tolist()


@pytest.mark.parametrize("kind", KINDS)
def test_blocks_give_the_ids_of_the_whole(kind: str, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(corpus, "BLOCK", 40)
    monkeypatch.setattr(pieces, "PIECE", 7)
    monkeypatch.setattr(pieces, "AROUND", 5)

    @settings(max_examples=60)
    @given(TEXTS, st.data())
    def check(text: str, data: st.DataObject) -> None:
        seen: list[tuple[int, int]] = []
        tokenizer, whole = KINDS[kind](text), Text(text.encode(), "")
        done = encode_text(tokenizer, whole, lambda done, total: seen.append((done, total)))
        ids = ids_of(done)
        assert ids == at_once(kind, tokenizer, text)
        assert kind == "byte" or seen[-1] == (len(whole.data), len(whole.data))
        # `count_bytes` counts the bytes of the text from an id to the end.
        begin = data.draw(st.integers(0, len(ids)))
        rest = whole.data[len(whole.data) - count_bytes(tokenizer, whole, done, begin) :]
        if kind == "word":
            assert rest.decode().split() == text.split()[begin:]
        elif kind == "char":
            assert rest.decode() == text[begin:]
        elif kind == "byte":
            assert list(rest) == ids[begin:]
        elif kind == "bpe":  # a token may begin within a character, which counts by its first byte
            assert abs(len(rest) - sum(len(token_bytes(tokenizer, i)) for i in ids[begin:])) < 4

    check()


def token_bytes(tokenizer: Tokenizer, index: int) -> bytes:
    return bytes(byte_vocab()[c] for c in tokenizer._tokenizer.id_to_token(index))  # type: ignore[attr-defined]


@pytest.fixture
def tokenizer(monkeypatch: pytest.MonkeyPatch) -> SubwordTokenizer:
    """A tokenizer whose ids are cached for texts of any size; `calls` counts the pieces that it encoded."""
    monkeypatch.setattr(encoded, "SMALLEST", 1)
    made = KINDS[CACHED]("")
    made.calls = 0
    inner = made.encode_pieces

    def counted(pieces: Sequence[str]) -> np.ndarray:
        made.calls += 1
        return inner(pieces)

    made.encode_pieces = counted
    return made


TEXT = Text((WORDS * 30).encode(), "")


def files() -> list[Path]:
    return sorted(Path(os.environ["JAXGPT_CACHE"], "tokens").glob("*.ids"))


def test_a_text_is_encoded_once(tokenizer: SubwordTokenizer) -> None:
    first = encode_text(tokenizer, TEXT)
    calls = tokenizer.calls
    again = encode_text(tokenizer, TEXT)
    assert tokenizer.calls == calls
    assert ids_of(first) == ids_of(again) == at_once("bpe", tokenizer, WORDS * 30)
    assert (first.blocks == again.blocks).all()
    assert isinstance(again.tokens.parts[0], np.memmap)
    assert again.tokens.parts[0].itemsize == 2
    # Another text, or another tokenizer of the same size, has its own file.
    encode_text(tokenizer, Text(TEXT.data + b" ", ""))
    encode_text(make_tokenizer("bpe", WORDS[::-1] * 20, 300, 0), TEXT)
    assert len(files()) == 3


def test_a_damaged_file_is_rewritten(tokenizer: SubwordTokenizer) -> None:
    ids = ids_of(encode_text(tokenizer, TEXT))
    [path] = files()
    whole = path.read_bytes()

    @settings(max_examples=40)
    @given(st.integers(0, len(whole) - 1), st.sampled_from(["flip", "cut", "extend", "empty"]))
    def check(place: int, damage: str) -> None:
        flipped = whole[:place] + bytes([whole[place] ^ 1]) + whole[place + 1 :]
        path.unlink()  # processes that have mapped it keep the old contents
        path.write_bytes({"flip": flipped, "cut": whole[:place], "extend": whole + whole[:9], "empty": b""}[damage])
        assert ids_of(encode_text(tokenizer, TEXT)) == ids
        assert path.read_bytes() == whole

    check()


def test_a_failed_write_leaves_no_file(tokenizer: SubwordTokenizer, monkeypatch: pytest.MonkeyPatch) -> None:
    def interrupted(pieces: Sequence[str]) -> np.ndarray:
        raise KeyboardInterrupt

    with monkeypatch.context() as patch:
        patch.setattr(tokenizer, "encode_pieces", interrupted)
        with pytest.raises(KeyboardInterrupt):
            encode_text(tokenizer, TEXT)
    assert [p.suffix for p in Path(os.environ["JAXGPT_CACHE"], "tokens").iterdir()] in ([], [".lock"])
    assert len(encode_text(tokenizer, TEXT).tokens)


def test_a_folder_that_cannot_be_written(tokenizer: SubwordTokenizer, tmp_path: Path) -> None:
    (tmp_path / "cache").touch()  # a file at the path of the folder
    assert ids_of(encode_text(tokenizer, TEXT)) == at_once("bpe", tokenizer, WORDS * 30)


def test_least_recently_used_files_are_deleted(tokenizer: SubwordTokenizer, monkeypatch: pytest.MonkeyPatch) -> None:
    texts = [Text(TEXT.data + bytes([n]), "") for n in b"abc"]
    for age, text in zip((300, 100, 200), texts, strict=True):
        encode_text(tokenizer, text)
        newest = max(files(), key=lambda path: path.stat().st_mtime)
        os.utime(newest, (newest.stat().st_mtime - age,) * 2)
    monkeypatch.setattr(encoded, "CACHE_BYTES", 2 * files()[0].stat().st_size + 100)
    encode_text(tokenizer, TEXT)
    assert len(files()) == 2
    calls = tokenizer.calls
    encode_text(tokenizer, TEXT)
    encode_text(tokenizer, texts[1])
    assert tokenizer.calls == calls, "the newest are there"


def test_concurrent_processes_encode_once(tokenizer: SubwordTokenizer) -> None:
    with ThreadPoolExecutor(4) as pool:
        done = list(pool.map(lambda _: ids_of(encode_text(tokenizer, TEXT)), range(4)))
    assert all(ids == done[0] for ids in done)
    assert tokenizer.calls == 1


MEMORY = """
import re, sys
from jaxgpt.data import corpus, encoded

def memory(kind):  # in KiB; the peak that getrusage gives begins with the parent's
    return int(re.search(kind + r":\\s+(\\d+)", open("/proc/self/status").read())[1])

from jaxgpt.data.tokenizer import make_tokenizer
kind, megabytes = sys.argv[1], int(sys.argv[2])
line = "the cat sat on the mat, and the dog: it's 2 o'clock! caf\\u00e9 \\u65e5\\u672c\\n"
tokenizer = make_tokenizer(kind, line, 258, 0)
corpus.BLOCK = 1 << 18
encoded.encode_text(tokenizer, corpus.Text(line.encode() * 3000, ""))  # the library's own memory
text = corpus.Text(line.encode() * (megabytes * 2**20 // len(line.encode())), "")
before = memory("VmRSS")
assert len(encoded.encode_text(tokenizer, text).tokens) > 2**20
print((memory("VmHWM") - before) / 2**10)
"""


@pytest.mark.ci
@pytest.mark.skipif(sys.platform != "linux", reason="reads /proc")
@pytest.mark.parametrize(("kind", "megabytes"), [("byte", 32), ("char", 16), ("bpe", 3)])
def test_memory_is_a_small_multiple_of_the_text(kind: str, megabytes: int) -> None:
    """Encoding all at once takes about 100 times the size of the text."""
    command = [sys.executable, "-c", MEMORY, kind, str(megabytes)]
    done = subprocess.run(command, capture_output=True, text=True, check=True)
    assert float(done.stdout) < 4 * megabytes + 60


def test_long_texts_of_characters_are_cached(monkeypatch: pytest.MonkeyPatch) -> None:
    made = make_tokenizer("char", WORDS, 0, 0)
    first = encode_text(made, TEXT)
    assert not files()
    monkeypatch.setattr(encoded, "SMALLEST_CHAR", 1)
    again = encode_text(made, TEXT)
    assert len(files()) == 1
    assert isinstance(again.tokens.parts[0], np.memmap)
    assert ids_of(again) == ids_of(first)


STREAMED = """
import re, sys
from pathlib import Path
from jaxgpt.data import corpus, encoded
from jaxgpt.data.tokenizer import make_tokenizer

corpus.BLOCK, corpus.MAPPED, encoded.SMALLEST_CHAR = 1 << 18, 1 << 20, 1 << 20
memory = lambda kind: int(re.search(kind + r":\\s+(\\d+)", open("/proc/self/status").read())[1])
before = memory("VmRSS")
text = corpus.read_path(Path(sys.argv[1]))
tokenizer = make_tokenizer("char", text, 0, 0)
tokens = encoded.encode_text(tokenizer, text).tokens
assert len(tokens) == text.characters == 60 * 2**20
print((memory("VmHWM") - before) / 2**10)
"""


@pytest.mark.ci
@pytest.mark.skipif(sys.platform != "linux", reason="reads /proc")
def test_memory_does_not_grow_with_a_text(tmp_path: Path) -> None:
    """Reading and encoding a text of 60 MB takes the memory of a few blocks."""
    path = tmp_path / "a.txt"
    with path.open("wb") as file:
        for _ in range(60):
            file.write((b"the cat sat on a mat\n" * 2**16)[: 2**20])
    done = subprocess.run([sys.executable, "-c", STREAMED, str(path)], capture_output=True, text=True, check=True)
    assert float(done.stdout) < 25
