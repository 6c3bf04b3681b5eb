"""Several sources in fixed shares: the source of a row is a function of the row index."""

from __future__ import annotations

from dataclasses import replace
from pathlib import Path

import numpy as np
import pytest
from helpers import small_run
from hypothesis import given
from hypothesis import strategies as st

from jaxgpt.config import DataConfig
from jaxgpt.data import Batches, Mixture, Tokens, open_data, with_path
from jaxgpt.errors import UserError
from jaxgpt.mix import integer_weights
from jaxgpt.report.baselines import baselines

A = Tokens([np.arange(230)])
B = Tokens([np.arange(100) + 1000])
T = 10


def batches(size: int = 8, weights: tuple[int, ...] = (7, 3), **options) -> Batches:  # type: ignore[no-untyped-def]
    return Batches(Mixture.constant([A, B], weights), T, size, **({"seed": 1} | options))


weights = st.lists(st.integers(1, 99), min_size=1, max_size=5)


@given(weights, st.integers(0, 2**40), st.integers(1, 300))
def test_shares_are_exact_at_any_time(shares: list[int], first: int, n: int) -> None:
    """The previous rows of a source are counted without visiting them; shares are exact up to about one row."""
    mixture = Mixture.constant([A] * len(shares), shares)
    rows = np.arange(first, first + n)
    source, before = mixture.source_of_rows(rows)
    for index, weight in enumerate(shares):
        mine = before[source == index]
        assert (np.diff(mine) == 1).all()
        share = weight / sum(shares)
        assert (np.abs(mine - rows[source == index] * share) < 2).all()
    again = [
        np.concatenate(parts) for parts in zip(*(mixture.source_of_rows(row[None]) for row in rows[:9]), strict=True)
    ]
    assert (again == np.stack([source, before])[:, :9]).all()


@pytest.mark.parametrize("stride", [0, 11])
def test_an_epoch_of_each_source_uses_every_window_once(stride: int) -> None:
    mixed = batches(stride=stride)
    starts = np.concatenate([mixed.at(step).starts_B for step in range(40)])
    for tokens, first in ((A, 0), (B, len(A))):
        mine = starts[(starts >= first) & (starts < first + len(tokens))] - first
        alone = Batches(tokens, T, 1, 1, stride=stride).per_epoch
        for epoch in (0, 1):
            used = np.sort(mine[epoch * alone :][:alone])
            assert len(used) == alone
            assert (np.diff(used) == (stride or T)).all()


@pytest.mark.parametrize("sampling", ["epoch", "random"])
def test_a_batch_is_a_function_of_seed_and_step(sampling: str) -> None:
    known = {"epoch": [143, 282, 43, 173, 83, 262, 3, 123], "random": [26, 234, 124, 88, 69, 233, 170, 111]}
    batch = batches(seed=1337, sampling=sampling).at(5)
    assert batch.starts_B.tolist() == known[sampling], "the same in every version"
    assert ((batch[:] >= 1000).all(axis=1) == (batch.starts_B >= len(A))).all()
    assert (batch[2:6] == batch[:][2:6]).all(), "rows of a process"


def test_a_mixture_reads_like_its_sources() -> None:
    mixture = Mixture.constant([A, B], (1, 1))
    assert len(mixture) == 330
    ids = np.concatenate([A.take(0, 230), B.take(0, 100)])
    for start, n in ((0, 330), (229, 2), (230, 1), (225, 0), (0, 3)):
        assert mixture.take(start, n).tolist() == ids[start : start + n].tolist()
    starts = mixture.eval_starts(T, T)
    rows = mixture.windows(starts, T)
    assert len(rows) == len(A.eval_starts(T, T)) + len(B.eval_starts(T, T))
    assert (np.diff(rows, axis=1) == 1).all(), "no window spans two sources"


def write(name: str, ids: np.ndarray) -> str:
    Path(name).mkdir()
    ids[:-100].astype("<u2").tofile(f"{name}/train.bin")
    ids[-100:].astype("<u2").tofile(f"{name}/val.bin")
    return name


