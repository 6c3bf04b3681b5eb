"""Token files of nanoGPT and llm.c: detection and memory mapping."""

from __future__ import annotations

from pathlib import Path

import numpy as np
import pytest
from hypothesis import given, settings
from hypothesis import strategies as st

from jaxgpt.config import PrepareParams
from jaxgpt.data.prepared.prepare import prepare
from jaxgpt.data.text import read_path
from jaxgpt.data.token_files import is_token_path, open_splits, open_tokens, split_of
from jaxgpt.data.tokenizers.bpe import train_bpe
from jaxgpt.data.tokens import BLOCK, Tokens
from jaxgpt.errors import UserError

IDS = np.arange(5000) % 50_257


def header(magic: int, version: int, count: int) -> bytes:
    numbers = np.zeros(256, "<i4")
    numbers[:3] = magic, version, count
    return numbers.tobytes()


def write(path: Path, kind: str, ids: np.ndarray = IDS) -> Path:
    match kind:
        case "nanogpt":
            path.write_bytes(ids.astype("<u2").tobytes())
        case "llmc":
            path.write_bytes(header(20240520, 1, len(ids)) + ids.astype("<u2").tobytes())
        case "llama":
            path.write_bytes(header(20240801, 7, len(ids)) + (ids + 100_000).astype("<u4").tobytes())
    return path


@pytest.mark.parametrize("kind", ["nanogpt", "llmc", "llama"])
def test_formats_are_detected(kind: str, tmp_path: Path) -> None:
    ids = open_tokens(write(tmp_path / "train.bin", kind))
    assert isinstance(ids, np.memmap)
    assert (ids == IDS + (100_000 if kind == "llama" else 0)).all()


@pytest.mark.parametrize(
    ("data", "message"),
    [
        (b"", "is empty"),
        (b"123", "3 bytes are not 16-bit ids"),
        (header(20240520, 2, 4) + b"12345678", "the header declares version 2 and 4 ids"),
        (header(20240520, 1, 5) + b"12345678", "version 1 and 5 ids, but the file has 1,032 bytes"),
        (header(20240520, 1, 5)[:500], "version 1 and 5 ids"),
        (header(20240520, 1, 0), "is empty"),
        (header(20240520, 1, -1), "version 1 and -1 ids"),
    ],
)
def test_broken_files_raise(data: bytes, message: str, tmp_path: Path) -> None:
    path = tmp_path / "x.bin"
    path.write_bytes(data)
    with pytest.raises(UserError, match=message) as error:
        open_tokens(path)
    assert str(path) in str(error.value)


def test_a_folder_of_shards(tmp_path: Path) -> None:
    write(tmp_path / "fineweb_train_000001.bin", "llmc", IDS[:2000])
    write(tmp_path / "fineweb_train_000002.bin", "llmc", IDS[2000:])
    write(tmp_path / "fineweb_val_000000.bin", "llmc", IDS[:10])
    train, val, _ = open_splits(tmp_path, 0.9, 65_536)
    assert (len(train), len(val)) == (5000, 10)
    assert (train.take(1990, 30) == IDS[1990:2020]).all(), "across two files"


WORDS = ["train", "training", "val", "valid", "validation"]
OTHERS = ["retrieval", "constraint", "interval", "trainer", "Valley", "evaluate", "x", "7", "000001"]


@given(st.lists(st.sampled_from(WORDS + OTHERS), min_size=1, max_size=4), st.sampled_from("_-. +07"), st.booleans())
def test_splits_are_words_of_file_names(words: list[str], between: str, upper: bool) -> None:
    path = Path(between.join(words).upper() + ".bin" if upper else between.join(words) + ".bin")
    meant = [word for word in WORDS if word in words]
    assert split_of(path) == ("" if not meant else "train" if meant[-1].startswith("t") else "val")


def test_other_files_are_skipped(tmp_path: Path) -> None:
    for name in ("train.bin", "._train.bin", "test.bin"):
        write(tmp_path / name, "nanogpt")
    (tmp_path / "input.txt").write_text("text")
    train, val, source = open_splits(tmp_path, 0.9, 65_536)
    assert (len(train), val.take(0, 500).tolist()) == (4500, IDS[4500:].tolist()), "split without validation files"
    assert source == f"1 token file at {tmp_path}"


def test_a_folder_without_training_files(tmp_path: Path) -> None:
    write(tmp_path / "weights.bin", "nanogpt")
    (tmp_path / "training_args.bin").touch()  # a file of transformers' Trainer
    assert not is_token_path(tmp_path)
    assert is_token_path(tmp_path / "weights.bin")
    write(tmp_path / "val.bin", "nanogpt")
    assert is_token_path(tmp_path)
    with pytest.raises(UserError, match=r"rename the files to train\.bin and val\.bin"):
        open_splits(tmp_path, 0.9, 65_536)


