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
    spans = tiles(T, window)
    assert [a for a, *_ in spans] == [0, *(e for _, e, *_ in spans[:-1])]
    assert spans[-1][1] == T
    for a, e, first, end in spans:
        assert first <= max(0, a - (window or T) + 1)  # first query of the tile
        assert end >= min(T, e - 1 + (window or T))  # last key of the tile


def test_tiled_attention_never_stores_t_x_t_scores() -> None:
    scores = re.compile(r"\[(\d+,)*256,256\]")
    held = {
        kernel: bool(scores.search(forward_and_backward.lower(kernel, *ones(256, 4)).compile().as_text()))
        for kernel in (tiled_attention, attend)
    }
    assert held == {tiled_attention: False, attend: True}


def test_rows_can_share_their_documents() -> None:
    q, k, v = (jax.random.normal(jax.random.key(i), x.shape) for i, x in enumerate(ones(130, 2)))
    visible = Visible(row_positions(130)._replace(document_BT=jnp.arange(130)[None] // 50))
    out, expected = (attention(q, k, v, visible, 0.3) for attention in (tiled_attention, attend))
    np.testing.assert_allclose(out, expected, atol=1e-5)


@pytest.mark.parametrize("K", [1, pytest.param(4, marks=pytest.mark.long)])
def test_softmax_and_sums_in_bfloat16_are_float32(K: int) -> None:
    """Scores, softmax and sums are float32, including with grouped heads."""
    text = str(jax.make_jaxpr(forward_and_backward, static_argnums=0)(tiled_attention, *ones(130, K, jnp.bfloat16)))
    types = re.findall(r"\w+:(\w+)\[[\d,]*\] = (?:exp|log|reduce_sum|reduce_max|div)\b", text)
    assert len(types) > 10
    assert set(types) == {"f32"}
