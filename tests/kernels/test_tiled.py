"""Tiled attention: the tiles cover the mask, and no T x T scores are stored. test_table.py tests its values."""

from __future__ import annotations

import re
from functools import partial
from typing import Any

import jax
import jax.numpy as jnp
import numpy as np
import pytest
from hypothesis import given
from hypothesis import strategies as st

from jaxgpt.kernels.tiled import tiled_attention, tiles
from jaxgpt.ops.attention import Visible, attend, row_positions


@partial(jax.jit, static_argnums=0)
def forward_and_backward(attention: Any, q: jax.Array, k: jax.Array, v: jax.Array) -> Any:
    visible = Visible(row_positions(q.shape[1]))
    out, backward = jax.vjp(lambda *qkv: attention(*qkv, visible, 0.3), q, k, v)
    return out, backward(out)


def ones(T: int, K: int, dtype: Any = jnp.float32) -> list[jax.Array]:
    return [jnp.ones(shape, dtype) for shape in ((2, T, 4, 8), (2, K, T, 8), (2, K, 8, T))]


@given(T=st.integers(1, 5000), window=st.integers(0, 5000))
def test_tiles_cover_the_mask(T: int, window: int) -> None:
    """Tiles partition the sequence, and the tiles of a query and of a key it attends to include each other."""
    found = tiles(T, window)
    starts = [tile.start for tile in found]
    ends = [tile.end for tile in found]
    assert starts == [0, *ends[:-1]]
    assert ends[-1] == T

    reach = window or T
    for tile in found:
        assert tile.first_key <= max(0, tile.start - reach + 1)  # first key of the first query
        assert tile.end_query >= min(T, tile.end - 1 + reach)  # after the last query of the last key


def test_tiled_attention_never_stores_t_x_t_scores() -> None:
    scores = re.compile(r"\[(\d+,)*256,256\]")

    def stores_scores(attention: Any) -> bool:
        program = forward_and_backward.lower(attention, *ones(256, 4)).compile()
        return bool(scores.search(program.as_text()))

    assert not stores_scores(tiled_attention)
    assert stores_scores(attend)


def test_rows_can_share_their_documents() -> None:
    q, k, v = (jax.random.normal(jax.random.key(i), x.shape) for i, x in enumerate(ones(130, 2)))
    visible = Visible(row_positions(130)._replace(document_BT=jnp.arange(130)[None] // 50))
    out = tiled_attention(q, k, v, visible, 0.3)
    expected = attend(q, k, v, visible, 0.3)
    np.testing.assert_allclose(out, expected, atol=1e-5)


@pytest.mark.parametrize("K", [1, pytest.param(4, marks=pytest.mark.long)])
def test_softmax_and_sums_in_bfloat16_are_float32(K: int) -> None:
    """Scores, softmax and sums are float32, including with grouped heads."""
    trace = jax.make_jaxpr(forward_and_backward, static_argnums=0)
    text = str(trace(tiled_attention, *ones(130, K, jnp.bfloat16)))
    types = re.findall(r"\w+:(\w+)\[[\d,]*\] = (?:exp|log|reduce_sum|reduce_max|div)\b", text)
    assert len(types) > 10
    assert set(types) == {"f32"}