@given(st.lists(st.integers(0, 6), min_size=1, max_size=6), st.data())
def test_reading_across_parts(lengths: list[int], data: st.DataObject) -> None:
    whole = np.arange(sum(lengths))
    tokens = Tokens(np.split(whole, np.cumsum(lengths)[:-1]), end_ids=(3,))
    start = data.draw(st.integers(0, len(whole)))
    n = data.draw(st.integers(0, len(whole) - start))
    assert tokens.take(start, n).tolist() == whole[start : start + n].tolist()
    before, after = tokens.split(start)
    assert (len(before), len(after)) == (start, len(whole) - start)
    assert before.end_ids == after.end_ids == (3,), "documents stay documents"
    assert after.take(0, n).tolist() == whole[start : start + n].tolist()


@pytest.mark.parametrize(
    ("ids", "dtype", "wrong"),
    [
        ([7, 9, 300], np.uint16, 300),
        ([7, 2**31 + 5], np.uint32, 2**31 + 5),
        ([7, 2**32 + 5], np.int64, 2**32 + 5),
        ([1, -1], np.int64, -1),
        ([255], np.uint8, 255),
    ],
)
def test_ids_outside_the_vocabulary_are_found_when_they_are_read(ids: list[int], dtype: type, wrong: int) -> None:
    """A wrong id is found in any part, including ids above 32 bits."""
    tokens = Tokens([np.zeros(40, dtype), np.array([0, *ids, 0], dtype), np.zeros(40, dtype)], 200)
    assert tokens.windows(np.array([0, 70]), 10).max() == 0
    with pytest.raises(UserError, match=f"id {wrong} is outside the vocabulary of 200"):
        tokens.windows(np.array([0, 38]), 10)
    with pytest.raises(UserError, match=f"id {wrong} is outside"):
        tokens.take(0, len(tokens))


def test_raw_ids_are_too_small_for_a_large_vocabulary(tmp_path: Path) -> None:
    """32-bit ids without a header would be read as twice as many ids."""
    path = tmp_path / "train.bin"
    path.write_bytes(np.arange(65_500, 65_600, dtype="<u4").tobytes())
    assert len(open_splits(path, 1.0, 65_536).train) == 200
    with pytest.raises(UserError, match=r"train\.bin has no header .* ids, too small for a vocabulary of 65,537"):
        open_splits(path, 1.0, 65_537)
    assert len(open_splits(write(path, "llmc"), 1.0, 65_537).train) == len(IDS)


def test_ends_of_documents_are_found_in_all_blocks_and_parts() -> None:
    ids = np.zeros(BLOCK + 200, np.uint8)
    border = BLOCK + 100
    expected = np.array([3, border - 101, border - 100, border + 7, len(ids) - 1])
    ids[expected] = [8, 9, 9, 8, 9]
    assert np.concatenate([*Tokens([ids[:100], ids[100:]], 10, (9, 8)).document_ends()]).tolist() == expected.tolist()
    assert not any(map(len, Tokens([ids], 10, (7,)).document_ends()))


@pytest.mark.parametrize("dtype", ["<i8", "<u8", "<i4", "<u4", "<f4", "<f8"])
@pytest.mark.parametrize("largest", [60, 50_257])
@pytest.mark.parametrize("padding", [0, -1])
def test_ids_of_a_wider_type_are_rejected(dtype: str, largest: int, padding: int, tmp_path: Path) -> None:
    """`np.array(ids).tofile(...)` writes int64."""
    ids = np.random.default_rng(0).integers(0, largest, 9999)
    if not dtype.startswith("<f"):
        ids[::9] = padding
    path = tmp_path / "train.bin"
    path.write_bytes(ids.astype(dtype).tobytes())
    kind = {"<i8": "int64", "<u8": "int64", "<i4": "int32", "<u4": "int32", "<f4": "float32", "<f8": "float64"}[dtype]
    with pytest.raises(UserError, match=rf"train\.bin has no header, .* looks like .*{kind}.*astype\('uint16'\)"):
        open_splits(path, 0.9, 50_257)


KINDS = {"<i8": "int64", "<i4": "int32", "<f4": "float32", "<f8": "float64"}


@pytest.mark.parametrize("dtype", KINDS)
@pytest.mark.parametrize("vocabulary", [2, 3, 5, 7])
@pytest.mark.parametrize("n", [128, 9999, 3_000_000])
def test_few_distinct_ids_of_a_wider_type_are_rejected(dtype: str, vocabulary: int, n: int) -> None:
    """Such ids are, for example, the bases of DNA, or bits."""
    ids = np.random.default_rng(0).integers(0, vocabulary, n)
    Path("train.bin").write_bytes(ids.astype(dtype).tobytes())
    with pytest.raises(UserError, match=f"looks like .*{KINDS[dtype]}"):
        open_splits(Path("train.bin"), 0.9, 300)


