"""The data of a run: reading, tokenization, splits and fingerprints."""

from __future__ import annotations

from dataclasses import replace
from pathlib import Path

import numpy as np
import pytest
from helpers import TEXT, small_run
from hypothesis import given
from hypothesis import strategies as st

from jaxgpt.config import Config, DataConfig, UserError
from jaxgpt.data import Tokens, encoded, load_dataset, load_eval_data


def config_of(path: Path | str, **data: object) -> Config:
    return replace(small_run(), data=DataConfig(path=str(path), **data))  # type: ignore[arg-type]


@given(st.integers(0, len(TEXT) - 1))
def test_the_fingerprint_of_a_text_changes_with_every_character(place: int) -> None:
    def fingerprint(text: str) -> str:
        Path("text.txt").write_text(text)
        return load_dataset(config_of("text.txt")).fingerprint

    changed = "7" if TEXT[place] != "7" else "8"
    assert fingerprint(TEXT) == fingerprint(TEXT) != fingerprint(TEXT[:place] + changed + TEXT[place + 1 :])


def test_the_fingerprint_of_token_files_covers_their_ids(tmp_path: Path) -> None:
    ids = (np.arange(5000) % 90).astype("<u2")
    config = config_of(tmp_path, tokenizer="ids").with_model(vocab_size=90)
    found = []
    for last in (ids[-1], ids[-1], 3):
        ids[-1] = last
        ids.tofile(tmp_path / "train.bin")
        found.append(load_dataset(config).fingerprint)
    assert found[0] == found[1] != found[2]


def test_16_bit_ids_serve_a_padded_vocabulary(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    """They are enough if the ids of the tokenizer fit, whatever size the model pads its vocabulary to."""
    monkeypatch.setattr(encoded, "SMALLEST", 1)
    text = tmp_path / "text.txt"
    text.write_text(TEXT)
    config = config_of(text, tokenizer="bpe", vocab_size=300).with_model(vocab_size=70_000)
    found = load_dataset(config)
    assert isinstance(found.train, Tokens)
    assert isinstance(found.train.parts[0], np.memmap)
    assert len(load_eval_data(config, found.tokenizer).tokens) == len(found.val)
    (tmp_path / "tokenizer.json").write_text(found.tokenizer.to_json())
    (tmp_path / "tokens").mkdir()
    ids = np.concatenate([found.train.take(0, len(found.train)), found.val.take(0, len(found.val))])
    ids.astype("<u2").tofile(tmp_path / "tokens" / "train.bin")
    raw = config_of(tmp_path / "tokens", tokenizer=str(tmp_path / "tokenizer.json")).with_model(vocab_size=70_000)
    assert np.array_equal(load_dataset(raw).train.take(0, len(found.train)), found.train.take(0, len(found.train)))
    unknown = config_of(tmp_path / "tokens", tokenizer="ids").with_model(vocab_size=70_000)
    with pytest.raises(UserError, match=r"train\.bin has no header .* too few for a vocabulary of 70,000"):
        load_dataset(unknown)


@given(st.integers(1, 40), st.integers(1, 500_000))
def test_chunks_and_dtypes_do_not_change_a_fingerprint(cuts: int, cut: int) -> None:
    ids = np.arange(cuts * 1000) % 251
    one, many = Tokens([ids.astype(np.uint8)]), Tokens([ids[:cut], ids[cut:].astype(np.uint32)])
    assert one.fingerprint() == many.fingerprint()
    assert one.fingerprint() != Tokens([ids[:-1]]).fingerprint()
