"""A batch is a function of (seed, step)."""

from __future__ import annotations

import numpy as np
import pytest
from hypothesis import given
from hypothesis import strategies as st

from jaxgpt.config import UserError
from jaxgpt.data import Tokens, Windows, eval_batch, eval_windows


def windows(n: int = 1000, T: int = 10, **kwargs) -> Windows:  # type: ignore[no-untyped-def]
    return Windows(Tokens([np.arange(n)]), T, **({"seed": 1} | kwargs))


sizes = st.tuples(st.integers(12, 300), st.integers(1, 11), st.integers(0, 15), st.integers(1, 9))


@given(sizes, st.integers(0, 2**31 - 1))
def test_an_epoch_uses_every_window_once(size: tuple[int, int, int, int], seed: int) -> None:
    n, T, stride, B = size
    w = windows(n, T, stride=stride, seed=seed)
    starts = np.concatenate([w.starts(step, B) for step in range(2 * w.per_epoch // B + 2)])
    for epoch in (0, 1):
        used = np.sort(starts[epoch * w.per_epoch :][: w.per_epoch])
        assert (np.diff(used) == (stride or T)).all(), "each once, none left out"
        assert used[0] >= 0
        assert used[-1] + T + 1 <= n
        assert used[0] < (1 if stride else T)
    # At most two strides and a window of tokens are left out.
    assert (w.per_epoch + 2) * (stride or T) + T >= n


def test_epochs_differ_in_order_and_phase() -> None:
    w = windows()
    starts = [w.starts(epoch, w.per_epoch) for epoch in range(8)]
    assert len({int(s.min()) for s in starts}) > 1
    assert not (np.argsort(starts[0]) == np.argsort(starts[1])).all()


def test_a_stride_keeps_documents_whole() -> None:
    w = windows(12, 5, stride=6)
    assert sorted(np.concatenate([w.starts(0, 1), w.starts(1, 1)])) == [0, 6]


def test_any_step_without_the_steps_before() -> None:
    a, b = windows(), windows()
    later = a.batch_at(7, 4)
    for step in range(7):
        b.batch_at(step, 4)
    assert (b.batch_at(7, 4) == later).all()
    assert (windows(seed=2).batch_at(7, 4) != later).any()


@pytest.mark.parametrize("sampling", ["epoch", "random"])
def test_windows_do_not_change_between_versions(sampling: str) -> None:
    """Resuming with another version of NumPy, or of this program, must draw the same windows."""
    known = {"epoch": [[865, 715, 505], [741, 461, 131]], "random": [[171, 495, 187], [943, 586, 762]]}
    w = windows(sampling=sampling, seed=1337)
    assert [w.starts(0, 3).tolist(), w.starts(100, 3).tolist()] == known[sampling]


def test_random_windows_reach_both_ends() -> None:
    w = windows(30, 10, sampling="random")
    starts = np.concatenate([w.starts(step, 50) for step in range(20)])
    assert starts.min() == 0
    assert starts.max() == 19


def test_windows_are_inputs_and_the_next_ids() -> None:
    batch = windows().batch_at(3, 4)
    assert batch.dtype == np.int32
    assert (np.diff(batch, axis=1) == 1).all()


@pytest.mark.parametrize(("n", "expected"), [(111_540, 1742), (65, 1), (64, 1), (129, 2), (2, 1), (1, 0), (0, 0)])
def test_evaluation_covers_the_split(n: int, expected: int) -> None:
    assert eval_windows(Tokens([np.arange(n)]), 64, 64) == expected


def test_evaluation_batches_end_in_padding() -> None:
    tokens = Tokens([np.arange(33)])
    batch = eval_batch(tokens, 8, 8, np.array([3, -1, -1]))
    assert batch[0].tolist() == list(range(24, 33))
    assert (batch[1:] == -1).all()


def test_a_context_longer_than_the_text() -> None:
    with pytest.raises(UserError, match="block_size 10 needs at least 11 ids for training, there are 10"):
        windows(10, 10)