def test_token_files_are_mixed() -> None:
    """A mixture has both splits of each source and describes the shares; a different file changes the fingerprint."""
    write("a", np.arange(1000) % 40)
    write("b", np.arange(700) % 50)
    config = small_run().with_model(vocab_size=50)
    data = DataConfig(mix=("a=1", "b=0.25"), tokenizer="ids")
    found = open_data(replace(config, data=data))
    assert isinstance(found.train, Mixture)
    assert (list(found.train.weights), len(found.train), len(found.val)) == ([4, 1], 1500, 200)
    assert found.source == "80.0% 2 token files at a; 20.0% 2 token files at b"
    assert found.held_out
    assert set(Batches.of(replace(config, data=data), found.train).at(0)[:].max(axis=1)) <= set(range(50))
    assert len(open_data(with_path(replace(config, data=data), "b"), found.tokenizer).val) == 100
    write("c", np.arange(700) % 49)
    other = open_data(replace(config, data=replace(data, mix=("a=1", "c=0.25"))))
    assert other.fingerprint != found.fingerprint == open_data(replace(config, data=data)).fingerprint
    with pytest.raises(UserError, match=r"b/train\.bin: id 4\d is outside the vocabulary of 40"):
        open_data(replace(config.with_model(vocab_size=40), data=data))
    with pytest.raises(UserError, match=r"needs at least 151 validation tokens, but there are 100 in a: lower it"):
        open_data(replace(config.with_model(block_size=150), data=data)).check(config.with_model(block_size=150))


def test_texts_are_mixed() -> None:
    """The tokenizer is built from all sources."""
    Path("a.txt").write_text("ab" * 200)
    Path("b.txt").write_text("bc" * 300)
    found = open_data(replace(small_run(), data=DataConfig(mix=("a.txt=1", "b.txt=1"))))
    assert found.tokenizer.decode([0, 1, 2]) == "abc"
    assert found.characters == 1000
    losses = baselines(found)
    assert losses is not None
    assert losses["losses"]["bigram"] < 0.5 < losses["losses"]["unigram"], "n-grams are counted per source"


@pytest.mark.parametrize("fraction", [0.9, 1.0])
def test_a_mixture_is_evaluated_on_its_validation_split(fraction: float) -> None:
    """Validation has no training text if any source has validation data; otherwise it is the training text of all sources."""
    write("a", np.arange(1000) % 40)
    Path("b.txt").write_text("ab" * 300)
    Path("c.txt").write_text("cd" * 300)
    for mix in (("a=1", "b.txt=1"), ("b.txt=1", "c.txt=2")):
        config = replace(small_run(), data=DataConfig(mix=mix, tokenizer="byte", train_fraction=fraction))
        found = open_data(config)
        val = [part.val for part in found.sources if part.held_out or not found.held_out]
        expected = np.concatenate([each.take(0, len(each)) for each in val])
        assert np.array_equal(found.val.take(0, len(found.val)), expected)
        assert found.held_out == (fraction < 1 or "a=1" in mix)


@pytest.mark.parametrize("mix", [("a.txt=1", "./a.txt=1"), ("a.txt=1", "@1000", "link.txt=1")])
def test_a_source_has_one_spelling(mix: tuple[str, ...]) -> None:
    """Otherwise, each spelling has a position of its own, and windows repeat before the epoch ends."""
    Path("a.txt").write_text("ab" * 200)
    Path("link.txt").symlink_to("a.txt")
    with pytest.raises(
        UserError, match=r"the same data twice, as a.txt and (\./a|link).txt: write the path in one way"
    ):
        open_data(replace(small_run(), data=DataConfig(mix=mix)))


def test_weights_are_kept_exactly_or_to_a_millionth() -> None:
    assert integer_weights(("a=0.7", "b=.3", "c=2")) == {"a": 7, "b": 3, "c": 20}
    parts = list(integer_weights(("a=0.333333333", "b=1000", "c=0.0000001")).values())
    assert parts[2] == 1
    assert parts[0] / parts[1] == pytest.approx(0.000333333, rel=2e-3)
