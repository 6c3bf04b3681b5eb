"""Documents in windows, unsplit if they fit."""

from __future__ import annotations

import itertools
from dataclasses import replace
from pathlib import Path

import numpy as np
import pytest
from hypothesis import given
from hypothesis import strategies as st

from jaxgpt.config import Config, DataConfig, ModelConfig, TrainConfig
from jaxgpt.data import Batches, open_data, packing
from jaxgpt.data.packing import Packed, pack, pack_documents
from jaxgpt.data.tokens import Tokens
from jaxgpt.errors import UserError

END = 9


@given(st.lists(st.integers(1, 20), max_size=60))
def test_packing(sizes: list[int]) -> None:
    """Each item is in one bin, no bin is overfull, and no two bins fit in one."""
    bins = pack(sizes, 20)
    assert sorted(i for each in bins for i in each) == list(range(len(sizes)))
    filled = sorted(sum(sizes[i] for i in each) for each in bins)
    assert not filled or filled[-1] <= 20
    assert len(filled) < 2 or filled[0] + filled[1] > 20
    assert pack(sizes, 20) == bins


@given(
    st.lists(st.integers(0, 40), min_size=1, max_size=30), st.booleans(), st.integers(0, 2**31 - 1), st.integers(0, 3)
)
def test_documents_are_packed_whole(sizes: list[int], ended: bool, seed: int, cut: int) -> None:
    """Every prediction within a document occurs once, after all ids of the document that fit in the window."""
    rng = np.random.default_rng(seed)
    T = 16
    documents = [[*rng.integers(0, END, n).tolist(), END] for n in sizes]
    documents[-1] += [] if ended else [1, 2]  # a last document without an end id
    ids = np.concatenate(documents)
    packed = pack_documents(Tokens(np.array_split(ids, cut + 1), 10, (END,)), T)
    rows = packed.windows(np.arange(packed.window_count(T)), T)
    found = [row[row[:, 2] == s, :2].tolist() for row in rows for s in range(row[:, 2].max() + 1)]
    expected = []
    for document in documents if ended else [*documents[:-1], documents[-1][:-2], documents[-1][-2:]]:
        pairs = [list(pair) for pair in itertools.pairwise(document)]
        expected += [pairs[i : i + T] for i in range(0, len(pairs), T)]
    assert sorted(found) == sorted(expected)
    assert (rows[rows[..., 2] < 0] == [0, -1, -1]).all()
    assert packed.fill(T) == pytest.approx(sum(map(len, expected)) / max(len(rows) * T, 1))


def test_documents_of_one_id_have_no_windows() -> None:
    packed = pack_documents(Tokens([np.full(9, END, np.uint8)], 10, (END,)), 4)
    with pytest.raises(UserError, match="every document has a single training id"):
        Batches(packed, 4, 2, 0)


def test_packing_in_parts(monkeypatch: pytest.MonkeyPatch) -> None:
    """Pieces are packed in parts, each piece once."""
    monkeypatch.setattr(packing, "PACKED_PIECES", 7)
    lengths = np.random.default_rng(0).integers(1, 17, 100)
    packed = Packed.of(Tokens([np.zeros(2000, np.uint8)]), np.arange(100), lengths, 16)
    assert sorted(packed.begins.tolist()) == list(range(100))
    assert packed.lengths.tolist() == lengths[packed.begins].tolist()
    sums = np.add.reduceat(packed.lengths, packed.bounds[:-1])
    assert sums.max() <= 16
    assert len(sums) == packed.window_count(16)


def test_an_end_before_the_first_document_is_no_document() -> None:
    """As in llm.c's format, which `data prepare` writes."""
    tokens = Tokens([np.array([0, 5, 6, 0, 7, 8, 9])], end_ids=(0,))
    assert pack_documents(tokens, 4).documents == 2


def test_the_data_line_shows_the_fill(tmp_path: Path) -> None:
    path = tmp_path / "a.txt"
    path.write_text("a b c d <EOS> " * 20 + "e f <EOS> " * 20)
    data = DataConfig(path=str(path), tokenizer="word", documents="pack", train_fraction=0.5)
    config = Config(data=data, model=ModelConfig(block_size=8), train=TrainConfig(batch_size=3))
    found = open_data(config)
    assert isinstance(found.train, Packed)
    assert isinstance(found.val, Packed)
    # 80 ids are 16 documents of 4 predictions, two to a window.
    assert found.source == f"{path}; 16 documents, windows 100.0% full"
    assert Batches.of(config, found.train).at(0)[:].shape == (3, 8, 3)
    assert len(found.val) == 80
    with pytest.raises(UserError, match=r"data\.documents pack needs an end-of-text id after each document"):
        open_data(replace(config, data=replace(data, tokenizer="byte")))
    path.write_text("a b c <EOS> " * 20 + "<EOS> " * 80)
    with pytest.raises(
        UserError, match=r"no evaluation window: the evaluated documents of .* have a single id each; use lo"
    ):
        open_data(config)
    with pytest.raises(UserError, match=r"data\.stride 3 does not apply to packed documents .*: set it to 0"):
        replace(data, stride=3)