@pytest.mark.parametrize("dtype", KINDS)
@pytest.mark.parametrize("zeros", [0.6, 0.98])
def test_ids_of_a_wider_type_with_many_zeros_are_rejected(dtype: str, zeros: float) -> None:
    """Such ids are, for example, windows that are padded with 0."""
    chosen = np.random.default_rng(0)
    ids = chosen.integers(1, 300, 9999)
    ids[chosen.random(9999) < zeros] = 0
    Path("train.bin").write_bytes(ids.astype(dtype).tobytes())
    with pytest.raises(UserError, match=f"looks like .*{KINDS[dtype]}"):
        open_splits(Path("train.bin"), 0.9, 300)


@pytest.mark.parametrize(
    "ids",
    [
        np.zeros(5000),
        np.tile([5, 0], 4000),
        np.tile([5, 0, 0, 0], 900_000),  # read in blocks
        np.tile([7, *[0] * 47], 100_000),
        np.tile([0, 0x4040], 4000),  # equal to float32 3.0
        np.eye(1, 900_000, 600_000).ravel() * 5,  # a single id
        np.full(5000, 0xFFFF),
    ],
    ids=str,
)
def test_16_bit_ids_at_regular_places_among_zeros_are_not_rejected(ids: np.ndarray) -> None:
    Path("train.bin").write_bytes(ids.astype("<u2").tobytes())
    assert len(open_splits(Path("train.bin"), 1.0, 65_536).train) == len(ids)


@pytest.mark.parametrize("name", ["train.bin", "train.npy"])
def test_numpy_files_are_rejected(name: str, tmp_path: Path) -> None:
    with (tmp_path / name).open("wb") as file:
        np.save(file, IDS.astype("<u2"))
    with pytest.raises(
        UserError, match=r"is a NumPy array.*: write its ids with numpy\.load\(.*\)\.astype\('uint16'\)\.tofile"
    ):
        (open_tokens if name.endswith("bin") else read_path)(tmp_path / name)


@settings(max_examples=200)
@given(
    st.integers(0, 2**32),
    st.integers(1, 65_535),
    st.sampled_from([0.0, 0.2, 0.6, 0.9, 1.0]),
    st.sampled_from(["<u2", "<u4"]),
)
def test_real_ids_are_never_rejected(seed: int, largest: int, zeros: float, dtype: str) -> None:
    """Test random 16-bit ids, including many zeros, and 32-bit ids in llm.c's format."""
    chosen = np.random.default_rng(seed)
    n = int(chosen.integers(2, 4000))
    ids = chosen.integers(0, largest, n, endpoint=True)
    ids[chosen.random(n) < zeros] = 0
    path = Path("train.bin")
    head = b"" if dtype == "<u2" else header(20240801, 7, n)
    path.write_bytes(head + ids.astype(dtype).tobytes())
    train = open_splits(path, 1.0, 65_536).train
    assert train.take(0, n).tolist() == ids.tolist()


def test_documents_of_padded_windows_are_not_rejected() -> None:
    """Test runs of padding, and ids that alternate with the end-of-text id at varying places."""
    chosen = np.random.default_rng(0)
    windows = chosen.integers(1, 300, (50, 64))
    windows[:, 20:] = 0
    words = [[int(i), 0] if i % 7 else [int(i), int(i), 0] for i in chosen.integers(1, 300, 2000)]
    for ids in (windows.ravel(), np.concatenate(words), np.zeros(5000), np.tile([5, 0], 4000)):
        Path("train.bin").write_bytes(ids.astype("<u2").tobytes())
        assert len(open_splits(Path("train.bin"), 1.0, 300).train) == len(ids)


def test_a_prepared_directory_is_not_checked_for_other_types() -> None:
    """Documents of one token between end-of-text ids 0 look like 32-bit ids; the index records the type."""
    Path("tokenizer.json").write_text(train_bpe([["a"]], 300).to_json())
    letters = [chr(97 + n % 26) for n in range(600)]
    Path("a.jsonl").write_text("".join(f'{{"text": "{letter}"}}\n' for letter in letters))
    prepare(["a.jsonl"], Path("out"), PrepareParams("tokenizer.json", format="nanogpt", val_fraction=0.0))
    train = open_splits(Path("out"), 1.0, 300).train
    assert len(train) == 1200
    with pytest.raises(UserError, match="int32"):
        open_splits(Path("out/train.bin"), 1.0, 300)
