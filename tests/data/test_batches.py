"""A batch is a function of (seed, step)."""

from __future__ import annotations

from typing import Any

import numpy as np
import pytest
from hypothesis import given
from hypothesis import strategies as st

import jaxgpt
from jaxgpt.data import Batches, Tokens, Windows
from jaxgpt.errors import UserError


def batches(n: int = 1000, T: int = 10, B: int = 4, **kwargs) -> Batches:  # type: ignore[no-untyped-def]
    return Batches(Tokens([np.arange(n)]), T, B, **({"seed": 1} | kwargs))


def starts(b: Batches, step: int) -> np.ndarray:
    return b.at(step).starts_B


sizes = st.tuples(st.integers(12, 300), st.integers(1, 11), st.integers(0, 15), st.integers(1, 9))


@given(sizes, st.integers(0, 2**31 - 1))
def test_an_epoch_uses_every_window_once(size: tuple[int, int, int, int], seed: int) -> None:
    n, T, stride, B = size
    w = batches(n, T, B, stride=stride, seed=seed)
    found = np.concatenate([starts(w, step) for step in range(2 * w.per_epoch // B + 2)])
    for epoch in (0, 1):
        used = np.sort(found[epoch * w.per_epoch :][: w.per_epoch])
        assert (np.diff(used) == (stride or T)).all(), "each once, none left out"
        assert used[0] >= 0
        assert used[-1] + T + 1 <= n
        assert used[0] < (1 if stride else T)
    # Only a remainder shorter than the permitted cost of a phase is dropped.
    assert (w.per_epoch + 2) * (stride or T) + T >= n


def test_epochs_differ_in_order_and_phase() -> None:
    w = batches(B=batches().per_epoch)
    epochs = [starts(w, epoch) for epoch in range(8)]
    assert len({int(s.min()) for s in epochs}) > 1
    assert not (np.argsort(epochs[0]) == np.argsort(epochs[1])).all()


@pytest.mark.parametrize("sampling", ["epoch", "random"])
def test_windows_do_not_change_between_versions(sampling: str) -> None:
    """Resuming with a different version of NumPy or jaxgpt must draw the same windows."""
    known = {
        "epoch": [[865, 715, 505], [741, 461, 131]],
        "random": [[171, 495, 187], [943, 586, 762]],
    }
    w = batches(B=3, sampling=sampling, seed=1337)
    assert [starts(w, 0).tolist(), starts(w, 100).tolist()] == known[sampling]


@pytest.mark.parametrize("B", [1, 3, 8])
def test_another_batch_size_continues_with_the_next_windows(B: int) -> None:
    before = batches()
    after = batches(B=B, first=5 * 4 - 5 * B)  # as after 5 steps of 4 windows
    found = np.concatenate([starts(after, step) for step in range(5, 13)])
    expected = np.concatenate([starts(before, step) for step in range(5, 30)])
    assert (found == expected[: len(found)]).all()


def test_random_windows_reach_both_ends() -> None:
    w = batches(30, 10, 50, sampling="random")
    found = np.concatenate([starts(w, step) for step in range(20)])
    assert found.min() == 0
    assert found.max() == 19


def test_windows_are_inputs_and_the_next_ids() -> None:
    batch = batches().at(3)
    ids = batch[:]
    assert ids.dtype == np.int32
    assert ids.shape == (len(batch), 11) == (4, 11)
    assert (np.diff(ids, axis=1) == 1).all()
    assert (batch[1:3] == ids[1:3]).all()


@pytest.mark.parametrize(("n", "expected"), [(111_540, 1742), (65, 1), (64, 1), (129, 2), (2, 1), (1, 0), (0, 0)])
def test_evaluation_covers_the_split(n: int, expected: int) -> None:
    assert len(Tokens([np.arange(n)]).eval_starts(64, 64)) == expected


def test_a_split_shorter_than_a_window_is_padded() -> None:
    [row] = Windows(Tokens([np.arange(6)]), np.array([0]), 8)[:].tolist()
    assert row == [*range(6), -1, -1, -1]


def test_a_context_longer_than_the_text() -> None:
    with pytest.raises(UserError, match="block_size 10 needs at least 11 training ids, but there are 10: lower it"):
        batches(10, 10)


@given(st.lists(st.integers(0, 3), min_size=12, max_size=60), st.integers(1, 11), st.integers(0, 2**31 - 1))
def test_windows_of_documents(ids: list[int], T: int, seed: int) -> None:
    """A document ends with its end id, here 0 or 3; the last of its inputs predicts nothing."""
    plain = Tokens([np.array(ids)])
    documents = Tokens([np.array(ids)], end_ids=(0, 3))
    batch = Batches(documents, T, 3, seed).at(0)
    assert batch[:].shape == (3, T, 3)
    assert (batch[1:] == batch[:][1:]).all()
    rows = Batches(plain, T, 3, seed).at(0)[:]
    for window, row in zip(batch[:], rows, strict=True):
        assert window[:, 0].tolist() == row[:-1].tolist()
        borders = np.isin(row[:-1], (0, 3))
        assert window[:, 1].tolist() == np.where(borders, -1, row[1:]).tolist()
        assert window[0, 2] == 0
        assert np.diff(window[:, 2]).tolist() == borders[:-1].tolist()


@pytest.mark.parametrize(
    "change",
    [
        {"sampling": "Random"},
        {"stride": -8},
        {"seed": -1},
        {"block_size": 8.5},
        {"batch_size": 0},
        {"step": -1},
        {"ids": [[1]]},
    ],
)
def test_arguments_of_batches_are_checked(change: dict[str, Any]) -> None:
    good = {"ids": np.arange(99), "block_size": np.int8(8), "batch_size": 4, "step": np.array(3)}
    assert draw(**good).shape == (4, 9)
    [name] = change
    with pytest.raises(UserError, match=name):
        draw(**(good | change))


def draw(step: Any, **arguments: Any) -> np.ndarray:
    """Draw the batch of a step."""
    return jaxgpt.batches(**arguments)(step)
