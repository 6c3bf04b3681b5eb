"""Attention by its definition: positions, visibility, and the precision of the scores."""

from __future__ import annotations

from typing import Any

import jax
import jax.numpy as jnp
import numpy as np
import pytest

from jaxgpt.ops.attention import NO_TOKEN, Positions, Visible, attend, document_positions, row_positions


def seen(visible: Visible) -> list[list[list[int]]]:
    """Return the slots that each query of each row attends to."""
    mask_BTS = np.asarray(visible.mask()[:, 0])
    return [[np.flatnonzero(mask_S).tolist() for mask_S in mask_TS] for mask_TS in mask_BTS]


@pytest.mark.parametrize("window", [0, 1, 3])
def test_a_query_attends_to_tokens_of_its_document_that_are_not_later_within_the_window(window: int) -> None:
    rng = np.random.default_rng(window)
    position_BT = rng.integers(NO_TOKEN, 6, (2, 9))
    document_BT = rng.integers(0, 2, (2, 9))
    key = Positions(jnp.asarray(position_BT), jnp.asarray(document_BT))
    query = Positions(key.position_BT[:, 5:], key.document_BT[:, 5:])  # type: ignore[index]
    found = seen(Visible(query, key, window))
    for row in range(2):
        for t, slots in enumerate(found[row], 5):
            p = position_BT[row]
            d = document_BT[row]
            same_document = [s for s in range(9) if p[s] != NO_TOKEN and d[s] == d[t]]
            near = [s for s in same_document if 0 <= p[t] - p[s] < (window or 99)]
            assert slots == near


def test_without_keys_the_queries_attend_to_one_another() -> None:
    assert seen(Visible(row_positions(4), None, 2)) == [[[0], [0, 1], [1, 2], [2, 3]]]
    assert seen(Visible(document_positions(jnp.array([[3, 3, 1]])))) == [[[0], [0, 1], [2]]]


def test_positions_restart_at_each_document() -> None:
    found, ids = document_positions(jnp.array([[0, 0, 0, 1, 2, 2], [7, 3, 3, 3, 0, 0], [-1, -1, -1, -1, -1, -1]]))
    assert found.tolist() == [[0, 1, 2, 0, 0, 1], [0, 0, 1, 2, 0, 1], [0, 1, 2, 3, 4, 5]]
    assert ids is not None


@pytest.mark.parametrize("K", [1, 2, 4])
def test_attend_equals_numpy(K: int) -> None:
    rng = np.random.default_rng(K)
    q = rng.normal(size=(2, 5, 4, 8))
    k = rng.normal(size=(2, K, 5, 8))
    v = rng.normal(size=(2, K, 8, 5))
    expected = np.zeros((2, 5, 4, 8))
    for b, t, n in np.ndindex(2, 5, 4):
        head = n // (4 // K)
        weights = np.exp(0.3 * k[b, head, : t + 1] @ q[b, t, n])
        expected[b, t, n] = v[b, head, :, : t + 1] @ weights / weights.sum()
    qkv = [jnp.asarray(x, jnp.float32) for x in (q, k, v)]
    found = attend(*qkv, Visible(row_positions(5)), 0.3)
    np.testing.assert_allclose(found, expected, atol=1e-5)


def test_scores_in_bfloat16_are_not_rounded() -> None:
    """The attention weights match float32 weights of the same inputs."""
    rng = np.random.default_rng(0)
    shapes = ((2, 16, 2, 32), (2, 2, 16, 32), (2, 2, 32, 16))
    qkv = [jnp.asarray(4 * rng.normal(size=shape), jnp.bfloat16) for shape in shapes]
    qkv_float32 = [x.astype(jnp.float32) for x in qkv]

    @jax.jit
    def pattern(*qkv: jax.Array) -> Any:
        kept = {}
        attend(*qkv, Visible(row_positions(16)), 0.18, lambda name, x: kept.setdefault(name, x))
        return kept["pattern"]

    np.testing.assert_allclose(pattern(*qkv), pattern(*qkv_float32), atol=1e-5)
